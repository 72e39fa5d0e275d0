"""Dense algebra in float64: exact, for small problems."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.operators import Operator
from laplace_sampling.solvers import Minimum, Objective, Quadratic, Solution, Solver, newton, relative_residual

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(Solver):
    """Dense algebra in float64: a Cholesky factor of `H` (`P` small) or of `I + R A⁻¹ Rᵀ` (few outputs)."""

    tolerance: float = 1e-10
    max_steps: int = 100

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        factor = _Factor(problem.operator, problem.precision)
        centre, linear = problem.centre.double(), problem.linear.double()
        delta = factor.solve(linear - factor.matmul(centre))
        zeta = centre + delta
        residual = relative_residual(factor.matmul(zeta) - linear, factor.precision * delta)
        error = torch.zeros_like(residual)
        return Solution(zeta, delta, residual, factor.leverage()[None], 0.0, converged=True, exact=True, error=error)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method, steps halved until the objective goes down."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, _: float) -> tuple[Tensor, float]:
            return _Factor(operator, precision).solve(gradient), 0.0

        return newton(objective, init.double(), direction, tolerance=self.tolerance, max_steps=self.max_steps)


class _Factor:
    """`M` and `H⁻¹` by dense algebra, whichever of `P` and the number of rows is smaller."""

    def __init__(self, operator: Operator, precision: Tensor) -> None:
        self.precision = precision.double()
        blocks = [block.double() for block in operator.root_rows()]
        self.primal = operator.size <= sum(len(block) for block in blocks)
        if self.primal:
            self.matrix = blocks[0].T @ blocks[0]
            for block in blocks[1:]:
                self.matrix.addmm_(block.T, block)
            self.factor = torch.linalg.cholesky(self.matrix + torch.diag(self.precision))
        else:
            self.root = torch.cat(blocks)
            inner = (self.root / self.precision) @ self.root.T
            self.factor = torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))

    def matmul(self, v: Tensor) -> Tensor:
        return v @ self.matrix if self.primal else (v @ self.root.T) @ self.root

    def solve(self, rhs: Tensor) -> Tensor:
        if self.primal:
            return torch.cholesky_solve(rhs.T, self.factor).T
        scaled = rhs / self.precision
        correction = torch.cholesky_solve(self.root @ scaled.T, self.factor)
        return scaled - (self.root.T @ correction).T / self.precision

    def leverage(self) -> Tensor:
        """The diagonal of `H⁻¹M`."""
        if self.primal:
            return 1 - self.precision * torch.cholesky_inverse(self.factor).diagonal()
        half = torch.linalg.solve_triangular(self.factor, self.root, upper=False)
        return (half**2).sum(0) / self.precision
