"""Solvers within their tolerance, and EM on samples."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from flat_settings import laplace_of
from problems import linear_problem
from torch import Tensor, nn

from laplace_sampling import SGD, ConvergenceWarning, Data, Dual, Evidence, Exact, Krylov, Method, Stochastic
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.sampling import draw
from laplace_sampling.methods.problem import Memory
from laplace_sampling.preparation import prepare
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.svrg import SVRG


def test_solvers_take_what_the_tolerance_asks() -> None:
    model, data = linear_problem(inputs=20)
    task = laplace_of(model, "regression", num_samples=4)

    def solver(method: Method, tolerance: float, vectors: int = 10**6) -> Any:
        problem = prepare(task.settings, task.network, data, Data(), progress=False)
        problem = replace(problem, free_bytes=8 * 21 * vectors)
        return method.make_solver(method.prepare(problem), tolerance, None)

    assert solver(Krylov(), 0.015).tolerance == BlockKrylov().tolerance
    assert solver(Krylov(), 0.0015).tolerance == pytest.approx(0.003)
    assert solver(Krylov(), 10.0).tolerance == 0.5
    assert solver(Krylov(), 0.015, vectors=100).max_basis == (100 - 17 * 4) // 3
    assert solver(Stochastic(solver=SVRG()), 0.015).tolerance == pytest.approx(SVRG().tolerance)
    assert solver(Stochastic(solver=SVRG()), 0.0015).tolerance == pytest.approx(0.001)
    for tolerance in (0.015, 0.0015):
        error = solver(Stochastic(solver=SGD()), tolerance).tolerance
        assert error**2 / 2 + error / 4**0.5 == pytest.approx(tolerance)
    assert solver(Stochastic(solver=SGD()), 10.0).tolerance == 0.5
    assert solver(Stochastic(solver=SGD(tolerance=0.2)), 0.015).tolerance == 0.2
    assert solver(Dual(), 0.0015).tolerance == pytest.approx(0.003)
    assert solver(Dual(accuracy=1e-6), 0.0015).tolerance == 1e-6
    assert isinstance(solver(Exact(), 0.015), Dense)


def test_a_tighter_tolerance_is_closer_to_dense_algebra() -> None:
    model, data = linear_problem(inputs=120, num_data=100)
    settings = {"prior": "isotropic", "noise_precision": 5.0, "num_samples": 2}
    exact = laplace_of(model, "regression", method="exact", **settings)
    exact.fit_hyperparameters(data, criterion=Evidence(max_steps=2000), tolerance=1e-6, progress=False)
    best = float(exact.prior_precision_.log())
    fixed = {**settings, "prior_precision": 0.05}
    truth = laplace_of(model, "regression", method="exact", **fixed).fit(data, progress=False)
    alphas, errors = [], []
    for tolerance in (0.2, 0.015, 0.004):
        la = laplace_of(model, "regression", method="krylov", **settings)
        la.fit_hyperparameters(data, tolerance=tolerance, criterion=Evidence(max_steps=20), progress=False)
        alphas.append(abs(float(la.prior_precision_.log()) - best))
        drawn = laplace_of(model, "regression", method="krylov", **fixed).fit(data, tolerance=tolerance, progress=False)
        f, g = (one.predict(data[0][0]).samples for one in (truth, drawn))
        errors.append(float(((f - g).flatten(1).norm(dim=1) / f.flatten(1).norm(dim=1)).max()))
        assert errors[-1] <= 2 * tolerance
        assert alphas[-1] <= 3 * 2 * tolerance  # three standard errors
    print("errors of log α", alphas, "of samples", errors)
    assert errors[0] > errors[1] > errors[2]
    assert max(alphas) < 2e-3  # whatever the tolerance is


def test_errors_of_a_solve_are_independent_of_the_sample() -> None:
    """So that they add to variances, by the square of their size."""
    model, data = linear_problem(num_data=40)
    la = laplace_of(model, "regression", method="krylov", prior="isotropic", prior_precision=0.1, num_samples=2)
    la.fit(data, progress=False)
    linear = la._fitted.fit.model
    ggn, prior, draws = linear.ggn(linear.network_outputs), la._fitted.posterior.prior, Draws(3000, 0)
    root = torch.cat(list(ggn.root_rows())).double()
    rows = partial(draw, ggn, prior, draws, rows=3000, dtype=torch.float64)
    truth, rough = (rows(solver).samples @ root.T for solver in (Dense(), CG(0.4)))
    inner, squared = (truth * (rough - truth)).sum(1), ((rough - truth) ** 2).sum(1)
    error = float(inner.std()) / len(inner) ** 0.5
    assert abs(float(inner.mean())) < 4 * error
    assert float(squared.mean()) > 20 * error  # the error is there to be seen


def test_layerwise_priors_go_by_em_with_warm_starts(monkeypatch) -> None:
    model, data = linear_problem("classification")
    starts: list[Tensor | None] = []
    solve = BlockKrylov.solve

    def recorded(self, problem, init=None, *, description=None):
        solution = solve(self, problem, init, description=description)
        starts.append(init)
        if init is not None and len(problem.centre) == 16:
            cold = solve(self, problem)
            warm_and_cold.append((solution.passes, cold.passes))
        return solution

    warm_and_cold: list[tuple[float, float]] = []
    monkeypatch.setattr(BlockKrylov, "solve", recorded)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(model, nn.Tanh(), nn.Linear(2, 2).double())
    settings = {"prior": "layerwise", "num_samples": 2}
    la = laplace_of(model, "classification", method="krylov", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of five steps
        la.fit_hyperparameters(data, criterion=Evidence(max_steps=5), tolerance=0.001, progress=False)
    assert len(starts) == len(la.history_) + 1
    assert starts[0] is None
    assert starts[-1] is None  # the samples that are kept are new ones
    assert all(start is not None for start in starts[1:-1])
    assert len(warm_and_cold) == len(la.history_) - 1
    assert sum(warm for warm, _ in warm_and_cold) <= 1.1 * sum(cold for _, cold in warm_and_cold)
    exact = laplace_of(model, "classification", method="exact", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        exact.fit_hyperparameters(data, criterion=Evidence(max_steps=5), tolerance=0.001, progress=False)
    assert len(la.prior_precision_) == 2
    for step, other in zip(la.history_[:2], exact.history_[:2], strict=True):
        # the exact γ has no error; that of its samples is told
        allowed = 5 * torch.tensor(step.effective_dimension_se) / torch.tensor(step.effective_dimension) + 0.05
        ratio = torch.tensor(step.new_prior_precision) / torch.tensor(other.new_prior_precision)
        assert (ratio.log().abs() < 2 * allowed).all()


@pytest.mark.parametrize("vectors", [100, 300, 5000, 10**6])
@pytest.mark.parametrize(
    "method",
    [Krylov(), Stochastic(solver=SGD()), Stochastic(solver=SVRG()), Dual()],
    ids=["krylov", "sgd", "svrg", "dual"],
)
def test_rows_and_what_is_held_fit_in_memory(method: Method, vectors: int) -> None:
    memory, num_samples = Memory(4.0 * vectors, True, 4), 16
    held = method.preconditioner_vectors(memory, num_samples)
    rows = method.rows(memory, num_samples)
    assert rows >= 1
    assert rows == 1 or held + rows * method.stacks <= vectors
    assert rows == 1 or rows > method.rows(memory, num_samples, held=2 * method.stacks)
    assert method.em_rows(SGD(), memory, num_samples, 16) <= 16
