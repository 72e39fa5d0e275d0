"""Targets of NaN are missing: the same numbers as without these inputs and outputs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal
from torch.testing import assert_close

from laplace_sampling import (
    Categorical,
    Data,
    Evidence,
    Gaussian,
    IsotropicPrior,
    LinearisedLaplace,
    MultiTask,
    Poisson,
)
from laplace_sampling.predictions.prediction import RegressionPrediction

KINDS = ["regression", "heteroscedastic", "binary", "poisson"]
SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("krylov", "subset")]
METHODS = ["exact", "dual", "kfac", "diagonal", "last_layer", *SLOW]
NUM = 40


def fitting_targets(kind: str, f: Tensor) -> Tensor:
    if kind == "binary":
        return (f + torch.randn_like(f) > 0).double()
    return torch.poisson(f.exp()) if kind == "poisson" else f + 0.3 * torch.randn_like(f)


def trained(kind: str, outputs: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with its data, all of whose targets are there."""
    torch.manual_seed(0)
    x = torch.randn(NUM, 3, dtype=torch.float64)
    y = fitting_targets(kind, (2 * x[:, :1] + torch.arange(outputs)).sin())
    width = 2 * outputs if kind == "heteroscedastic" else outputs
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, width)).double()
    loss = {
        "regression": nn.functional.mse_loss,
        "heteroscedastic": lambda f, y: nn.functional.gaussian_nll_loss(f.chunk(2, 1)[0], y, f.chunk(2, 1)[1].exp()),
        "binary": nn.functional.binary_cross_entropy_with_logits,
        "poisson": nn.functional.poisson_nll_loss,
    }[kind]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model, x, y


