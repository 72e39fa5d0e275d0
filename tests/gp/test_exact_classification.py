"""Exact classification in observation space, against dense algebra in weight space."""

import math

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from grids import covering
from problems import CLOSE, make_prior, many
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.gp.evidence import HyperparameterBounds
from laplace_sampling.gp.posterior import GramCovariance, GramPosterior, of_largest_evidence
from laplace_sampling.hyperparameters.em import fit_em
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, features_at
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense

# Fisher scoring, of unequal noise, converges linearly.
NAMES = [name for name in CASES if name not in ("attention", "heteroscedastic")]


def setting(name: str, prior: str) -> tuple[Case, LinearModel, GaussianPrior]:
    case = make_case(name)
    model = case.linear_model("homogeneous")
    return case, model, make_prior(model, case, prior)


def at(model: LinearModel, prior: GaussianPrior, alpha: float) -> GramPosterior:
    return GramPosterior.of(model, prior.with_precision(prior.precision * (alpha / overall_precision(prior))))


def hessian(case: Case, J: Tensor, A: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """`M` and `H`."""
    M = reference.ggn(J, reference.curvature(case.likelihood, outputs, case.y))
    return M, M + torch.diag(A)


@covering(rest=False, name=NAMES, prior=["isotropic", "g-prior", "layerwise"])
def test_everything_agrees_with_weight_space(name: str, prior: str) -> None:
    case, model, built = setting(name, prior)
    alpha = 0.6
    A = built.diagonal() * alpha / overall_precision(built)
    J = reference.jacobian(case.model, case.x)
    posterior = at(model, built, alpha)
    assert posterior.mode.converged
    theta = reference.mode(case.likelihood, J, model.offset, case.y, A)
    h = model.offset + J @ theta
    assert_close(posterior.mode_weights(), theta, rtol=1e-6, atol=1e-7)
    assert_close(posterior.mode.outputs, h, rtol=1e-6, atol=1e-7)
    M, H = hessian(case, J, A, model.network_outputs)
    assert posterior.effective_dimension() == pytest.approx(reference.effective_dimension(M, A), rel=1e-6)
    loss = sum(float(reference.loss(case.likelihood, h[i], case.y[i])) for i in range(len(h)))
    logdet = torch.linalg.slogdet(H / A.sqrt() / A.sqrt()[:, None])[1]
    evidence = -loss - 0.5 * float((A * theta**2).sum()) - 0.5 * float(logdet)
    assert posterior.log_evidence == pytest.approx(evidence, rel=1e-6)
    assert_close(posterior.prior.diagonal(), A)
    x = case.x[:2] * 1.3
    J_x = reference.jacobian(case.model, x)
    flat = J_x.flatten(0, 1)
    joint = flat @ torch.linalg.solve(H, flat.T)
    C = J_x.shape[1]
    covariance = GramCovariance(posterior, features_at(Linearisation(case.model), x))
    assert_close(covariance.joint(), joint, **CLOSE)
    assert_close(covariance.variance().flatten(), joint.diagonal(), **CLOSE)
    assert_close(covariance.blocks()[1], joint[C : 2 * C, C : 2 * C], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_same_draws_give_the_same_samples_as_weight_space(name: str) -> None:
    _, model, built = setting(name, "g-prior")
    posterior = GramPosterior.of(model, built)
    draws = Draws(3, 2)
    expected = sample_posterior(model.ggn(model.network_outputs), built, draws, Dense()).value * built.scale
    assert_close(posterior.sample(draws), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["classification", "binary", "multi_label"])
def test_the_fixed_point_is_that_of_em(name: str) -> None:
    _, model, prior = many(name)
    posterior, found = of_largest_evidence(model, prior, HyperparameterBounds())
    assert found.converged
    gamma = posterior.effective_dimension()
    assert gamma / posterior.mode.norm == pytest.approx(found.precision, rel=1e-8)
    dense = LinearModel(
        DenseFeatures.of(model.features), model.offset, model.network_outputs, model.targets, model.likelihood
    )
    em = fit_em(dense, prior, Draws(1, 0), Dense(), max_steps=200, tolerance=1e-9)
    assert found.precision == pytest.approx(float(em.prior.precision), rel=1e-6)
    assert gamma == pytest.approx(em.history[-1].effective_dimension[0], rel=1e-6)


def test_the_evidence_is_flat_at_the_fixed_point_with_the_curvature_of_the_network() -> None:
    _, model, prior = many("classification")
    alpha = of_largest_evidence(model, prior, HyperparameterBounds())[1].precision
    ends = [at(model, prior, alpha * math.exp(d)).log_evidence for d in (-1e-3, 0.0, 1e-3)]
    assert abs(ends[2] - ends[0]) / 2e-3 < 1e-6
    assert ends[1] > max(ends[0], ends[2])


def test_leaving_a_datum_out_is_nearly_fitting_without_it() -> None:
    case, model, prior = many("classification")
    alpha = 3.0
    out = at(model, prior, alpha).leave_one_out()
    J = reference.jacobian(case.model, case.x)
    A = prior.diagonal() * alpha / overall_precision(prior)
    full = reference.mode(case.likelihood, J, model.offset, case.y, A, steps=12)
    for i in range(2):
        rest = [j for j in range(40) if j != i]
        theta = reference.mode(case.likelihood, J[rest], model.offset[rest], case.y[rest], A, steps=12)
        moved = J[i] @ (theta - full)
        # The first order leaves a small part of what leaving out changes.
        assert (out.mean[i] - J[i] @ theta).norm() < 0.15 * moved.norm()
        B = reference.curvature(case.likelihood, model.network_outputs[rest], case.y[rest])
        H = reference.ggn(J[rest], B) + torch.diag(A)
        assert_close(out.covariance[i], J[i] @ torch.linalg.solve(H, J[i].T), rtol=0.1, atol=0.02)
        samples = torch.distributions.MultivariateNormal(out.mean[i], out.covariance[i] + 1e-9 * torch.eye(4))
        torch.manual_seed(0)
        expected = samples.sample((20_000,)).softmax(-1).mean(0)[case.y[i]].log()
        assert float(out.log_prob[i]) == pytest.approx(float(expected), abs=0.1)


def test_bounds_are_kept_and_told() -> None:
    _, model, prior = many("classification")
    inside = of_largest_evidence(model, prior, HyperparameterBounds())[1].precision
    for bounds, end in (((1e-6, inside / 3), 1), ((inside * 3, 1e9), 0)):
        _, found = of_largest_evidence(model, prior, HyperparameterBounds(bounds))
        assert found.precision == bounds[end]
        assert found.at_bounds == ("precision",)
        assert not found.converged
    posterior = at(model, prior, inside)
    assert not posterior._mode_by_newton(max_steps=1).converged
    assert posterior._mode_by_newton(tolerance=1e-3).residual < 1e-3
