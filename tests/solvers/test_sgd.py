from dataclasses import replace

import pytest
import torch
from cases import make_case
from quadratics import classification, exact, moderate, true_error
from torch.testing import assert_close

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Quadratic


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_sgd_converges_at_every_scale_without_a_step_size(scale: float) -> None:
    p = moderate(scale=scale)
    solution = SGD(epochs=400, batch_size=50).solve(p)
    assert_close(solution.value, exact(p), rtol=0.02, atol=0.02)
    assert solution.converged
    assert not solution.exact
    assert_close(solution.value, p.centre + solution.delta)
    assert_close(solution.leverage, solution.value * p.operator.matmul(solution.value))


def test_sgd_on_full_batches_is_exact() -> None:
    p = moderate()
    solution = SGD(min_steps=2000, batch_size=300).solve(p)
    assert_close(solution.value, exact(p), rtol=1e-8, atol=1e-10)
    assert float(solution.residual.max()) < 1e-8


def test_a_warm_start_helps_and_a_bad_one_is_dropped() -> None:
    p = moderate()
    best, short = Dense().solve(p).delta, SGD(epochs=1, min_steps=10, step=0.3, finish_passes=0)
    cold = (short.solve(p).delta - best).norm()
    assert (short.solve(p, init=best).delta - best).norm() < 0.5 * cold
    assert_close(short.solve(p, init=best + 1e9).delta, short.solve(p).delta)


def test_clipping_bounds_the_first_step() -> None:
    p = moderate()
    free, clipped = (
        SGD(epochs=1, min_steps=1, batch_size=300, clip=c, finish_passes=0).solve(p).delta.norm(dim=1)
        for c in (1e9, 0.1)
    )
    assert_close(clipped, 0.1 * free)


def test_divergence_restarts_with_a_smaller_step() -> None:
    p = moderate()
    solution = SGD(epochs=200, batch_size=50, step=100.0, clip=1e9).solve(p)
    assert_close(solution.value, exact(p), rtol=0.1, atol=0.05)


def test_an_unfinished_solve_says_so() -> None:
    p = replace(moderate(), precision=torch.full((8,), 1e-6, dtype=torch.float64))
    solution = SGD(epochs=1, min_steps=2, tolerance=1e-3, finish_passes=0).solve(p)
    assert not solution.converged
    # Conjugate gradients go on from there until it has converged: one pass for each row and step.
    longer = SGD(epochs=1, min_steps=2, tolerance=1e-3, finish_passes=20).solve(p)
    assert longer.converged
    assert float(longer.error.max()) < 1e-3
    assert 0 < longer.passes - solution.passes <= 3 * 20


def test_errors_that_are_reported_are_bounds() -> None:
    p = replace(moderate(), precision=torch.full((8,), 1.0, dtype=torch.float64))
    for solver in (SGD(epochs=1, min_steps=10, finish_passes=0), SGD(epochs=1, min_steps=10)):
        solution = solver.solve(p)
        # A row may be exact up to rounding, of its true error as well.
        assert (true_error(p, solution.value) <= solution.error * (1 + 1e-9) + 1e-13).all()
    assert solution.converged
    assert float(solution.error.max()) < 0.09


def test_a_mode_that_the_descent_leaves_is_finished_or_told() -> None:
    objective, zero = classification(alpha=0.01)
    best = Dense().minimise(objective, zero).value
    short = SGD(mode_epochs=1, min_steps=5, finish_passes=0).minimise(objective, zero)
    assert not short.converged
    finished = SGD(mode_epochs=1, min_steps=5, tolerance=1e-3).minimise(objective, zero)
    assert finished.converged
    assert_close(finished.value, best, rtol=1e-3, atol=1e-3)


def test_passes_count_the_products_that_were_made() -> None:
    case = make_case("classification_many_data")
    model = case.linear_model()
    network = model.features.network
    ggn = model.ggn(model.network_outputs)
    zeros = torch.zeros(4, ggn.size, dtype=torch.float64)
    network.products.update(jvp=0, vjp=0)
    solution = SGD(epochs=3, min_steps=1, batch_size=5, tolerance=1e-6, finish_passes=1).solve(
        Quadratic(ggn, torch.ones(ggn.size).double(), zeros, zeros + 1)
    )
    # 5 batches of 5 × 8 power iterations, 6 probe gradients of 4 rows, 15 steps of 4 rows, the residual, and a step of
    # conjugate gradients.
    assert network.products["jvp"] == network.products["vjp"] == 25 * 8 + 6 * 5 * 4 + 15 * 5 * 4 + 2 * 25 * 4
    assert solution.passes == pytest.approx(network.products["jvp"] / 25)


def test_likelihoods_of_the_objective_do_not_matter_to_a_solver() -> None:
    case = make_case("classification_many_data")
    model = case.linear_model()
    model = replace(model, features=DenseFeatures.of(model.features))
    assert isinstance(model.likelihood, Categorical)
    ggn = model.ggn(model.network_outputs)
    noise = torch.randn(2, 2, ggn.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = Quadratic(ggn, torch.ones(ggn.size).double(), noise[0], noise[1])
    assert_close(SGD(min_steps=1500, batch_size=25).solve(p).value, Dense().solve(p).value, rtol=1e-6, atol=1e-8)