class OneOutput(nn.Module):
    """One output of a network, which an input chooses: each pair of an input and an output is a datum."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        return (self.model(x) * which).sum(1, keepdim=True)


def pairs(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    datum, output = (~y.isnan()).nonzero().unbind(1)
    return (x[datum], torch.eye(y.shape[1], dtype=y.dtype)[output]), y[datum, output][:, None]


def with_some_missing(y: Tensor) -> Tensor:
    """Some data without any target, and some with one at some of their outputs only."""
    missing = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    missing[5:9] = True
    return y.masked_fill(missing, torch.nan)


def settings_of(method: str) -> dict[str, Any]:
    return {"method": method} | ({"parameters": "last_layer"} if method == "last_layer" else {})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_data_without_targets_count_nowhere(kind: str, method: str) -> None:
    if method == "dual" and kind != "regression":
        pytest.skip("dual is for regressions")
    model, x, y = trained(kind, 1)
    gone = torch.arange(NUM) % 3 == 1
    found = []
    for inputs, targets in ((x[~gone], y[~gone]), (x, y.masked_fill(gone[:, None], torch.nan))):
        la = LinearisedLaplace(model, kind, prior="isotropic", num_samples=8, **settings_of(method))
        if kind == "heteroscedastic":
            la.fit([(inputs, targets)], progress=False)
        else:
            la.fit_hyperparameters([(inputs, targets)], progress=False)
        found.append((la, la.score()))
    (la, score), (other, other_score) = found
    assert torch.allclose(other.prior_precision_, la.prior_precision_, rtol=1e-6)
    if kind == "regression":
        assert torch.allclose(other.noise_precision_, la.noise_precision_, rtol=1e-6)
    assert math.isclose(score.value, other_score.value, rel_tol=1e-6)
    assert other_score.num_data == score.num_data
    assert other.calibration_.num_data == la.calibration_.num_data
    assert math.isclose(other.scale_, la.scale_, rel_tol=1e-9)
    if la.predict(x).function is not None:  # elsewhere samples have the draws of other data
        assert torch.allclose(other.predict(x).covariance(), la.predict(x).covariance(), rtol=1e-5, atol=1e-9)
        ours, theirs = other.score("loo"), la.score("loo")
        assert math.isclose(ours.value, theirs.value, rel_tol=1e-6)
        assert ours.num_data == theirs.num_data == int((~gone).sum())


@pytest.mark.parametrize("method", ["exact", "dual", "last_layer", *SLOW])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_without_targets_count_nowhere(kind: str, method: str) -> None:
    if (method == "dual" and kind != "regression") or kind == "heteroscedastic":
        pytest.skip("of several outputs, and dual is for regressions")
    model, x, y = trained(kind, 3)
    y = with_some_missing(y)
    options: dict[str, Any] = {
        "progress": False,
        "budget": None,
        "tolerance": 0.01,
        "criterion": Evidence(max_steps=60),
    }
    settings = settings_of(method)
    la = LinearisedLaplace(model, kind, num_samples=8, **settings).fit_hyperparameters([(x, y)], **options)
    if method == "last_layer":
        settings = {"method": "exact", "parameters": ["model.2.weight", "model.2.bias"]}
    reference = LinearisedLaplace(OneOutput(model), kind, num_samples=8, **settings)
    reference.fit_hyperparameters([pairs(x, y)], **options)
    # Random probes of an evidence belong to data, which the reference has others of.
    tolerance = 0.05 if method == "krylov" else 1e-5
    assert torch.allclose(la.prior_precision_, reference.prior_precision_, rtol=tolerance)
    evidence, of_reference = (m.log_marginal_likelihood() for m in (la, reference))
    assert math.isclose(evidence.value, of_reference.value, rel_tol=tolerance)
    assert math.isclose(evidence.data_fit, of_reference.data_fit, rel_tol=tolerance)
    if kind == "regression":
        assert torch.allclose(la.noise_precision_, reference.noise_precision_, rtol=tolerance)
    if method in ("exact", "subset", "last_layer"):
        variance = la.predict(x).variance.flatten()
        every = (x.repeat_interleave(3, 0), torch.eye(3, dtype=y.dtype).repeat(NUM, 1))
        assert torch.allclose(variance, reference.predict(every).variance.flatten(), rtol=1e-4, atol=1e-9)


def test_each_output_has_the_noise_of_its_targets() -> None:
    model, x, y = trained("regression", 3)
    x, y = x[9:20], with_some_missing(y)[9:20]  # fewer targets than weights: in observation space
    la = LinearisedLaplace(model, Gaussian(torch.ones(3)), prior="isotropic", method="exact")
    la.fit_hyperparameters([(x, y)], progress=False)
    b, given = la.noise_precision_, ~y.isnan()
    assert b is not None
    free = given.sum(0) - (b * la.predict(x).variance * given).sum(0)
    errors = (y - model(x).detach()).nan_to_num().square().sum(0)
    assert torch.allclose(b, free / errors, rtol=1e-4)


def dense_posterior(model: nn.Module, x: Tensor, y: Tensor, alpha: float, b: float | Tensor) -> tuple[Tensor, Tensor]:
    """Covariance and mean of the linear model at all inputs and outputs, by the targets that are there."""
    names, values = zip(*model.named_parameters(), strict=True)
    values = tuple(v.detach() for v in values)
    f = lambda *v: torch.func.functional_call(model, dict(zip(names, v, strict=True)), x)  # noqa: E731
    J = torch.cat([j.flatten(2) for j in torch.func.jacrev(f, tuple(range(len(values))))(*values)], 2).flatten(0, 1)
    given, weights = ~y.isnan().flatten(), torch.cat([v.flatten() for v in values])
    residual = (y.flatten() - model(x).detach().flatten() + J @ weights)[given]
    precision = (b + torch.zeros_like(y)).flatten()[given]
    H = (J[given].T * precision) @ J[given] + alpha * torch.eye(J.shape[1], dtype=torch.float64)
    mode = torch.linalg.solve(H, J[given].T @ (precision * residual))
    mean = (model(x).detach().flatten() + J @ (mode - weights)).reshape(y.shape)
    return J @ torch.linalg.solve(H, J.T), mean


@pytest.mark.parametrize("space", ["weights", "observations"])
def test_leave_one_out_predicts_missing_targets_too(space: str) -> None:
    model, x, y = trained("regression", 3)
    x, y = (x, y) if space == "weights" else (x[:10], y[:10])
    y = with_some_missing(y)
    prior = IsotropicPrior(precision=0.7)
    la = LinearisedLaplace(model, Gaussian(4.0, learn=False), prior=prior, method="exact").fit([(x, y)], progress=False)
    found = la.leave_one_out()
    for datum in (0, 1, 6):  # the last one has no target
        others = y.clone()
        others[datum] = torch.nan
        covariance, mean = dense_posterior(model, x, others, 0.7, 4.0)
        rows = slice(3 * datum, 3 * datum + 3)
        covariance = covariance[rows, rows] + torch.eye(3) / 4
        assert torch.allclose(found.mean[datum], mean[datum], rtol=1e-6, atol=1e-8)
        assert torch.allclose(found.covariance[datum], covariance, rtol=1e-6, atol=1e-9)
        there = ~y[datum].isnan()
        expected = torch.zeros((), dtype=torch.float64)
        if bool(there.any()):
            normal = torch.distributions.MultivariateNormal(mean[datum][there], covariance[there][:, there])
            expected = normal.log_prob(y[datum][there])
        assert math.isclose(float(found.log_prob[datum]), float(expected), rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.slow
def test_samples_have_the_covariance_of_the_targets_that_are_there() -> None:
    model, x, y = trained("regression", 3)
    x, y = x[:10], with_some_missing(y[:10])
    covariance, _ = dense_posterior(model, x, y, 0.7, 4.0)
    for method in ("exact", "krylov", "dual"):
        la = LinearisedLaplace(
            model, Gaussian(4.0, learn=False), prior=IsotropicPrior(precision=0.7), method=method, num_samples=2000
        ).fit([(x, y)], progress=False, budget=None)
        deviations = la.predict(x, num_samples=2000).deviations.flatten(1)
        ratio = deviations.square().mean(0) / covariance.diagonal()
        # The standard error of a variance of 2,000 samples is √(2/2000) = 0.032.
        assert float((ratio - 1).abs().max()) < 4 * 0.032


def test_noise_variances_and_weights_go_with_missing_targets() -> None:
    model, x, y = trained("regression", 3)
    y, R = with_some_missing(y), 0.5 + torch.rand(NUM, 3, dtype=torch.float64)
    datum, output = (~y.isnan()).nonzero().unbind(1)
    la = LinearisedLaplace(model, "regression", method="exact")
    la.fit_hyperparameters([(x, y)], data=Data(noise_variances=R), progress=False)
    reference = LinearisedLaplace(OneOutput(model), "regression", method="exact")
    reference.fit_hyperparameters([pairs(x, y)], data=Data(noise_variances=R[datum, output]), progress=False)
    assert torch.allclose(la.noise_precision_, reference.noise_precision_, rtol=1e-6)
    assert math.isclose(float(la.log_marginal_likelihood()), float(reference.log_marginal_likelihood()), rel_tol=1e-8)
    assert math.isclose(la.score().value * la.score().num_data, reference.score().value * len(datum), rel_tol=1e-6)
    assert bool(la.leave_one_out().log_prob.isfinite().all())
    assert math.isfinite(la.score("loo").value)
    for kind in ("binary", "poisson"):
        model, x, y = trained(kind, 3)
        y, weights = with_some_missing(y), torch.arange(NUM) % 3 + 1.0
        la, reference = (LinearisedLaplace(m, kind, method="exact") for m in (model, OneOutput(model)))
        la.fit_hyperparameters([(x, y)], data=Data(weights=weights), criterion="evidence", progress=False)
        reference.fit_hyperparameters(
            [pairs(x, y)], data=Data(weights=weights[datum]), criterion="evidence", progress=False
        )
        assert torch.allclose(la.prior_precision_, reference.prior_precision_, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_probability_is_that_of_the_targets_that_are_there(kind: str) -> None:
    model, x, y = trained(kind, 2)
    la = LinearisedLaplace(model, kind, method="exact").fit([(x, y)], progress=False)
    pred, gone = la.predict(x), y.clone()
    gone[0], gone[1, 0] = torch.nan, torch.nan
    log_probs = pred.log_prob(gone)
    assert float(log_probs[0]) == 0.0
    assert torch.allclose(log_probs[2:], pred.log_prob(y)[2:])
    if kind == "regression":
        assert isinstance(pred, RegressionPrediction)
        normal = torch.distributions.Normal(pred.mean[1, 1], pred.observation_variance[1, 1].sqrt())
        assert torch.allclose(log_probs[1], normal.log_prob(y[1, 1]))
        by_samples = LinearisedLaplace(model, kind, method="krylov").fit([(x, y)], progress=False).predict(x)
        covariance = by_samples.covariance()[1, 1, 1] + by_samples.noise_variance  # of a low-rank distribution
        normal = torch.distributions.Normal(by_samples.mean[1, 1], covariance.sqrt())
        assert torch.allclose(by_samples.log_prob(gone)[1], normal.log_prob(y[1, 1]))
    # All targets of a batch may be missing.
    assert torch.equal(pred.log_prob(torch.full_like(y, torch.nan)), torch.zeros(NUM, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_held_out_data_without_targets_count_nowhere(kind: str) -> None:
    model, x, y = trained(kind, 1)
    train, gone = slice(0, 20), torch.arange(20) % 4 == 3
    held_out = (x[20:], y[20:].masked_fill(gone[:, None], torch.nan))
    fits = []
    for val in (held_out, (x[20:][~gone], y[20:][~gone])):
        la = LinearisedLaplace(model, kind, method="exact")
        la.fit_hyperparameters([(x[train], y[train])], val_loader=[val], progress=False)
        again = LinearisedLaplace(model, kind, method="exact").fit([(x[train], y[train])], progress=False)
        fits.append((la, again.calibrate([val]).calibrate_conformal([val])))
    for ours, theirs in zip(*fits, strict=True):
        assert ours.calibration_.num_data == theirs.calibration_.num_data == 15
        assert torch.allclose(ours.prior_precision_, theirs.prior_precision_)
        assert math.isclose(ours.scale_, theirs.scale_, rel_tol=1e-6)
        assert math.isclose(ours.temperature_, theirs.temperature_, rel_tol=1e-6)
        pairs = zip(ours.predict(x).scores_of(y), theirs.predict(x).scores_of(y), strict=True)
        assert all(torch.allclose(a, b) for a, b in pairs)
    if kind == "regression":
        (_, ours), (_, theirs) = fits
        assert torch.allclose(ours.predict(x).interval(0.8)[0], theirs.predict(x).interval(0.8)[0])


def test_heads_have_missing_targets_of_their_own() -> None:
    torch.manual_seed(0)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.kind, self.count = nn.Linear(3, 2), nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"value": self.value(x), "kind": self.kind(x), "count": self.count(x)}

    model, x = Heads().double(), torch.randn(30, 3, dtype=torch.float64)
    y = {
        "value": with_some_missing(torch.randn(30, 2, dtype=torch.float64)),
        "kind": torch.randint(3, (30,)).masked_fill(torch.arange(30) % 4 == 0, -100),
        "count": with_some_missing(torch.randint(4, (30, 1)).double()),
    }
    likelihoods = {"value": Gaussian(2.0, learn=False), "kind": Categorical(), "count": Poisson()}
    prior = IsotropicPrior(precision=1.0)
    both = LinearisedLaplace(model, MultiTask(likelihoods), prior=prior, method="exact").fit([(x, y)], progress=False)
    # Heads share no weights: each is a posterior of its own, without the data that have none of its targets.
    for head, likelihood in likelihoods.items():
        there = (y[head] != -100) if head == "kind" else (~y[head].isnan()).any(1)
        module = getattr(model, head)
        one = LinearisedLaplace(module, likelihood, prior=prior, method="exact", linear_model="homogeneous")
        one.fit([(x[there], y[head][there])], progress=False)
        assert torch.allclose(both.predict(x)[head].variance, one.predict(x).variance, rtol=1e-6)
    assert bool(both.predict(x).log_prob(y).isfinite().all())


def test_measurements_may_be_missing() -> None:
    model, x, y = trained("regression", 3)
    T = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    measured = with_some_missing(y @ T.T)
    la = LinearisedLaplace(model, Gaussian(1.0, learn=True, observe=T), method="exact")
    la.fit_hyperparameters([(x, measured)], progress=False)

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) @ T.T

    reference = LinearisedLaplace(OneOutput(Measured()), "regression", method="exact")
    reference.fit_hyperparameters([pairs(x, measured)], progress=False)
    assert torch.allclose(la.noise_precision_, reference.noise_precision_, rtol=1e-6)
    assert torch.allclose(la.prior_precision_, reference.prior_precision_, rtol=1e-5)
    assert bool(la.predict(x, observed=True).log_prob(measured).isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_missing_target_is_an_error(kind: str) -> None:
    model, x, y = trained(kind, 2)
    la = LinearisedLaplace(model, kind, method="exact")
    with pytest.raises(ValueError, match="All targets are NaN"):
        la.fit([(x, torch.full_like(y, torch.nan))], progress=False)
    with pytest.raises(ValueError, match=r"infinity in its targets"):
        la.fit([(x, y.masked_fill(y == y[3, 0], torch.inf))], progress=False)
    with pytest.raises(ValueError, match="inputs"):
        la.fit([(x.masked_fill(x == x[3, 0], torch.nan), y)], progress=False)
    la.fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match="infinity"):
        la.predict(x).log_prob(y.masked_fill(y == y[3, 0], torch.inf))


def test_labels_that_are_ignored_do_not_choose_the_criterion() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(55, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (55,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    padded = y.clone()
    padded[25:] = -100  # ten labels a class are needed to leave some of them out
    with_rows, without = (
        LinearisedLaplace(model, "classification", method="exact").fit_hyperparameters([data], progress=False)
        for data in ((x, padded), (x[:25], y[:25]))
    )
    assert math.isclose(float(with_rows.prior_precision_), float(without.prior_precision_), rel_tol=0.01)
    for data in ((x, padded), (x[:25], y[:25])):
        with pytest.raises(ValueError, match="leave_one_out"):
            with_rows.fit_hyperparameters([data], criterion="leave_one_out", progress=False)


def test_the_density_of_partly_missing_targets_is_that_of_the_others() -> None:
    model, x, y = trained("regression", 3)
    la = LinearisedLaplace(model, Gaussian(7.0), method="krylov", num_samples=5).fit([(x, y)], progress=False)
    y, pred = with_some_missing(y), la.predict(x)
    distribution = pred.distribution()
    assert isinstance(distribution, LowRankMultivariateNormal)
    for datum, density in enumerate(pred.log_prob(y)):
        given = ~y[datum].isnan()
        covariance = distribution.covariance_matrix[datum][given][:, given]
        error = (y[datum] - pred.outputs[datum])[given]
        expected = -0.5 * (error @ torch.linalg.solve(covariance, error) + torch.logdet(2 * torch.pi * covariance))
        assert_close(density, expected)
