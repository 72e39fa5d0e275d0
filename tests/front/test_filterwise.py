"""The filter-wise prior, against dense matrices of covariances that are written tap by tap."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import inverse
import pytest
import reference
import torch
from problems import CLOSE
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Dual, FilterwisePrior, Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.networks import FilterNetwork

LENGTHS, PRECISIONS = {"layers.0": 0.5, "layers.2": 2.0, "layers.4": 0.9}, {"layers.0": 2.0, "layers.2": 1.5}
PRIOR = FilterwisePrior(0.7, lengthscales=LENGTHS, precisions=PRECISIONS)
NOISE = 30.0


def covariance(
    model: nn.Module, lengths: Mapping[str, float], precisions: Mapping[str, float], others: float
) -> Tensor:
    """The prior covariance of all weights; layers that are not named have independent weights."""
    blocks = []
    for name, weight in model.named_parameters():
        layer, part = name.rsplit(".", 1)
        if part != "weight" or layer not in lengths:
            blocks.append(torch.eye(weight.numel()).double() / others)
            continue
        taps = list(itertools.product(*map(range, weight.shape[2:])))
        of_filter = [[math.exp(-math.dist(s, t) / lengths[layer]) / precisions[layer] for t in taps] for s in taps]
        blocks.append(
            torch.block_diag(*[torch.tensor(of_filter, dtype=torch.float64)] * (weight.shape[0] * weight.shape[1]))
        )
    return torch.block_diag(*blocks)


def of_prior(model: nn.Module) -> Tensor:
    """The covariance of `PRIOR`."""
    precisions = {name: 0.7 * PRECISIONS.get(name, 1.0) for name in LENGTHS}
    return covariance(model, LENGTHS, precisions, 0.7)


def one_image(side: int, num_angles: int = 5) -> tuple[inverse.Picture, Tensor, Any, Tensor, Tensor]:
    """A network, its input, sums of its image along lines, `T` as a matrix without rows of zeros, and noisy sums."""
    model, z = inverse.picture(side)
    T = inverse.radon(side, num_angles)
    D = torch.as_tensor(T.toarray())
    return model, z, T, D[D.any(1)], inverse.noisy(model(z).detach().flatten(1) @ D.mT)


def test_samples_are_those_of_dense_algebra() -> None:
    """Matheron's rule with the draws of the fit, `ζ = θ⁰ + ΣFᵀS⁻¹(ε − Fθ⁰)`, and a Cholesky factor of all of `Σ`."""
    model, z, T, D, y = one_image(8)
    fits = [
        LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=PRIOR, method=method, num_samples=3).fit(
            [(z, y)], tolerance=1e-9, budget=None, progress=False
        )
        for method in (Dual(accuracy=1e-9), "krylov")
    ]
    J, sigma, draws = reference.jacobian(model, z)[0], of_prior(model), Draws(3, 0, Stream.SAMPLES)
    F = D @ J
    start = draws.prior(J.shape[1]).double() @ torch.linalg.cholesky(sigma).mT
    noise = draws.noise(len(D))(torch.arange(1))[:, 0].double() / NOISE**0.5
    S = F @ sigma @ F.mT + torch.eye(len(D)).double() / NOISE
    expected = start + torch.linalg.solve(S, (noise - start @ F.mT).mT).mT @ F @ sigma
    for la in fits:
        assert_close(la.samples_, expected, rtol=1e-6, atol=1e-6)
        assert_close(la.predict(z).deviations.flatten(1), expected @ J.mT, rtol=1e-6, atol=1e-6)
    assert_close(fits[0].sample(2).shape, (2, J.shape[1]))


@pytest.mark.parametrize("method", ["exact", "auto", "subset", "diagonal", "kfac"])
def test_covariances_are_those_of_dense_algebra(method: str) -> None:
    model, z, T, D, y = one_image(8)
    la = LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=PRIOR, method=method, num_samples=8)
    if method == "kfac":
        with pytest.raises(ValueError, match="filterwise"):
            la.fit([(z, y)], progress=False)
        return
    la.fit([(z, y)], tolerance=1e-6, progress=False)
    J, root = reference.jacobian(model, z)[0], torch.linalg.cholesky(of_prior(model))
    R = J @ root
    M = NOISE * (D @ R).mT @ (D @ R)
    M = M.diag().diag() if method == "diagonal" else M
    expected = R @ torch.linalg.solve(M + torch.eye(len(M)).double(), R.mT)
    pred = la.predict(z)
    assert_close(pred.joint_covariance(), expected, **(CLOSE if method != "subset" else {"rtol": 1e-4, "atol": 1e-6}))
    # The other ways to the function take the same coordinates.
    assert_close(la.propagate(lambda f: f(z)).joint_covariance(), pred.joint_covariance(), **CLOSE)
    assert_close(la.functions()(z), pred.samples, **CLOSE)
    assert_close(pred.deviations.flatten(1), la.samples_ @ J.mT, **CLOSE)
    if method == "exact":
        shift = root @ torch.linalg.solve(M + torch.eye(len(M)).double(), NOISE * (D @ R).mT)
        residual = y[0, torch.as_tensor(T.toarray()).any(1)] - D @ (
            model(z).detach().flatten() - J @ la.network.whole.weights
        )
        assert_close(la.mode_, shift @ residual, **CLOSE)


