from dataclasses import replace

import pytest
import torch
from grids import covering
from quadratics import classification, exact, spectral, true_error
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, Basis, BlockKrylov
from laplace_sampling.solvers.newton import newton
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.preconditioners import Jacobi, Nystrom
from laplace_sampling.solvers.solver import Quadratic, whiten

SOLVERS = {"block": BlockKrylov, "krylov": CG}


@pytest.fixture(params=list(SOLVERS))
def kind(request: pytest.FixtureRequest) -> type[BlockKrylov] | type[CG]:
    return SOLVERS[request.param]


def true_residual(p: Quadratic, delta: Tensor) -> Tensor:
    """From the products anew, in the coordinates of an isotropic prior."""
    white, shift, w = whiten(p)
    d = delta / w
    fit = (white.centre + d) @ make_dense(white.operator) - white.linear
    return (fit + shift * d).norm(dim=1) / (fit.norm(dim=1) + (shift * d).norm(dim=1))


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "non-uniform"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_solutions_equal_dense_ones_at_every_scale(kind, scale: float, uniform: bool) -> None:
    p = spectral(1e2, scale=scale, uniform=uniform)
    solution, dense = kind(tolerance=1e-6).solve(p), Dense().solve(p)
    assert solution.converged
    assert not solution.exact
    assert float(true_error(p, solution.value).max()) < 3e-6
    size = dense.value.norm(dim=1).max()
    assert_close(solution.value / size, dense.value / size, rtol=0, atol=1e-5)
    assert_close(solution.value, p.centre + solution.delta)
    assert_close(solution.leverage, solution.value * p.operator.matmul(solution.value), rtol=1e-6, atol=1e-8)


@covering(strength=2, condition=[1e2, 1e4, 1e6], uniform=[True, False], tolerance=[0.1, 1e-3])
def test_reported_errors_are_true(kind, condition: float, uniform: bool, tolerance: float) -> None:
    p = spectral(condition, size=150, uniform=uniform)
    solution = kind(tolerance=tolerance, max_iterations=5000).solve(p)
    assert solution.converged
    assert float(solution.error.max()) <= tolerance
    assert_close(solution.residual, true_residual(p, solution.delta), rtol=1e-5, atol=1e-10)
    truth = true_error(p, solution.value)
    assert float(truth.max()) <= 3 * tolerance
    assert bool((truth <= 5 * solution.error).all())


@pytest.mark.parametrize("max_basis", [4, 16])
@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_a_small_basis_converges_too(condition: float, max_basis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, extend = [], Basis.extend

    def watched(self: Basis, rows: Tensor) -> int:
        new = extend(self, rows)
        sizes.append(self.size)
        return new

    monkeypatch.setattr(Basis, "extend", watched)
    p = spectral(condition, rows=6)
    p.operator.count = 0
    solution = BlockKrylov(tolerance=1e-2, max_iterations=2000, max_basis=max_basis).solve(p)
    assert solution.converged
    assert float(true_error(p, solution.value).max()) < 3e-2
    assert max(sizes) <= max_basis
    assert len(sizes) > max_basis  # it was restricted
    assert_close(solution.residual, true_residual(p, solution.delta), rtol=1e-5, atol=1e-10)


def test_restricting_a_basis_keeps_its_products() -> None:
    p = spectral(1e2)
    basis = Basis(p.operator)
    assert basis.extend(p.linear) == 4
    new_product = basis.combine_products(torch.eye(4, dtype=torch.float64))
    assert basis.extend(torch.cat([p.linear[:2] @ torch.eye(80).double(), new_product])) == 4
    assert basis.extend(p.linear.flip(0)) == 0  # nothing new
    assert basis.passes == p.operator.count == 8
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0][
        :3
    ]
    before = basis.combine(rotation)
    basis.restrict(rotation)
    assert p.operator.count == 8
    V = basis.combine(torch.eye(3, dtype=torch.float64))
    assert_close(V, before)
    assert_close(V @ V.T, torch.eye(3, dtype=torch.float64))
    M = make_dense(p.operator)
    assert_close(basis.T, V @ M @ V.T)
    assert_close(basis.combine_products(torch.eye(3, dtype=torch.float64)), V @ M)


