from dataclasses import replace

import pytest
import torch
from cases import make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.dense import Dense
from laplace_sampling.likelihoods import Gaussian
from laplace_sampling.operators import GGN, DenseFeatures
from laplace_sampling.preconditioners import Nystrom
from laplace_sampling.priors import IsotropicPrior
from laplace_sampling.sampling import Draws, linear_model_mode
from laplace_sampling.solvers import Quadratic, make_dense
from laplace_sampling.stochastic import SGD
from laplace_sampling.variance_reduced import SVRG


def problem(num_data: int = 2000, size: int = 30, rows: int = 3, scale: float = 1.0, spread: float = 0.0) -> Quadratic:
    """Posterior samples of a model whose eigenvalues fall from 1e3 to 6 times the prior's, rows of unequal norm."""
    g = torch.Generator().manual_seed(0)
    features = torch.randn(num_data, 2, size, generator=g, dtype=torch.float64) / (2 * num_data) ** 0.5
    features *= 30 * torch.arange(1, size + 1, dtype=torch.float64) ** -0.75
    features *= torch.exp(0.5 * torch.randn(num_data, 1, 1, generator=g, dtype=torch.float64))
    ggn = GGN(DenseFeatures(features), Gaussian(scale), torch.zeros(num_data, 2, dtype=torch.float64))
    precision = scale * torch.exp(spread * torch.randn(size, generator=g, dtype=torch.float64))
    centre = torch.randn(rows, size, generator=g, dtype=torch.float64) / precision.sqrt()
    noise = torch.randn(rows, 2 * num_data, generator=g, dtype=torch.float64) * scale**0.5
    return Quadratic(ggn, precision, centre, noise @ features.flatten(0, 1))


def error(p: Quadratic, value: Tensor) -> float:
    """`‖Φ(ζ − ζ*)‖²_B / ‖Φζ*‖²_B`."""
    M = make_dense(p.operator)
    truth = torch.linalg.solve(M + torch.diag(p.precision), (p.linear + p.precision * p.centre).T).T
    gap = value - truth
    return float(((gap @ M) * gap).sum() / ((truth @ M) * truth).sum())


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["isotropic", "layer-wise"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_one_epoch_is_enough_at_every_scale(scale: float, spread: float) -> None:
    p = problem(scale=scale, spread=spread)
    solution = SVRG(max_snapshots=1).solve(p)
    assert error(p, solution.value) < 0.02
    assert_close(solution.value, p.centre + solution.delta)
    # SGD with the same number of steps, and after four epochs, is further away.
    assert error(p, SGD(epochs=4, batch_size=32, max_doublings=0).solve(p).value) > 1.5 * error(p, solution.value)


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["isotropic", "layer-wise"])
def test_snapshots_lead_to_the_solution(spread: float) -> None:
    p = problem(spread=spread)
    errors = [error(p, SVRG(max_snapshots=n, tolerance=1e-20).solve(p).value) for n in (1, 2, 3, 7)]
    assert errors[1] < 0.1 * errors[0]
    assert errors[2] < 0.1 * errors[1]
    assert errors[3] < 1e-9


def test_a_snapshot_lies_at_the_minimum_along_its_move() -> None:
    p = problem()
    first, second = (SVRG(max_snapshots=n, tolerance=1e-20).solve(p).delta for n in (1, 2))
    gradient = p.operator.matmul(p.centre + second) - p.linear + p.precision * second
    slope = (gradient * (second - first)).sum(1)
    before = p.operator.matmul(p.centre + first) - p.linear + p.precision * first
    assert float(slope.abs().max()) < 1e-8 * float((before * (second - first)).sum(1).abs().min())


def test_a_strong_prior_is_part_of_the_variance_reduced_gradient() -> None:
    p = problem()
    p = replace(p, precision=100 * p.precision)
    assert error(p, SVRG(max_snapshots=3, tolerance=1e-20).solve(p).value) < 1e-7


def test_residual_and_leverage_are_those_of_the_value() -> None:
    p = problem(spread=1.0)
    for snapshots in (1, 3):
        solution = SVRG(max_snapshots=snapshots, tolerance=1e-20).solve(p)
        product = p.operator.matmul(solution.value)
        fit, pull = product - p.linear, p.precision * solution.delta
        assert_close(solution.leverage, solution.value * product)
        assert_close(solution.residual, (fit + pull).norm(dim=1) / (fit.norm(dim=1) + pull.norm(dim=1)))
        assert not solution.exact


def test_the_tolerance_bounds_the_error_in_function_space() -> None:
    p = problem()
    M = make_dense(p.operator)
    for tolerance in (0.1, 0.01, 1e-4):
        solution = SVRG(tolerance=tolerance, max_snapshots=8).solve(p)
        assert solution.converged
        assert error(p, solution.value) < tolerance
    # With a preconditioner of full rank the estimate is the squared error in the norm of H.
    solver = SVRG(max_snapshots=1, max_rank=60)
    value, delta = (s := solver.solve(p)).value, s.delta
    g = p.operator.matmul(value) - p.linear + p.precision * delta
    H = M + torch.diag(p.precision)
    true = ((g @ torch.linalg.inv(H)) * g).sum(1) / ((value @ M) * value).sum(1)
    assert replace(solver, tolerance=1.6 * float(true.max())).solve(p).converged
    assert not replace(solver, tolerance=0.6 * float(true.max())).solve(p).converged


def test_an_unfinished_solve_says_so() -> None:
    solution = SVRG(max_snapshots=2, tolerance=1e-12).solve(problem())
    assert not solution.converged