def test_draws_of_the_prior_have_its_covariance() -> None:
    model, z, T, _, y = one_image(8)
    la = LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=PRIOR, num_samples=4).fit([(z, y)], progress=False)
    J, root = reference.jacobian(model, z)[0], torch.linalg.cholesky(of_prior(model))
    white = Draws(3, 0, Stream.SAMPLES).prior(J.shape[1]).double()
    assert_close(la.sample_prior(z, 3).flatten(1), white @ root.mT @ J.mT, **CLOSE)
    assert la.sample_prior(z, 3).shape == (3, *model(z).shape)


def test_short_lengthscales_are_independent_weights() -> None:
    model, z, T, _, y = one_image(8)
    found = [
        LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=prior, num_samples=4)
        .fit([(z, y)], progress=False)
        .predict(z)
        for prior in (FilterwisePrior(0.7, lengthscale=1e-3), IsotropicPrior(0.7))
    ]
    assert_close(found[0].joint_covariance(), found[1].joint_covariance(), rtol=1e-9, atol=1e-12)
    assert_close(found[0].deviations, found[1].deviations, rtol=1e-9, atol=1e-12)


class Dense:
    """Evidence and total variation by dense matrices, in `log a` of each block and of the others, and `log ψ`."""

    def __init__(self, model: nn.Module, z: Tensor, D: Tensor, y: Tensor, noise: float) -> None:
        self.model, self.noise, self.J = model, noise, reference.jacobian(model, z)[0]
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.F, self.side = D @ self.J, z.shape[-1]
        self.residual = y - D @ (model(z).detach().flatten() - self.J @ weights)

    def sigma(self, logs: Tensor) -> Tensor:
        *a, others, p0, p2, p4 = logs.exp().tolist()
        names = list(LENGTHS)
        return covariance(
            self.model, dict(zip(names, (p0, p2, p4), strict=True)), dict(zip(names, a, strict=True)), others
        )

    def evidence(self, logs: Tensor) -> float:
        S = self.F @ self.sigma(logs) @ self.F.mT + torch.eye(len(self.F)).double() / self.noise
        zero = torch.zeros(len(S), dtype=torch.float64)
        return float(torch.distributions.MultivariateNormal(zero, S).log_prob(self.residual))

    def variations(self, logs: Tensor) -> Tensor:
        """`κ` of the three layers, `E|d| = σ √(2/π)` for each difference of neighbours."""
        images = self.J.reshape(self.side, self.side, -1)
        rows = torch.cat([(images[1:] - images[:-1]).flatten(0, 1), (images[:, 1:] - images[:, :-1]).flatten(0, 1)])
        found, start, sigma = [], 0, self.sigma(logs)
        for name, weight in self.model.named_parameters():
            place, start = slice(start, start + weight.numel()), start + weight.numel()
            if name.endswith("weight"):
                variances = ((rows[:, place] @ sigma[place, place]) * rows[:, place]).sum(1)
                found.append((2 / math.pi) ** 0.5 * variances.sqrt().sum())
        return torch.stack(found)

    def penalised(self, logs: Tensor, penalty: float) -> float:
        h, total = 1e-5, self.evidence(logs)
        for k, kappa in enumerate(self.variations(logs)):
            step = torch.zeros(len(logs)).double()
            step[4 + k] = h
            change = (self.variations(logs + step)[k] - self.variations(logs - step)[k]) / (2 * h * logs[4 + k].exp())
            total += float(-penalty * kappa + (penalty * change.abs()).log())
        return total


def logs_of(la: LinearisedLaplace) -> Tensor:
    blocks = la.posterior_.prior.blocks
    assert list(blocks) == [*LENGTHS, "others"]
    assert_close(la.prior_precision_, torch.ones(1).double())
    values = [1 / variance for variance, _ in blocks.values()] + [blocks[name][1] for name in LENGTHS]
    return torch.tensor(values, dtype=torch.float64).log()


