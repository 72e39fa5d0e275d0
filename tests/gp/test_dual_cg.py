"""Matheron samples and the mode by conjugate gradients in observation space."""

import warnings
from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, FEW_CASES, Case, make_case
from grids import covering
from problems import make_prior
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.evidence.em import effective_dimension, fit_em, leverage_of
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.gp.dual_mode import dual_mode
from laplace_sampling.gp.evidence import HyperparameterBounds
from laplace_sampling.gp.linear_operators import settings
from laplace_sampling.gp.matheron import DualSolution, sample_matheron
from laplace_sampling.gp.posterior import of_largest_evidence
from laplace_sampling.gp.whitened_gram import LowRank, WhitenedGram, randomised_svd, solve_shifted
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.solver import ConvergenceWarning, Minimum, Objective, Quadratic, Solution, Solver


def setting(name: str, prior: str = "g-prior") -> tuple[Case, LinearModel, GGN, GaussianPrior]:
    case = make_case(name)
    model = case.linear_model("affine")
    model = replace(model, features=DenseFeatures.of(model.features))
    return case, model, model.ggn(model.network_outputs), make_prior(model, case, prior)


def dense(S: WhitenedGram) -> Tensor:
    return torch.cat([rows for rows in S.ggn.root_rows()]) * S.variance @ torch.cat([*S.ggn.root_rows()]).T