def test_rows_do_not_know_of_each_other() -> None:
    p, solver = problem(), SVRG(max_snapshots=2, tolerance=1e-20)
    loud = replace(p, linear=p.linear * torch.tensor([[1.0], [1e6], [1.0]], dtype=torch.float64))
    assert_close(solver.solve(loud).value[0], solver.solve(p).value[0])


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["isotropic", "layer-wise"])
def test_a_warm_start_helps_and_a_bad_one_is_dropped(spread: float) -> None:
    p, short = problem(spread=spread), SVRG(epochs=0.05, max_snapshots=1)
    best = Dense().solve(p).delta
    cold = error(p, short.solve(p).value)
    assert error(p, short.solve(p, init=best).value) < 0.1 * cold
    assert_close(short.solve(p, init=best + 1e9).delta, short.solve(p, init=0 * best).delta)


def test_divergence_restarts_with_a_smaller_step() -> None:
    batches = iter(torch.arange(2).expand(10_000, 2))
    start = torch.ones(1, 4, dtype=torch.float64)
    # A curvature of 300 that was estimated as 1: the sixth step size, 1/243, is below 2/300.
    end, seen = SVRG()._descend(lambda d, _: 300 * d, lambda g: g, batches, start, 100, 1.0, None)
    assert float(end.norm()) < 1e-6
    assert 2 * 105 < seen < 2 * 145  # a run is given up as soon as it grows a thousandfold


def test_an_outlier_is_paid_with_snapshots() -> None:
    p = problem()
    p.operator.features.matrix[7] *= 30
    noise = torch.randn(3, 4000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    p = replace(p, linear=noise @ p.operator.features.matrix.flatten(0, 1))
    first, last = SVRG(max_snapshots=1).solve(p), SVRG().solve(p)
    assert not first.converged
    assert last.converged
    assert error(p, last.value) < 0.1 * error(p, first.value)


def test_unstable_problems_are_refused_in_words() -> None:
    p = problem()
    with pytest.raises(FloatingPointError, match=r"SVRG diverged 6 times.*Try float64 or a larger"):
        SVRG().solve(replace(p, linear=p.linear * float("nan")))
    features = DenseFeatures(torch.full((4, 1, 2), float("nan"), dtype=torch.float64))
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    ggn = GGN(features, Gaussian(), torch.zeros(4, 1, dtype=torch.float64))
    with pytest.raises(FloatingPointError, match="contain NaN or infinity"):
        SVRG().solve(Quadratic(ggn, torch.ones(2, dtype=torch.float64), zeros, zeros))


def test_data_that_say_nothing_leave_the_prior() -> None:
    features = DenseFeatures(torch.zeros(40, 1, 5, dtype=torch.float64))
    ggn = GGN(features, Gaussian(), torch.zeros(40, 1, dtype=torch.float64))
    centre = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solution = SVRG().solve(Quadratic(ggn, torch.ones(5, dtype=torch.float64), centre, 0 * centre))
    assert_close(solution.value, centre)
    assert solution.converged


@pytest.mark.parametrize("warm", [False, True])
def test_passes_count_the_products_that_were_made(warm: bool) -> None:
    case = make_case("classification_many_data")
    model = case.linear_model()
    network = model.features.network
    ggn = model.ggn(model.network_outputs)
    zeros = torch.zeros(4, ggn.size, dtype=torch.float64)
    network.products.update(jvp=0, vjp=0)
    p = Quadratic(ggn, torch.ones(ggn.size).double(), zeros, zeros + 1)
    solver = SVRG(batch_size=6, max_rank=3, max_snapshots=2, tolerance=1e-20)
    solution = solver.solve(p, init=zeros if warm else None)
    assert network.products["jvp"] == network.products["vjp"]
    assert solution.passes == pytest.approx(network.products["jvp"] / 25)
    # A sketch of 3, 4 batches of 6 × 6 power iterations, and of 4 rows 2 epochs of 5 steps, the last of one datum, and
    # 2 full products; 6 probes of 6 data, if warm, shift the epochs by 3 steps.
    power, sketch = 4 * 6 * 6, 3 * 25
    epochs = [25, 25] if not warm else [36 + 25, 25]
    assert network.products["jvp"] == power + sketch + 4 * (sum(epochs) + 2 * 25)


def test_the_linear_term_enters_in_full() -> None:
    p, solver = problem(), SVRG(max_snapshots=1)
    high = replace(p, linear_batch=lambda batch: torch.full_like(p.linear, torch.nan))
    assert_close(solver.solve(high).value, solver.solve(p).value)


def test_the_preconditioner_is_a_sketch_of_a_subsample(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    of = Nystrom.of.__func__
    monkeypatch.setattr(Nystrom, "of", classmethod(lambda *a, **k: calls.append((a, k)) or of(*a, **k)))
    SVRG(max_snapshots=1).solve(problem())
    ((_, _, batch), settings) = calls[0]
    assert len(batch.unique()) == 500
    assert settings["num_rhs"] == 3
    assert settings["shift"] == 1


def test_minimise_is_that_of_sgd() -> None:
    case = make_case("classification_many_data")
    model = case.linear_model()
    prior = IsotropicPrior().build(model.ggn(model.network_outputs), ([], torch.zeros(0)), 1.0, Draws(1, 0).noise(3))
    assert_close(linear_model_mode(model, prior, SVRG()).value, linear_model_mode(model, prior, SGD()).value)


@pytest.mark.parametrize("setting", [{"epochs": 0.0}, {"step": -1.0}, {"max_snapshots": 0}, {"batch_size": -3}])
def test_bad_settings_are_refused(setting: dict) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SVRG(**setting)