@pytest.mark.parametrize("penalty", [None, 0.2])
def test_the_search_ends_at_a_maximum_that_finite_differences_confirm(penalty: float | None) -> None:
    model, z, T, D, y = one_image(6, 4)
    prior = FilterwisePrior(10.0, total_variation=penalty)
    la = LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=prior, num_samples=64)
    la.fit([(z, y)], progress=False)
    start = torch.tensor([10.0] * 4 + [1.0] * 3, dtype=torch.float64).log()
    dense = Dense(model, z, D, y[0, torch.as_tensor(T.toarray()).any(1)], NOISE)
    assert_close(la.log_marginal_likelihood().value, dense.evidence(start), rtol=1e-9, atol=1e-9)
    la.fit_hyperparameters([(z, y)], progress=False)
    logs = logs_of(la)
    assert_close(la.log_marginal_likelihood().value, dense.evidence(logs), rtol=1e-7, atol=1e-7)
    objective = dense.evidence if penalty is None else lambda at: dense.penalised(at, penalty)
    assert objective(logs) >= objective(start)
    h, low, high = 1e-4, math.log(1e-2), math.log(1e2)
    for k, value in enumerate(logs.tolist()):
        step = torch.zeros(len(logs)).double()
        step[k] = h
        slope = (objective(logs + step) - objective(logs - step)) / (2 * h)
        at_bound = k >= 4 and min(value - low, high - value) < 1e-6
        assert abs(slope) < 1e-3 or (at_bound and slope * value > 0), (k, value, slope)
    assert la.converged_
    assert la.effective_dimension_.sum() < len(D)


def test_the_gram_matrix_is_that_of_the_weighted_sums_of_distances() -> None:
    """`Σ_k a_k⁻¹ Σ_m exp(−r_m/ψ_k) G_km = J Σ Jᵀ`."""
    from laplace_sampling.hyperparameters.filters import ByDistance

    model, z, _, D, _ = one_image(8)
    network = LinearisedLaplace(model, "regression", prior=PRIOR).network
    assert isinstance(network, FilterNetwork)
    J = D @ reference.jacobian(model, z)[0]
    gram = ByDistance.of(J, network, lambda left, right: left @ right.mT)
    precisions = torch.tensor([1.4, 1.05, 0.7, 0.7], dtype=torch.float64)
    lengths = torch.tensor([*LENGTHS.values(), 1.0], dtype=torch.float64)
    assert_close(gram.total(precisions, lengths), J @ of_prior(model) @ J.mT, rtol=1e-10, atol=1e-10)
    assert len(gram.forms) == 3 * 6 + 1  # 3 × 3 taps have six distances


def test_the_total_variation_is_the_mean_of_that_of_samples() -> None:
    """Within four standard errors of 10,000 images that are drawn from a layer's prior."""
    from laplace_sampling.hyperparameters.filters import pairs_of, total_variation
    from laplace_sampling.linear_model.linear_model import tangent_model_of

    model, z, T, D, y = one_image(8)
    network = LinearisedLaplace(model, "regression", prior=PRIOR).network
    assert isinstance(network, FilterNetwork)
    tangent = tangent_model_of(network, Gaussian(1.0), [(z, model(z).detach())], kind="affine")
    lengths = torch.tensor([*LENGTHS.values(), 1.0], dtype=torch.float64)
    precisions = torch.tensor([1.4, 1.05, 0.7, 0.7], dtype=torch.float64)
    kappa = total_variation(pairs_of(tangent, network), precisions, lengths)
    dense = Dense(model, z, D, y[0, torch.as_tensor(T.toarray()).any(1)], NOISE)
    assert_close(kappa[:3], dense.variations(torch.cat([precisions, lengths[:3]]).log()), rtol=1e-10, atol=0)
    J, root = reference.jacobian(model, z)[0], torch.linalg.cholesky(of_prior(model))
    white, start = torch.randn(10_000, J.shape[1], generator=torch.Generator().manual_seed(0)).double(), 0
    sizes = [p.numel() for p in model.parameters()]
    for k, at in enumerate((0, 2, 4)):
        place = slice(start := sum(sizes[:at]), start + sizes[at])
        images = (white[:, place] @ root[place, place].mT @ J[:, place].mT).reshape(-1, 8, 8)
        variation = images.diff(dim=1).abs().flatten(1).sum(1) + images.diff(dim=2).abs().flatten(1).sum(1)
        assert abs(float(variation.mean() - kappa[k])) < 4 * float(variation.std()) / 100


def test_blocks_by_prefix_share_a_lengthscale() -> None:
    model, z, T, _, y = one_image(6, 4)
    prior = FilterwisePrior(blocks=("layers.0", "layers"))
    la = LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=prior, num_samples=4)
    la.fit_hyperparameters([(z, y)], progress=False)
    assert list(la.posterior_.prior.blocks) == ["layers.0", "layers", "others"]
    assert "layers.0: variance" in str(la)
    assert "others: variance" in repr(la)
    given = FilterwisePrior(0.7, blocks=("layers",), lengthscales={"layers": 0.8})
    names = {"lengthscales": dict.fromkeys(LENGTHS, 0.8)}
    one, other = (
        LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=p, num_samples=4).fit([(z, y)], progress=False)
        for p in (given, FilterwisePrior(0.7, **names))
    )
    assert_close(one.samples_, other.samples_)


