"""Samples and modes by conjugate gradients in observation space, against dense algebra."""

from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, FEW_CASES, Case, make_case
from grids import covering
from problems import make_prior
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.gp.dual import DualCG, WhitenedGram
from laplace_sampling.gp.evidence import HyperparameterBounds
from laplace_sampling.gp.posterior import of_largest_evidence
from laplace_sampling.hyperparameters.em import effective_dimension, fit_em
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel, linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior, IsotropicPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.solver import Quadratic

REGRESSIONS = ["regression", "regression_many_data", "regression_per_output", "image_regression"]


def setting(name: str, prior: str = "g-prior") -> tuple[LinearModel, GGN, GaussianPrior]:
    case = make_case(name)
    model = case.linear_model("affine")
    model = replace(model, features=DenseFeatures.of(model.features))
    return model, model.ggn(model.network_outputs), make_prior(model, case, prior)


def dense(S: WhitenedGram) -> Tensor:
    rows = torch.cat([*S.ggn.root_rows()])
    return rows * S.variance @ rows.T


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
    found, expected = (sample_posterior(ggn, built, draws, solver) for solver in (DualCG(1e-9), Dense()))
    assert found.converged
    largest = float(expected.value.abs().max())
    assert_close(found.value, expected.value, rtol=0, atol=1e-5 * largest)
    assert_close(found.delta, expected.delta, rtol=0, atol=1e-5 * largest)
    assert_close(found.residual, torch.zeros_like(found.residual), rtol=0, atol=1e-5)
    M = reference.ggn(model.features.matrix, reference.curvature(case.likelihood, model.network_outputs, case.y))
    scaled = built.scale[:, None] * M * built.scale
    assert_close(found.leverage, found.value * (found.value @ scaled), rtol=1e-6, atol=1e-8)
    assert float(effective_dimension(built.grouped(found.leverage), found.exact)[0].sum()) > 0


def test_samples_of_a_network_by_products() -> None:
    case = make_case("conv_batch_norm")
    model = case.linear_model("homogeneous")
    ggn, built = model.ggn(model.network_outputs), make_prior(model, case, "g-prior")
    found, expected = (sample_posterior(ggn, built, Draws(2, 1), solver).value for solver in (DualCG(1e-9), Dense()))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_the_operator_is_the_dense_matrix(case: Case) -> None:
    model = case.linear_model()
    S = WhitenedGram(model.ggn(model.network_outputs), torch.rand(model.features.size).double() + 0.5)
    rows = torch.randn(3, S.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(S.matmul(rows), rows @ dense(S))


def test_the_error_is_a_bound_and_products_are_counted() -> None:
    ggn, prior = decaying()
    exact = sample_posterior(ggn, prior, Draws(4, 0), Dense()).value
    J, passes = ggn.features.rows(torch.arange(120))[:, 0], []
    for tolerance in (1e-1, 1e-3, 1e-6, 1e-10):
        found = DualCG(tolerance).sample(ggn, prior, Draws(4, 0))
        assert found.converged
        true = ((found.value - exact) @ J.T).norm(dim=1) / (exact @ J.T).norm(dim=1)
        assert (true <= found.error + 1e-12).all()
        assert (found.error <= tolerance).all()
        passes.append(found.passes)
    assert passes == sorted(passes)
    assert not DualCG(1e-6, max_iterations=2).sample(ggn, prior, Draws(2, 0)).converged


def test_preconditioners_cut_products() -> None:
    ggn, prior = decaying()
    S, draws = WhitenedGram(ggn, 1 / prior.diagonal()), Draws(4, 0)
    plain = DualCG(1e-3).sample(ggn, prior, draws)
    few, many = (DualCG(1e-3, rank=rank).hold(S).sample(ggn, prior, draws) for rank in (5, 40))
    print(f"passes to 1e-3: {plain.passes} without, {few.passes} at rank 5, {many.passes} at rank 40")
    assert many.passes < few.passes < plain.passes
    assert many.passes <= 4 * 13
    assert_close(many.value, plain.value, rtol=1e-2, atol=1e-2)
    # One that was made at another prior precision, or is built in the solve.
    moved = prior.with_precision(torch.tensor([0.4]))
    held, built = DualCG(1e-8, rank=40).hold(S), DualCG(1e-8, rank=40)
    a, b = (solver.sample(ggn, moved, draws) for solver in (held, built))
    assert_close(a.value, b.value, rtol=1e-5, atol=1e-6)
    assert a.passes < b.passes < a.passes + 42


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_mode_is_that_of_weight_space(name: str, rank: int) -> None:
    model, _, built = setting(name)
    solver, expected = DualCG(1e-6, rank=rank), linear_model_mode(model, built, Dense())
    found = linear_model_mode(model, built, solver)
    assert found.converged
    assert found.residual < 1e-6
    assert_close(found.value, expected.value, rtol=1e-6, atol=1e-7)


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
    for options in ({"tolerance": 0.0}, {"rank": -1}, {"max_iterations": 0}):
        with pytest.raises(ValueError, match="tolerance"):
            DualCG(**options)
    zero = torch.zeros(1, 30, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="samples"):
        DualCG().solve(Quadratic(WhitenedGram(*_any()), zero[0], zero, zero))
    model, _, built = setting("classification")
    with pytest.raises(TypeError, match="Gaussian"):
        linear_model_mode(model, built, DualCG())


def _any() -> tuple[GGN, Tensor]:
    ggn, prior = decaying(20, 30)
    return ggn, 1 / prior.diagonal()