def decaying(num: int = 120, size: int = 400) -> tuple[GGN, GaussianPrior]:
    """A Gram matrix whose eigenvalues fall as a power."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(num, num, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(size, num, generator=generator, dtype=torch.float64))[0].T
    values = 60 / torch.arange(1, num + 1, dtype=torch.float64) ** 1.5
    features = DenseFeatures(((left * values) @ right)[:, None], batch_size=50)
    ggn = GGN(features, Gaussian(2.0), torch.zeros(num, 1, dtype=torch.float64))
    prior = GaussianPrior(torch.tensor([4.0]), torch.zeros(size, dtype=torch.long), torch.ones(size).double(), ("all",))
    return ggn, prior


@covering(indirect=["case"], case=CASES, prior=["isotropic", "g-prior", "layerwise"])
def test_same_draws_give_the_samples_of_weight_space(case: Case, prior: str) -> None:
    model = case.linear_model("affine")
    model = replace(model, features=DenseFeatures.of(model.features))
    ggn, built = model.ggn(model.network_outputs), make_prior(model, case, prior)
    draws = Draws(3, 1)
    found = sample_matheron(ggn, built, draws, tolerance=1e-9)
    expected = sample_posterior(ggn, built, draws, Dense())
    assert found.converged
    assert isinstance(found, Solution)
    largest = float(expected.value.abs().max())
    assert_close(found.value, expected.value, rtol=0, atol=1e-5 * largest)
    assert_close(found.delta, expected.delta, rtol=0, atol=1e-5 * largest)
    assert_close(found.residual, torch.zeros_like(found.residual), rtol=0, atol=1e-5)
    M = reference.ggn(model.features.matrix, reference.curvature(case.likelihood, model.network_outputs, case.y))
    scaled = built.scale[:, None] * M * built.scale
    assert_close(found.leverage, found.value * (found.value @ scaled), rtol=1e-6, atol=1e-8)
    assert found.iterations <= ggn.outputs.numel() + 3
    assert float(effective_dimension(leverage_of(found, built), found.exact)[0].sum()) > 0


def test_samples_of_a_network_by_products() -> None:
    case = make_case("conv_batch_norm")
    model = case.linear_model("homogeneous")
    ggn, built = model.ggn(model.network_outputs), make_prior(model, case, "g-prior")
    found = sample_matheron(ggn, built, Draws(2, 1), tolerance=1e-9)
    expected = sample_posterior(ggn, built, Draws(2, 1), Dense()).value
    assert_close(found.value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_the_operator_is_the_dense_matrix(case: Case) -> None:
    model = case.linear_model()
    S = WhitenedGram(torch.rand(model.features.size).double() + 0.5, model.ggn(model.network_outputs))
    columns = torch.randn(len(S), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(S.matmul(columns), dense(S) @ columns)
    assert S.rows == 3


def test_solves_reach_their_tolerance_and_count_products() -> None:
    ggn, prior = decaying()
    S = WhitenedGram(1 / prior.diagonal(), ggn)
    matrix = dense(S) + torch.eye(len(S), dtype=torch.float64)
    b = torch.randn(4, len(S), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = []
    for tolerance in (1e-2, 1e-4, 1e-8, 1e-11):
        before = S.rows
        found = solve_shifted(S, b * 1e-5, tolerance=tolerance)  # whatever the scale
        assert found.converged
        assert (found.residual <= tolerance).all()
        assert_close(
            found.residual, (b - found.value * 1e5 @ matrix).norm(dim=1) / b.norm(dim=1), rtol=1e-3, atol=1e-12
        )
        assert found.products == S.rows - before <= 4 * (found.iterations + 2)
        assert len(found.history) == found.iterations + 1
        counts.append(found.iterations)
    assert counts == sorted(counts)
    exact = torch.linalg.solve(matrix, b.T).T
    assert_close(found.value * 1e5, exact, rtol=1e-8, atol=1e-8)
    warm = solve_shifted(S, b, tolerance=1e-6, init=exact)
    assert warm.iterations == 0
    assert_close(warm.value, exact)
    loose = solve_shifted(S, b, tolerance=1e-6, init=exact + 1e-4 * b)
    assert loose.converged
    assert loose.iterations < solve_shifted(S, b, tolerance=1e-6).iterations


def test_preconditioners_cut_iterations() -> None:
    ggn, prior = decaying()
    S = WhitenedGram(1 / prior.diagonal(), ggn)
    b = torch.randn(4, len(S), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = solve_shifted(S, b, tolerance=1e-3).iterations
    solves = [solve_shifted(S, b, tolerance=1e-3, preconditioner=randomised_svd(S, rank)) for rank in (5, 40)]
    assert all(solve.converged for solve in solves)
    few, many = (solve.iterations for solve in solves)
    print(f"iterations to 1e-3: {plain} without, {few} at rank 5, {many} at rank 40")
    assert many < few < plain
    assert many <= 10


def test_preconditioners_of_full_rank_are_the_inverse() -> None:
    ggn, prior = decaying(30, 60)
    S = WhitenedGram(1 / prior.diagonal(), ggn)
    matrix = dense(S) + torch.eye(30, dtype=torch.float64)
    b = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    svd = randomised_svd(S, 99, seed=3)
    assert svd.products == 60
    assert_close(svd.solve(b), torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-6)
    assert_close(
        svd.rescaled(0.5).solve(b), torch.linalg.solve(matrix / 2 + torch.eye(30) / 2, b), rtol=1e-6, atol=1e-6
    )
    # The best approximation of rank r is close to what the SVD finds.
    few = randomised_svd(S, 5, oversampling=10)
    assert isinstance(few, LowRank)
    assert few.products == 30
    assert_close(few.eigenvalues, torch.linalg.eigvalsh(dense(S))[-5:], rtol=0.05, atol=0)
    assert not torch.equal(randomised_svd(S, 5, seed=1).vectors, few.vectors)
    with pytest.raises(ValueError, match="rank"):
        randomised_svd(S, 0)


def test_too_few_iterations_name_the_residual() -> None:
    ggn, prior = decaying()
    with pytest.warns(ConvergenceWarning, match="sample_matheron"):
        found = sample_matheron(ggn, prior, Draws(2, 0), max_iterations=2)
    assert not found.converged
    assert (found.dual_residual > 1e-6).all()
    model = LinearModel(ggn.features, ggn.outputs, ggn.outputs, ggn.outputs + 1, ggn.likelihood)
    with pytest.warns(ConvergenceWarning, match="dual_mode"):
        assert not dual_mode(model, prior, max_iterations=2).converged
    S = WhitenedGram(1 / prior.diagonal(), ggn)
    for options in ({"tolerance": 0.0}, {"max_iterations": 0}):
        with pytest.raises(ValueError, match="`tolerance`"):
            solve_shifted(S, torch.ones(1, len(S)), **options)


def test_a_start_and_a_preconditioner_change_the_cost_only() -> None:
    ggn, prior = decaying()
    plain = sample_matheron(ggn, prior, Draws(2, 0), tolerance=1e-8)
    S = WhitenedGram(1 / prior.diagonal(), ggn)
    helped = sample_matheron(ggn, prior, Draws(2, 0), tolerance=1e-8, preconditioner=randomised_svd(S, 40))
    again = sample_matheron(ggn, prior, Draws(2, 0), tolerance=1e-8, init=plain.coefficients)
    for other in (helped, again):
        assert_close(other.value, plain.value, rtol=1e-6, atol=1e-7)
        assert other.iterations < plain.iterations
        assert other.passes < plain.passes


# Fisher scoring, of unequal noise, converges linearly.
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("attention", "heteroscedastic")])
def test_the_mode_is_that_of_weight_space(name: str) -> None:
    _, model, _, built = setting(name)
    found = dual_mode(model, built, tolerance=1e-10)
    expected = linear_model_mode(model, built, Dense())
    assert found.converged
    assert isinstance(found, Minimum)
    assert found.residual < 1e-6
    assert_close(found.value, expected.value, rtol=1e-6, atol=1e-7)
    assert_close(found.outputs, model.outputs(expected.value * built.scale)[0], rtol=1e-6, atol=1e-7)


def test_options_of_the_mode() -> None:
    ggn, prior = decaying()
    targets = torch.randn(120, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = LinearModel(ggn.features, ggn.outputs, ggn.outputs, targets, ggn.likelihood)
    plain = dual_mode(model, prior)
    preconditioner = randomised_svd(WhitenedGram(1 / prior.diagonal(), ggn), 40)
    helped = dual_mode(model, prior, preconditioner=preconditioner)
    assert helped.iterations < plain.iterations
    assert_close(helped.outputs, plain.outputs, rtol=1e-6, atol=1e-6)
    _, classes, _, built = setting("classification")
    assert not dual_mode(classes, built, max_steps=1).converged


class WithoutNoise(Solver):
    """`DualCG` as a solver of any `Quadratic`."""

    def __init__(self, solver: DualCG) -> None:
        self.solver = solver

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        return self.solver.solve(problem, init)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        return self.solver.minimise(objective, init)


@pytest.mark.parametrize("options", [{}, {"rank": 8}, {"rank": 8, "seed": 1}])
@pytest.mark.parametrize("name", ["regression", "classification", "multi_label"])
def test_the_solver_agrees_with_dense_algebra(name: str, options: dict) -> None:
    _, model, ggn, built = setting(name)
    solver = DualCG(tolerance=1e-7, **options)
    draws = Draws(3, 0)
    expected = sample_posterior(ggn, built, draws, Dense())
    for route in (solver, WithoutNoise(solver)):
        found = sample_posterior(ggn, built, draws, route)
        assert found.converged
        assert isinstance(found, DualSolution)
        assert_close(found.value, expected.value, rtol=1e-5, atol=1e-5)
        assert_close(found.delta, expected.delta, rtol=1e-5, atol=1e-5)
        again = sample_posterior(ggn, built, draws, route, init=found.delta)
        assert_close(again.value, expected.value, rtol=1e-5, atol=1e-5)
        # with a preconditioner a start gains nothing where the noise is known
        assert again.passes < found.passes or (route is solver and solver.rank > 0)
    farther = sample_posterior(ggn, built, draws, solver, init=1e3 * torch.ones_like(expected.delta))
    assert_close(farther.value, expected.value, rtol=1e-5, atol=1e-5)
    modes = [linear_model_mode(model, built, s).value for s in (solver, Dense())]
    assert_close(modes[0], modes[1], rtol=1e-5, atol=1e-5)


def test_em_in_observation_space_ends_near_the_exact_optimum() -> None:
    """Within 5 % of the exact optimum in five steps, with two samples."""
    generator = torch.Generator().manual_seed(0)
    features = DenseFeatures(torch.randn(900, 1, 700, generator=generator, dtype=torch.float64))
    theta = 0.5 * torch.randn(1, 700, generator=generator, dtype=torch.float64)
    noise = torch.randn(900, 1, generator=generator, dtype=torch.float64)
    zero = torch.zeros(900, 1, dtype=torch.float64)
    model = LinearModel(features, zero, zero, features.outputs(theta)[0] + noise, Gaussian(1.0, learn=False))
    prior = IsotropicPrior(100.0).build(model.ggn(zero), ([], torch.zeros(0)), Draws(1, 0).noise(1))
    _, exact = of_largest_evidence(model, prior, HyperparameterBounds())
    steps = fit_em(model, prior, Draws(2, 0), DualCG(), max_steps=5, tolerance=1e-3).history
    print(f"EM: α {[s.new_prior_precision[0] for s in steps]} against {exact.precision}")
    assert abs(steps[-1].new_prior_precision[0] / exact.precision - 1) < 0.05


def test_refusals_of_the_solver() -> None:
    ggn, prior = decaying(20, 30)
    for options in ({"tolerance": 0.0}, {"rank": -1}, {"max_iterations": 0}, {"max_refinements": -1}):
        with pytest.raises(ValueError, match="max_refinements"):
            DualCG(**options)

    zero = torch.zeros(1, 30, dtype=torch.float64)
    problem = Quadratic(object(), prior.spread().double(), zero, zero)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="GGN"):
        DualCG().solve(problem)
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    rough = DualCG(tolerance=1e-9, max_iterations=2, max_refinements=1)
    assert not rough.solve(Quadratic(scaled, prior.spread().double(), zero, zero + 1)).converged


def test_settings_of_linear_operator_are_put_back_and_nothing_is_warned() -> None:
    ggn, prior = decaying(20, 30)
    before = settings.cg_tolerance.value(), settings.max_cg_iterations.value(), settings.terminate_cg_by_size.on()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample_matheron(ggn, prior, Draws(2, 0))
        S = WhitenedGram(1 / prior.diagonal(), ggn)
        randomised_svd(S, 3)
    assert torch.equal(torch.get_rng_state(), state)
    after = settings.cg_tolerance.value(), settings.max_cg_iterations.value(), settings.terminate_cg_by_size.on()
    assert after == before


@pytest.mark.parametrize("alpha", [0.4, 40.0])
def test_effective_dimension_of_few_samples_with_a_preconditioner(alpha: float) -> None:
    """The mean of many pairs within five standard errors, and a hundredth of the variance of `leverage` alone."""
    ggn, prior = decaying()
    # a preconditioner made at another α, whose vectors are far from eigenvectors of a part of `S`
    held = DualCG(rank=30, tolerance=1e-6).hold(WhitenedGram(1 / prior.diagonal(), ggn))
    assert held.held is not None
    assert held.held.trace == pytest.approx(float(dense(WhitenedGram(1 / prior.diagonal(), ggn)).trace()), rel=1e-8)
    prior = prior.with_precision(torch.tensor([alpha]))
    S = dense(WhitenedGram(1 / prior.diagonal(), ggn))
    exact = float(torch.linalg.solve(torch.eye(120).double() + S, S).trace())
    solution = sample_posterior(ggn, prior, Draws(1000, 0), held)
    assert solution.traces is not None
    traces, plain = solution.traces, solution.leverage.sum(1)
    error = float(traces.std() / 1000**0.5)
    print(f"γ = {exact:.3f}; {float(traces.mean()):.3f} ± {error:.3f}, variances {traces.var():.2g}, {plain.var():.2g}")
    assert abs(float(traces.mean()) - exact) < 5 * error
    assert traces.var() < 0.01 * plain.var()
    gamma, gamma_se = effective_dimension(leverage_of(solution, prior), solution.exact)
    assert float(gamma) == pytest.approx(float(traces.mean()))
    assert float(gamma_se) == pytest.approx(error)


def test_effective_dimensions_of_groups_do_without_the_preconditioner() -> None:
    """As do those of noise that differs between outputs."""
    _, _, ggn, layers = setting("regression", "layerwise")
    held = DualCG(rank=8).hold(WhitenedGram(1 / layers.diagonal(), ggn))
    solution = sample_posterior(ggn, layers, Draws(2, 0), held)
    assert solution.traces is None
    assert len(effective_dimension(leverage_of(solution, layers), solution.exact)[0]) == len(layers.names) > 1
    S = WhitenedGram(1 / layers.diagonal(), ggn)
    with pytest.raises(ValueError, match="`trace`"):
        randomised_svd(S, 8).traces(torch.ones(1, len(S)), torch.ones(1, len(S)))
    _, _, ggn, layers = setting("regression_per_output", "layerwise")
    held = DualCG(rank=8).hold(WhitenedGram(1 / layers.diagonal(), ggn))
    assert held.held is not None
    assert held.held.trace is None