def test_noise_that_is_learnt_explains_the_residuals_of_the_network() -> None:
    model, z, T, D, y = one_image(6, 4)
    la = LinearisedLaplace(model, Gaussian(1.0, observe=T, learn=True), prior="filterwise", num_samples=4)
    la.fit_hyperparameters([(z, y)], progress=False)
    assert la.noise_precision_ is not None
    misfit = (y[0] - torch.as_tensor(T.toarray()) @ model(z).detach().flatten()).square().sum()
    assert_close(float(la.noise_precision_ * misfit), float(len(D) - la.effective_dimension_.sum()), rtol=5e-3, atol=0)


def test_more_observations_than_the_evidence_takes_keep_their_lengthscales(monkeypatch: pytest.MonkeyPatch) -> None:
    model, z, T, _, y = one_image(8)
    monkeypatch.setattr("laplace_sampling.preparation.MOST_ROWS", 20)
    prior = FilterwisePrior(lengthscales=LENGTHS, precisions=PRECISIONS)
    la = LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=prior, num_samples=4)
    la.fit_hyperparameters([(z, y)], progress=False)
    assert {name: la.posterior_.prior.blocks[name][1] for name in LENGTHS} == LENGTHS
    assert float(la.prior_precision_) != 1
    penalised = FilterwisePrior(total_variation=1.0)
    with pytest.raises(ValueError, match="total_variation"):
        LinearisedLaplace(model, Gaussian(NOISE, observe=T), prior=penalised).fit_hyperparameters([(z, y)])


def test_a_file_keeps_the_filters(tmp_path) -> None:
    model, z, T, _, y = one_image(8)
    likelihood = Gaussian(NOISE, observe=T)
    for method in ("exact", "dual"):
        la = LinearisedLaplace(model, likelihood, prior="filterwise", method=method, num_samples=4)
        la.fit_hyperparameters([(z, y)], progress=False)
        la.save(tmp_path / "la.pt")
        again = LinearisedLaplace.load(tmp_path / "la.pt", model, likelihood=likelihood)
        assert again.settings.prior == la.settings.prior
        assert again.posterior_.prior.blocks == la.posterior_.prior.blocks
        assert torch.equal(again.samples_, la.samples_)
        assert torch.equal(again.predict(z).joint_covariance(), la.predict(z).joint_covariance())
        with pytest.raises(ValueError, match="FilterwisePrior"):
            LinearisedLaplace.load(tmp_path / "la.pt", model, likelihood=likelihood, prior="isotropic")
    # A later fit finds the same from there; one of given values goes back to these.
    before = la.predict(z).deviations
    la.fit_hyperparameters([(z, y)], warm_start=True, progress=False)
    assert_close(la.predict(z).deviations, before, rtol=1e-3, atol=1e-4)
    la.plan([(z, y)])
    assert_close(la.predict(z).deviations, before, rtol=1e-3, atol=1e-4)
    la.fit([(z, y)], progress=False)
    assert la.posterior_.prior.blocks["layers.0"] == (1.0, 1.0)


def test_bad_input() -> None:
    model, z = inverse.picture(6)
    y = model(z).detach()
    for settings, message in (
        ({"prior": FilterwisePrior(blocks=("layer",))}, "blocks"),
        ({"prior": "filterwise", "parameters": ["*.bias"]}, "taps"),
        ({"prior": "filterwise", "parameters": {"layers.0.weight": [0]}}, "taps"),
        ({"prior": FilterwisePrior(lengthscales={"layers.1": 1.0})}, "layers.1"),
    ):
        with pytest.raises(ValueError, match=message):
            LinearisedLaplace(model, Gaussian(1.0), **settings).fit([(z, y)], progress=False)
    for bad in ({"lengthscale": 0.0}, {"total_variation": -1.0}, {"precisions": {"a": -1.0}}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            FilterwisePrior(**bad)
    for bad in ({"blocks": "layers"}, {"lengthscales": 3.0}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            FilterwisePrior(**bad)
    flat = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)).double().eval()
    x = torch.randn(5, 1, 6).double()
    la = LinearisedLaplace(flat, Gaussian(1.0), prior=FilterwisePrior(total_variation=1.0))
    with pytest.raises(ValueError, match="images"):
        la.fit_hyperparameters([(x, flat(x).detach())], progress=False)