def test_converged_rows_cost_no_product(kind) -> None:
    p = spectral(10.0, rows=2)
    best = exact(p) - p.centre
    solver = kind(tolerance=1e-3)
    init = torch.stack([best[0], torch.zeros_like(best[1])])
    alone = replace(p, centre=p.centre[1:], linear=p.linear[1:])
    p.operator.count = 0
    one = solver.solve(alone, init[1:])
    spent, p.operator.count = p.operator.count, 0
    both = solver.solve(p, init)
    assert p.operator.count == spent + 1  # its residual
    assert both.passes == one.passes + 1
    assert_close(both.value[1:], one.value, rtol=0, atol=1e-3)  # rounding grows in conjugate gradients
    assert_close(both.value[0], exact(p)[0])
    p.operator.count = 0
    assert solver.solve(p, best).passes == p.operator.count == 2
    # Zero is the solution.
    easy = replace(p, linear=p.linear * 0, centre=p.centre * 0)
    p.operator.count = 0
    assert solver.solve(easy).converged
    assert p.operator.count == 0


def test_a_warm_start_helps(kind) -> None:
    p = spectral(1e4)
    solver = kind(tolerance=1e-2)
    cold = solver.solve(p)
    near = replace(p, precision=1.1 * p.precision, centre=p.centre / 1.1**0.5)
    warm, again = solver.solve(near, cold.delta / 1.1**0.5), solver.solve(near)
    assert warm.converged
    assert float(true_error(near, warm.value).max()) < 0.03
    assert warm.passes < 0.8 * again.passes


@pytest.mark.parametrize("samples", [True, False], ids=["samples", "zero-centre"])
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "non-uniform"])
def test_passes_count_the_products_that_were_made(kind, uniform: bool, samples: bool) -> None:
    p = spectral(1e3, uniform=uniform, samples=samples)
    solution = kind(tolerance=0.01).solve(p)
    assert solution.passes == p.operator.count
    p.operator.count = 0
    again = kind(tolerance=0.01).solve(p, init=torch.ones_like(p.centre))
    assert again.passes == p.operator.count


def test_a_budget_too_small_is_reported(kind) -> None:
    p = spectral(1e4)
    solution = kind(tolerance=1e-3, max_iterations=1).solve(p)
    assert not solution.converged
    assert float(solution.error.max()) > 1e-3
    assert_close(solution.residual, true_residual(p, solution.delta), rtol=1e-5, atol=1e-10)
    objective, zero = classification()
    assert not newton(objective, zero, lambda M, A, g, _: (0 * g, 0.0), tolerance=1e-3, max_steps=0).converged


def test_a_basis_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match="max_basis"):
        BlockKrylov(max_basis=3)


@pytest.mark.parametrize("condition", [1e4, 1e6])
def test_a_preconditioner_saves_passes(condition: float) -> None:
    p = spectral(condition, size=150)
    plain = CG(tolerance=1e-2).solve(p)
    nystrom = Nystrom.of(p.operator, 64)
    solution = CG(tolerance=1e-2, preconditioner=nystrom).solve(p)
    assert solution.converged
    assert float(true_error(p, solution.value).max()) < 0.03
    assert solution.passes < plain.passes
    jacobi = CG(tolerance=1e-2, preconditioner=Jacobi(p.operator.operator.diagonal())).solve(p)
    assert jacobi.converged
    assert float(true_error(p, jacobi.value).max()) < 0.03


def test_many_rows_need_fewer_products_each() -> None:
    p = spectral(1e4, size=300, rows=16)
    first = replace(p, centre=p.centre[:1], linear=p.linear[:1])
    many, one = (BlockKrylov(tolerance=0.03).solve(q).passes for q in (p, first))
    assert many / 16 < 0.7 * one
    # In conjugate gradients rows share nothing.
    assert CG(0.03).solve(p).passes / 16 > 0.7 * CG(0.03).solve(first).passes


def test_a_preconditioner_of_all_of_the_curvature_needs_one_step_with_unequal_priors_too() -> None:
    p = spectral(1e4, uniform=False)
    preconditioner = Nystrom.of(p.operator, 80)
    solution = CG(1e-6, preconditioner=preconditioner).solve(p)
    assert solution.converged
    assert solution.passes <= 1 + 4 * 3  # the factor of M; for each row the residual at the start and two steps


def test_an_empty_basis_spans_nothing() -> None:
    basis = Basis(spectral(1e2, size=5).operator)
    assert basis.extend(torch.zeros(2, 5, dtype=torch.float64)) == 0
    assert basis.project(torch.ones(3, 5, dtype=torch.float64)).shape == (3, 0)
    assert torch.equal(basis.combine(torch.zeros(3, 0, dtype=torch.float64)), torch.zeros(3, 5, dtype=torch.float64))
