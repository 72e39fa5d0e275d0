"""Dense algebra in float64: exact, for small problems."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.solvers.lapack import accurate_factor, sum_of_squares
from laplace_sampling.solvers.newton import newton
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver, relative_residual


@dataclass(frozen=True)
class Dense(Solver):
    """Dense algebra in float64: a Cholesky factor of `H` (`P` small) or of `I + R A⁻¹ Rᵀ` (few outputs)."""

    tolerance: float = 1e-10
    max_steps: int = 100

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        factor = Factor.of(problem.operator, problem.precision)
        centre, linear = problem.centre.double(), problem.linear.double()
        # Solved for δ and not for ζ: directions that the data do not determine are exactly those of θ⁰.
        delta = factor.solve(linear - factor.matmul(centre))
        zeta = centre + delta
        residual = relative_residual(factor.matmul(zeta) - linear, factor.precision * delta)
        error = torch.zeros_like(residual)
        return Solution(zeta, delta, residual, factor.leverage()[None], 0.0, converged=True, exact=True, error=error)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method with exact steps."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, _: float) -> tuple[Tensor, float]:
            return Factor.of(operator, precision).solve(gradient), 0.0

        return newton(objective, init.double(), direction, tolerance=self.tolerance, max_steps=self.max_steps)


@dataclass(frozen=True)
class Factor:
    """`H⁻¹` by dense algebra in float64, by the smaller of two matrices.

    Attributes:
        precision: the diagonal of `A`.
        factor: the Cholesky factor of `H`, if `root` is `None`; else of `I + R A⁻¹ Rᵀ`.
        root: `R` with `RᵀR = M`.
        matrix: `M`, if it was formed.
    """

    # Refinements of a solution by Woodbury's identity, each of which reduces its error by the condition times the unit
    # of rounding.
    _REFINEMENTS = 2

    precision: Tensor
    factor: Tensor
    root: Tensor | None = None
    matrix: Tensor | None = None

    @classmethod
    def of(cls, operator: Operator, precision: Tensor) -> "Factor":
        precision, matrix = precision.double(), operator.matrix()
        if matrix is None and operator.size <= operator.num_rows:
            matrix = sum_of_squares(operator.root_rows(), operator.size, precision.device)
        if matrix is not None:
            return cls(precision, _cholesky_factor(matrix, precision, operator), matrix=matrix)
        root = torch.cat([block.double() for block in operator.root_rows()])
        inner = (root / precision) @ root.T
        factor = torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
        return cls(precision, factor, root)

    def matmul(self, v: Tensor) -> Tensor:
        """`Mv`."""
        if self.root is not None:
            return (v @ self.root.T) @ self.root
        assert self.matrix is not None
        return v @ self.matrix

    def solve(self, rhs: Tensor) -> Tensor:
        """`H⁻¹v`."""
        if self.root is None:
            return torch.cholesky_solve(rhs.T, self.factor).T
        solution = self._by_woodbury(rhs)
        # Its two terms cancel where the data decide: what that has cost is solved for again.
        for _ in range(self._REFINEMENTS):
            solution = solution + self._by_woodbury(rhs - self.matmul(solution) - self.precision * solution)
        return solution

    def _by_woodbury(self, rhs: Tensor) -> Tensor:
        assert self.root is not None
        scaled = rhs / self.precision
        correction = torch.cholesky_solve(self.root @ scaled.T, self.factor)
        return scaled - (self.root.T @ correction).T / self.precision

    def leverage(self) -> Tensor:
        """The diagonal of `H⁻¹M`."""
        if self.root is None:
            # 1 − AH⁻¹ needs no product with M.
            return 1 - self.precision * torch.cholesky_inverse(self.factor).diagonal()
        half = torch.linalg.solve_triangular(self.factor, self.root, upper=False)
        return (half**2).sum(0) / self.precision


def _cholesky_factor(matrix: Tensor, precision: Tensor, operator: Operator) -> Tensor:
    """The factor of `H = M + A`; by a QR decomposition of a root of `H` where the sum of both has lost its digits."""
    factor = accurate_factor(matrix, precision)
    if factor is not None:
        return factor
    # The condition of a root is the square root of that of `H`.
    blocks = [*(block.double() for block in operator.root_rows()), torch.diag(precision.sqrt())]
    upper = torch.linalg.qr(torch.cat(blocks), mode="r")[1]
    return (upper * upper.diagonal().sign()[:, None]).T.contiguous()
