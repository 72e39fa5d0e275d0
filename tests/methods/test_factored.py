"""Diagonal and Kronecker-factored posteriors, against dense algebra."""

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from flat_settings import laplace_of, loader
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Data, Evidence, LinearisedLaplace
from laplace_sampling.curvature.closed_form import factored_curvature
from laplace_sampling.solvers.preconditioners import Curvature


def dense(found: Curvature, size: int) -> Tensor:
    return found.matmul(torch.eye(size, dtype=torch.float64))


def posterior(la: LinearisedLaplace) -> tuple[Tensor, Tensor, Tensor]:
    """`M̂`, `A` and `φ` of a fit, dense and unscaled, from its parts."""
    prior, fit = la._fitted.posterior.prior, la._fitted.fit
    scale = prior.scale.double()
    found = factored_curvature(la.settings.method.kind, fit.ggn, la.settings.seed, scale)
    M = dense(found, len(scale)) / scale / scale[:, None]
    return M, torch.diag(prior.diagonal().double()), fit.mode.weights.double()


@covering(
    strength=2,
    name=["classification", "regression", "conv_batch_norm"],
    prior=["g-prior", "isotropic", "layerwise"],
    method=["diagonal", "kfac"],
)
def test_posterior_and_evidence_are_the_dense_ones(method: str, prior: str, name: str) -> None:
    case = make_case(name)
    la = laplace_of(case.model, case.likelihood, method=method, prior=prior, prior_precision=0.6, num_samples=1000).fit(
        loader(case), progress=False
    )
    M, A, mode = posterior(la)
    covariance = torch.linalg.inv(M + A)
    J = reference.jacobian(case.model, case.x[:2]).flatten(0, 1)
    expected = J @ covariance @ J.T
    pred = la.predict(case.x[:2])
    assert_close(pred.joint_covariance(), expected, rtol=1e-6, atol=1e-9)
    samples = pred.deviations.flatten(1)
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / 1000).sqrt()
    assert ((samples.T @ samples / 1000 - expected).abs() < 5 * error + 1e-12).all()
    assert_close(la.effective_dimension_.sum(), (covariance @ M).trace(), rtol=1e-6, atol=1e-9)
    loss = sum(reference.loss(case.likelihood, f, y) for f, y in zip(la._fitted.fit.mode.outputs, case.y, strict=True))
    log_det = torch.linalg.slogdet(torch.eye(len(M)).double() + torch.linalg.solve(A, M))[1]
    evidence = la.log_marginal_likelihood()
    assert float(evidence) == pytest.approx(float(-loss - 0.5 * mode @ A @ mode - 0.5 * log_det), rel=1e-7)
    assert evidence.exact
    more = la.sample(5)
    assert more.shape == (5, len(M))
    assert not torch.equal(more, la.samples_[:5])
    la.diagnose()


def test_the_mode_is_that_of_the_linear_model() -> None:
    case = make_case("regression")
    la = laplace_of(case.model, case.likelihood, method="kfac", prior_precision=0.6, prior="isotropic")
    la.fit(loader(case), progress=False, tolerance=1e-3)
    J, offset = reference.jacobian(case.model, case.x), la._fitted.fit.model.offset
    expected = reference.mode(case.likelihood, J, offset, case.y, torch.full((J.shape[2],), 0.6).double())
    assert_close(la.mode_, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["diagonal", "kfac"])
