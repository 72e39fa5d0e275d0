import math
from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from grids import covering
from problems import built, dense_model
from torch import nn
from torch.testing import assert_close

from laplace_sampling.hyperparameters.em import (
    DampedSteps,
    Step,
    dimensions_by_output,
    effective_dimension,
    fit_em,
    noise_update,
)
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.linear_model import LinearModel, linear_model_mode
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.sgd import SGD


def toy(num_data: int = 100, noise: float = 0.1, width: int = 50) -> LinearModel:
    """1-D regression by an MLP with layer norm, 1-50-50-1, P about 2,800 (digest, R1), in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(1, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width)]
        model = nn.Sequential(*layers, nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 1)).double()
        x = torch.linspace(-2, 2, num_data, dtype=torch.float64)[:, None]
        y = torch.sin(3 * x) + noise * torch.randn(num_data, 1, dtype=torch.float64)
    J = reference.jacobian(model, x)
    f = model(x).detach()
    return LinearModel(DenseFeatures(J), torch.zeros_like(f), f, y, Gaussian(1 / noise**2))


def test_effective_dimension_is_unbiased_and_of_the_variance_of_its_formula() -> None:
    model = toy(width=16)
    prior = built("isotropic", model, 5.0)
    ggn = model.ggn(model.network_outputs)
    # 1000 repeats of K = 8 exact samples.
    solution = sample_posterior(ggn, prior, Draws(8000, seed=0), Dense())
    gamma = float(effective_dimension(prior.grouped(solution.leverage), solution.exact)[0])
    leverage = solution.value * ggn.matmul(solution.value)
    sampled = replace(solution, leverage=leverage, exact=False)
    parts = [replace(sampled, leverage=rows) for rows in leverage.split(8)]
    estimates = torch.tensor(
        [float(effective_dimension(prior.grouped(part.leverage), part.exact)[0]) for part in parts]
    )
    assert abs(float(estimates.mean()) - gamma) < 5 * float(estimates.std()) / 1000**0.5
    assert (estimates >= 0).all()
    spectrum = torch.linalg.eigvalsh(make_dense(ggn)).clamp_min(0)
    variance = float(2 * ((spectrum / (spectrum + 5)) ** 2).sum() / 8)
    assert float(estimates.var()) == pytest.approx(variance, rel=5 * (2 / 1000) ** 0.5)


def test_standard_error_covers_the_truth() -> None:
    model = toy(40, width=10)
    prior = built("isotropic", model, 5.0)
    ggn = model.ggn(model.network_outputs)
    truth = reference.effective_dimension(make_dense(ggn), prior.diagonal())
    deviations = []
    for seed in range(100):
        solution = sample_posterior(ggn, prior, Draws(16, seed), Dense())
        sampled = replace(solution, leverage=solution.value * ggn.matmul(solution.value), exact=False)
        gamma, error = effective_dimension(prior.grouped(sampled.leverage), sampled.exact)
        deviations.append(float((gamma - truth) / error))
    # A t distribution with 15 degrees of freedom: mean square 15/13, its standard error about 0.2.
    assert 0.5 < float(torch.tensor(deviations).square().mean()) < 2.0
    one = replace(sampled, value=sampled.value[:1], leverage=sampled.leverage[:1])
    assert math.isnan(float(effective_dimension(prior.grouped(one.leverage), one.exact)[1]))


@covering(indirect=["case"], case=CASES, prior_name=["isotropic", "g-prior", "layerwise"])
def test_effective_dimension_by_group_equals_the_dense_trace(case: Case, prior_name: str) -> None:
    model = case.linear_model()
    model = replace(model, features=DenseFeatures.of(model.features))
    prior = built(prior_name, model, 0.7)
    ggn = model.ggn(model.network_outputs)
    M, A = make_dense(ggn), torch.diag(prior.diagonal())
    dense = prior.grouped(torch.linalg.solve(M + A, M).diagonal())
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    solution = sample_posterior(ggn, prior, Draws(4000, 0), Dense())
    assert_close(effective_dimension(prior.grouped(solution.leverage), solution.exact)[0], dense, rtol=1e-6, atol=1e-8)
    sampled = replace(solution, leverage=solution.value * scaled.matmul(solution.value), exact=False)
    gamma, error = effective_dimension(prior.grouped(sampled.leverage), sampled.exact)
    assert ((gamma - dense).abs() < 5 * error).all()


def log_evidence(model: LinearModel, alpha: float, beta: float, scale: torch.Tensor) -> float:
    """Log marginal likelihood of the Gaussian linear model, from its dense definition."""
    J = (model.features.rows(torch.arange(model.features.num_data)) * scale).flatten(0, 1)
    covariance = J @ J.T / alpha + torch.eye(len(J), dtype=J.dtype) / beta
    target = (model.targets - model.offset).reshape(-1)
    zero = torch.zeros_like(target)
    return float(torch.distributions.MultivariateNormal(zero, covariance).log_prob(target))


@pytest.mark.parametrize("start", [100.0, 0.01])
def test_em_ends_at_a_maximum_of_the_dense_evidence(start: float) -> None:
    model = toy(60, width=10).with_likelihood(Gaussian(1.0))
    prior = built("g-prior", model, start)
    result = fit_em(model, prior, Draws(4, 0), Dense(), max_steps=200, tolerance=1e-8)
    assert result.converged
    alpha, beta = float(result.prior.precision), float(result.likelihood.noise_precision)
    best = log_evidence(model, alpha, beta, prior.scale)
    for factor in (0.9, 1.1):
        assert log_evidence(model, alpha * factor, beta, prior.scale) < best
    # There β·SSE of the network + α‖θ̄‖² = N·C.
    last = result.history[-1]
    sse = float(((model.network_outputs - model.targets) ** 2).sum())
    assert beta * sse + alpha * last.mode_norm[0] == pytest.approx(60, rel=1e-5)


def test_per_output_noise_explains_what_the_network_leaves_of_each_output() -> None:
    case = make_case("regression_per_output")
    model = case.linear_model()
    model = replace(model, features=DenseFeatures.of(model.features))
    prior = built("isotropic", model, 1.0)
    mode_outputs = model.outputs(linear_model_mode(model, prior, Dense()).value)[0]
    ggn = model.ggn(mode_outputs)
    num = 20_000
    samples = sample_posterior(ggn, prior, Draws(num, 0), Dense()).value
    J, b = reference.jacobian(case.model, case.x), case.likelihood.noise_precision
    S = torch.linalg.inv(make_dense(ggn) + torch.eye(ggn.size).double())
    gamma = torch.einsum("ncp,pq,ncq->c", J, S, J) * b
    errors = ((model.network_outputs - case.y) ** 2).sum(0)
    update = noise_update(model, dimensions_by_output(model, ggn, samples, mode_outputs).mean(0))
    assert_close(update, (len(J) - gamma) / errors, rtol=0.05, atol=0)
    scalar = model.with_likelihood(Gaussian(1.0))
    update = noise_update(scalar, gamma.sum()[None])
    assert_close(update, (J.shape[0] * 3 - gamma.sum()) / errors.sum())


@pytest.mark.parametrize("name", ["classification_many_data", "classification", "multi_label"])
def test_em_of_a_classifier_ends_at_the_dense_fixed_point(name: str) -> None:
    case = make_case(name)
    model = case.linear_model()
    model = replace(model, features=DenseFeatures.of(model.features))
    prior = built("g-prior", model, 1.0)
    result = fit_em(model, prior, Draws(2, 0), Dense(), max_steps=300, tolerance=1e-7)
    alpha = float(result.prior.precision)
    J, f = reference.jacobian(case.model, case.x), model.network_outputs
    A = alpha / prior.scale**2
    theta = reference.mode(case.likelihood, J, torch.zeros_like(f), case.y, A)
    gamma = reference.effective_dimension(reference.ggn(J, reference.curvature(case.likelihood, f, case.y)), A)
    # The fixed point: α = γ/‖θ̄‖², with ‖·‖ in scaled coordinates.
    assert alpha == pytest.approx(gamma / float(((theta / prior.scale) ** 2).sum()), rel=1e-4)
    assert_close(result.mode, theta, rtol=1e-3, atol=1e-5)


def test_layerwise_em_keeps_a_precision_a_layer() -> None:
    model = toy(60, width=10)
    prior = built("layerwise", model, 1.0)
    result = fit_em(model, prior, Draws(2, 0), Dense(), max_steps=60, tolerance=1e-3)
    last = result.history[-1]
    assert len(last.prior_precision) == len(last.effective_dimension) == 2
    for alpha, gamma, norm in zip(last.new_prior_precision, last.effective_dimension, last.mode_norm, strict=True):
        assert alpha == pytest.approx(gamma / norm, rel=1e-6)
    assert last.new_prior_precision[0] != pytest.approx(last.new_prior_precision[1], rel=0.1)


def test_sgd_em_agrees_with_exact_em() -> None:
    model = dense_model("classification_many_data")
    prior = built("g-prior", model, 1.0)
    exact = fit_em(model, prior, Draws(2, 0), Dense(), max_steps=100, tolerance=1e-5)
    solver = SGD(min_steps=150, batch_size=25)
    sgd = fit_em(model, prior, Draws(64, 0), solver, max_steps=20, tolerance=0.02)
    last = sgd.history[-1]
    gamma, error = last.effective_dimension[0], last.effective_dimension_se[0]
    assert last.passes > 4 * 64
    assert 0 < last.sample_residual <= 1
    assert sgd.converged
    # α ∝ γ at the fixed point, so its relative error is that of γ, up to the slope of the iteration.
    assert abs(math.log(float(sgd.prior.precision) / float(exact.prior.precision))) < 0.05 + 5 * error / gamma


def test_bounds_callback_and_limits_are_applied() -> None:
    model = toy(40, width=10)
    prior = built("g-prior", model, 1.0)
    seen: list[Step] = []
    result = fit_em(
        model,
        prior,
        Draws(2, 0),
        Dense(),
        max_steps=3,
        tolerance=1e-12,
        precision_bounds=(5.0, 6.0),
        noise_bounds=(0.1, 0.2),
        callback=seen.append,
    )
    assert seen == result.history
    assert [s.step for s in seen] == [1, 2, 3]
    assert all(5.0 <= s.new_prior_precision[0] <= 6.0 for s in seen)
    assert result.likelihood.noise_precision == 0.2
    fixed = model.with_likelihood(Gaussian(3.0, learn=False))
    assert fit_em(fixed, prior, Draws(2, 0), Dense(), max_steps=2).likelihood == fixed.likelihood


@pytest.mark.parametrize("slope", [-1.0, -1.8, -2.5])
def test_damped_steps_end_where_those_of_the_map_itself_oscillate(slope: float) -> None:
    x, steps = torch.tensor([1.0, -2.0], dtype=torch.float64), DampedSteps()
    for _ in range(60):
        x = x + steps.step(slope * x - x)
    assert float(x.abs().max()) < 1e-6


def test_steps_that_go_on_are_not_damped() -> None:
    x, steps = torch.tensor([1.0], dtype=torch.float64), DampedSteps()
    for num in range(5):
        assert float(x) == 0.5**num
        x = x + steps.step(0.5 * x - x)
        assert steps.length == 1
