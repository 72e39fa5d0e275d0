"""A round of MacKay's cycle against dense algebra, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from reference import curvature, ggn, jacobian, loss
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Data as LoaderData
from laplace_sampling import (
    Factored,
    Gaussian,
    IsotropicPrior,
    LayerwisePrior,
    Likelihood,
    LinearisedLaplace,
)
from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.as_likelihood import as_likelihood
from laplace_sampling.training.train_by_evidence import PrecisionUpdate, updated_precisions

NUM = 30
Data = tuple[Tensor, Tensor]


def network(outputs: int = 3, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(5)] if norm else []
    model = nn.Sequential(nn.Linear(2, 5), *middle, nn.Tanh(), nn.Linear(5, outputs)).double()
    if norm:  # running statistics that are not those of the start
        model(torch.randn(40, 2, dtype=torch.float64))
    return model.eval()


def data(kind: str) -> Data:
    x = torch.randn(NUM, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1) if kind == "classification" else x @ torch.ones(2, 2).double()


def bound(likelihood: str | Likelihood) -> Likelihood:
    """Of as many outputs as the networks here have."""
    return as_likelihood(likelihood).bind(Layout.single((3 if likelihood == "classification" else 2,)))


def dense(model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, groups: list[list[int]]) -> list[Tensor]:
    """The blocks of `M` of groups of parameters, by their numbers."""
    with torch.no_grad():
        f = model(x)
    M = ggn(jacobian(model, x), curvature(likelihood, f, y))
    places = torch.arange(len(M)).split([p.numel() for p in model.parameters()])
    indices = [torch.cat([places[number] for number in group]) for group in groups]
    return [M[i][:, i] for i in indices]


def reference(
    model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, groups: list[list[int]], alphas: list[float]
) -> dict[str, Any]:
    """`γ`, new `α` and `b`, and the evidence at these, of a GGN of blocks."""
    blocks, weights = dense(model, likelihood, x, y, groups), list(model.parameters())
    norms = [sum(float(weights[n].detach().square().sum()) for n in group) for group in groups]
    eyes = [torch.eye(len(M), dtype=torch.float64) for M in blocks]
    gammas = [float(torch.linalg.solve(M + a * eye, M).trace()) for M, a, eye in zip(blocks, alphas, eyes, strict=True)]
    new = [gamma / norm for gamma, norm in zip(gammas, norms, strict=True)]
    with torch.no_grad():
        f, ratio, b = model(x), 1.0, None
    if isinstance(likelihood, Gaussian):
        b = likelihood.noise_precisions()
        if likelihood.learn:
            after = (f.numel() - sum(gammas)) / float((f - y).square().sum())
            ratio, b = after / float(b), torch.tensor(after, dtype=torch.float64)
        likelihood = likelihood.with_precision(b)
    evidence = -sum(float(loss(likelihood, f[i], y[i])) for i in range(len(f)))
    for M, alpha, norm, eye in zip(blocks, new, norms, eyes, strict=True):
        evidence -= 0.5 * alpha * norm + 0.5 * float(torch.logdet(eye + ratio * M / alpha))
    return {"gamma": gammas, "alpha": new, "norm": norms, "noise": b, "evidence": evidence}


def check(update: PrecisionUpdate, expected: dict[str, Any]) -> None:
    assert_close(update.effective_dimension.tolist(), expected["gamma"], rtol=1e-6, atol=0)
    assert_close(update.prior_precision.tolist(), expected["alpha"], rtol=1e-6, atol=0)
    assert_close(update.weight_norm.tolist(), expected["norm"], rtol=1e-6, atol=0)
    assert update.log_marginal_likelihood.value == pytest.approx(expected["evidence"], rel=1e-6)
    assert update.log_marginal_likelihood.at == "network"


LIKELIHOODS = [
    "classification",
    Gaussian(3.0),
    Gaussian(3.0, learn=False),
    Gaussian(torch.tensor([2.0, 5.0]), learn=False),
]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_an_update_is_that_of_dense_algebra(likelihood: str | Gaussian, norm: bool) -> None:
    kind = likelihood if isinstance(likelihood, str) else "regression"
    (x, y), model = data(kind), network(3 if kind == "classification" else 2, norm)
    names, groups = ["0", "3"], [[0, 1], [2, 3]]
    if norm:
        names, groups = ["0", "1", "3"], [[0, 1], [2, 3], [4, 5]]
    else:
        names = ["0", "2"]
    starts = [0.7, 2.0, 0.2][: len(groups)]
    # All outputs of few data are taken, and small layers have the block itself.
    prior = LayerwisePrior(layers=dict(zip(names, starts, strict=True)))
    update = updated_precisions(model, likelihood, [(x[:20], y[:20]), (x[20:], y[20:])], prior=prior)
    expected = reference(model, bound(likelihood), x, y, groups, starts)
    assert update.names == tuple(names)
    check(update, expected)
    if kind == "classification":
        assert update.noise_precision is None
        assert update.likelihood.name == "classification"
    else:
        assert isinstance(update.likelihood, Gaussian)
        assert_close(update.likelihood.noise_precisions(), expected["noise"].double())
    if kind == "regression" and expected["noise"].dim() == 0:
        assert update.noise_precision == pytest.approx(float(expected["noise"]))


def test_one_precision_for_all_weights() -> None:
    (x, y), model = data("classification"), network()
    update = updated_precisions(model, "classification", [(x, y)], prior=IsotropicPrior(0.4), method="diagonal")
    assert update.names == ("all",)
    M = torch.diag(dense(model, bound("classification"), x, y, [[0, 1, 2, 3]])[0].diagonal())
    gamma = float((M.diagonal() / (M.diagonal() + 0.4)).sum())
    norm = sum(float(p.detach().square().sum()) for p in model.parameters())
    assert update.effective_dimension.tolist() == pytest.approx([gamma], rel=1e-6)
    assert update.prior == IsotropicPrior(float(update.prior_precision))
    assert float(update.prior_precision) == pytest.approx(gamma / norm, rel=1e-6)


def test_the_next_update_starts_from_the_last() -> None:
    (x, y), model = data("regression"), network(2)
    prior, likelihood = LayerwisePrior(), Gaussian()
    for _ in range(60):
        update = updated_precisions(model, likelihood, [(x, y)], prior=prior)
        prior, likelihood = update.prior, update.likelihood
    # At a fixed point the evidence of the network has its maximum.
    energy = float((update.prior_precision * update.weight_norm).sum())
    assert update.effective_dimension.sum() == pytest.approx(energy, rel=1e-4)
    squares = update.noise_precision * float((model(x) - y).detach().square().sum())
    assert squares + energy == pytest.approx(y.numel(), rel=1e-4)
    assert isinstance(update.prior, LayerwisePrior)
    best = update.log_marginal_likelihood.value
    for name in update.names:
        for factor in (0.8, 1.25):
            layers = {**update.prior.layers, name: factor * update.prior.layers[name]}
            la = LinearisedLaplace(model, update.likelihood, prior=LayerwisePrior(layers=layers), method="kfac")
            la.fit([(x, y)], progress=False)
            assert la.log_marginal_likelihood(at="network").value < best


def test_a_posterior_at_the_precisions_of_an_update() -> None:
    (x, y), model = data("classification"), network()
    update = updated_precisions(model, "classification", [(x, y)])
    la = LinearisedLaplace(model, update.likelihood, prior=update.prior, method="kfac").fit([(x, y)], progress=False)
    assert la.prior_precision_.tolist() == update.prior_precision.tolist()
    evidence = la.log_marginal_likelihood(at="network").value
    assert evidence == pytest.approx(update.log_marginal_likelihood.value, rel=1e-6)


def test_weight_decay_is_in_units_of_the_mean_loss() -> None:
    (x, y), model = data("regression"), network(2)
    update = updated_precisions(model, "regression", [(x, y)])
    assert list(update.weight_decay) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    first, second = update.prior_precision.tolist()
    assert update.noise_precision is not None
    unit = NUM * update.noise_precision
    assert list(update.weight_decay.values()) == pytest.approx([first / unit] * 2 + [second / unit] * 2)


def test_nothing_but_the_result_changes() -> None:
    (x, y), model = data("classification"), network(norm=True)
    model.train()
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)
    first, second = (updated_precisions(model, "classification", loader) for _ in range(2))
    assert first.prior_precision.tolist() == second.prior_precision.tolist()
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_an_update_takes_a_pass_of_all_data_and_a_fixed_number_of_gradients() -> None:
    counted, taken = [], Factored(kind="kfac", num_data=60)
    for num in (500, 1000):
        model, rows = network(), list[int]()
        model.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(len(inputs[0])))
        x = torch.randn(num, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=50)
        update = updated_precisions(model, "classification", loader, method=taken)
        counted.append(sum(rows))
        # Gradients of 60 data for the eigenvectors and of 60 for the eigenvalues, of three outputs each.
        assert update.passes == pytest.approx(3 * 120 / (2 * num))
    assert counted[1] - counted[0] == 500
    assert counted[0] < 500 + 1000


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "krylov"}, ValueError, "Factored"),
        ({"prior": "g-prior"}, ValueError, "GPrior"),
        ({"likelihood": Gaussian(torch.tensor([1.0, 2.0]))}, ValueError, "learn=False"),
        ({"likelihood": Gaussian(observe=torch.eye(2))}, ValueError, "observe"),
        ({"parameters": {"0.weight": torch.ones(5, 2, dtype=torch.bool)}}, ValueError, "masks"),
        ({"data": LoaderData(num_data=3)}, ValueError, "num_data"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    x, y = data("regression")
    settings = {"likelihood": "regression", **settings}
    with pytest.raises(error, match=message):
        updated_precisions(network(2), loader=[(x, y)], **settings)


def test_precisions_stay_within_bounds() -> None:
    (x, y), model = data("regression"), network(2)
    nn.init.zeros_(model[2].bias)
    nn.init.zeros_(model[2].weight)
    update = updated_precisions(model, "regression", [(x, y)])
    # The first layer has no effect, and the last one no norm.
    assert update.prior_precision.tolist() == [1e-8, 1e12]
    assert math.isfinite(update.log_marginal_likelihood.value)