def test_mackay(method: str) -> None:
    """`fit_hyperparameters` ends where `α ‖θ̄‖² = γ` and `b Σ(y − f)² = N·C − γ`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=generator, dtype=torch.float64) * 4 - 2
    y = (2 * x).sin() + 0.1 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(400):
        optimiser.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimiser.step()
    la = laplace_of(model, "regression", method=method, linear_model="homogeneous")
    la.fit_hyperparameters([(x, y)], criterion=Evidence(max_steps=40), progress=False, tolerance=1e-4)
    assert la.converged_
    gamma, prior = float(la.effective_dimension_), la._fitted.posterior.prior
    norm = float((la.mode_.double() ** 2 / prior.scale.double() ** 2).sum())
    assert float(la.prior_precision_) * norm == pytest.approx(gamma, rel=2e-2)
    errors = float(((model(x) - y) ** 2).sum().detach())
    assert float(la.noise_precision_) * errors == pytest.approx(60 - gamma, rel=1e-2)
    curves = la.evidence_path(1.0, 5)
    assert float(curves.log_marginal_likelihood[2]) == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-3)
    assert curves.effective_dimension[2] == pytest.approx(gamma, rel=1e-6)
    assert (curves.log_determinant.diff() < 0).all()


# The networks of the cases are not trained: the loss of variances of their own need not rise as is expected.
@pytest.mark.filterwarnings("ignore:The training loss does not rise:laplace_sampling.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:`fit_hyperparameters`:laplace_sampling.ConvergenceWarning")
@covering(indirect=["case"], case=CASES, method=["diagonal", "kfac"])
def test_every_case_is_fitted_saved_and_loaded(case: Case, method: str, tmp_path) -> None:
    batches = case.batches
    la = laplace_of(case.model, case.given[0], method=method, num_samples=4)
    la.fit_hyperparameters(batches, progress=False, criterion=Evidence(max_steps=1))
    pred = la.predict(case.x[:2])
    assert (pred.variance > 0).any()
    la.save(tmp_path / "posterior.pt")
    # The function of a loss is not in the file.
    own = case.given[0] if case.given[0].name == "custom" else None
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model, likelihood=own)
    found = loaded.predict(case.x[:2])
    assert torch.equal(found.samples, pred.samples)
    assert torch.equal(found.variance, pred.variance)


@pytest.mark.parametrize("method", ["diagonal", "kfac"])
@pytest.mark.parametrize("prior", ["g-prior", "layerwise"])
def test_the_closed_form_is_there_after_loading(method: str, prior: str) -> None:
    case = make_case("conv_batch_norm")
    la = laplace_of(case.model, "classification", method=method, prior=prior, prior_precision=0.6, num_samples=3)
    pred = la.fit(loader(case), progress=False).predict(case.x)
    M, A, _ = posterior(la)
    other = laplace_of(case.model, "classification", method=method, prior=prior)
    other.load_state_dict(la.state_dict())
    found = other.predict(case.x)
    assert torch.equal(found.variance, pred.variance)
    assert torch.equal(found.joint_covariance(), pred.joint_covariance())
    assert torch.equal(found.probs_with("probit"), pred.probs_with("probit"))
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    assert_close(found.joint_covariance(), J @ torch.linalg.inv(M + A) @ J.T, rtol=1e-6, atol=1e-9)
    assert torch.equal(found.samples, pred.samples)


def test_what_has_no_factors_is_refused() -> None:
    case = make_case("regression")
    masks = {"0.weight": torch.ones(6, 2, dtype=torch.bool)}
    with pytest.raises(ValueError, match="kfac"):
        LinearisedLaplace(case.model, "regression", method="kfac", parameters=masks).fit(loader(case), progress=False)
    la = LinearisedLaplace(case.model, "regression", method="kfac")
    with pytest.raises(ValueError, match="masks"):
        la.fit(loader(case), data=Data(noise_variances=torch.ones(7)), progress=False)
    la = LinearisedLaplace(case.model, "regression", method="diagonal", parameters=masks)
    la.fit(loader(case), data=Data(noise_variances=torch.ones(7)), progress=False)
    with pytest.raises(ValueError, match="covariances"):
        la.leave_one_out()


def test_the_last_layer_has_factors_too() -> None:
    case = make_case("classification")
    found = []
    for parameters in ("last_layer", "2.*"):
        la = LinearisedLaplace(case.model, "classification", method="kfac", parameters=parameters)
        found.append(la.fit(loader(case), progress=False).predict(case.x).variance)
    assert_close(*found)


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
def test_energies_of_samples_are_chi_squared(kind: str) -> None:
    """`ζᵀ(M̂ + A)ζ = ‖z‖²` of the white noise behind a sample, exactly."""
    case = make_case("classification_many_data")
    la = laplace_of(case.model, "classification", method=kind, prior_precision=0.5, num_samples=5)
    samples = la.fit(case.batches, progress=False).samples_
    fit = la._fitted.fit
    assert len(samples) == 5
    white = fit.task.draws.prior(fit.ggn.size).double()
    assert_close(fit.sampled.energies, white.square().sum(1), rtol=1e-5, atol=1e-6)
