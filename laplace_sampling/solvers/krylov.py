"""Krylov solvers: block Galerkin projection and conjugate gradients, on full products of `M`.

A block of residuals of all `K` rows is multiplied at a time, and each product serves every row: after `j` block
products the subspace has up to `jK` dimensions, so that a row of many needs fewer products than a row alone. `M` does
not depend on the shift `α`, so that a basis serves all shifts.

A `Basis` of a Krylov space is orthonormal, and holds the products of its vectors.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from laplace_sampling.solvers.newton import newton
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.preconditioners import Preconditioner
from laplace_sampling.solvers.solver import (
    IterativeSolver,
    LeastResidual,
    Minimum,
    Objective,
    Quadratic,
    Solution,
    dual_error,
    function_error,
    progress_bar,
    relative_residual,
    whiten,
)

# The most vectors of a basis that are kept in one tensor. A basis of 200 single vectors of 20,000 weights takes 0.94 s
# here, the same at half and at twice, and 1.6 s without joining; larger tensors take more memory while they are joined.
_JOINED = 32


# Below this length, relative, what a row has beyond the span of others is rounding: a definition.
DEPENDENT = 1e-8


class Basis:
    """Orthonormal vectors `V`, `[m, P]`, their products `MV`, and `T = V M Vᵀ` in float64; it grows by blocks.

    Attributes:
        operator: `M`.
        T: `[m, m]`.
        passes: products made, in units of all data and one vector.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.T = torch.zeros(0, 0, dtype=torch.float64, device=operator.device)
        self.passes = 0.0
        self._vectors: list[Tensor] = []
        self._products: list[Tensor] = []

    @property
    def size(self) -> int:
        return len(self.T)

    @property
    def indefiniteness(self) -> float:
        """How far eigenvalues of `T` lie below zero, where none of `M` does: products are not more accurate."""
        return max(0.0, -float(torch.linalg.eigvalsh(self.T)[0])) if self.size else 0.0

    def project(self, rows: Float[Tensor, "K P"]) -> Float[Tensor, "K m"]:
        """Coordinates of the orthogonal projection."""
        if not self._vectors:
            return torch.zeros(len(rows), 0, dtype=torch.float64, device=rows.device)
        return torch.cat([rows @ block.T for block in self._vectors], dim=1).double()

    def combine(self, y: Float[Tensor, "K m"]) -> Float[Tensor, "K P"]:
        """`y V`."""
        return self._combine(y, self._vectors)

    def combine_products(self, y: Float[Tensor, "K m"]) -> Float[Tensor, "K P"]:
        """`y V M`, from the products that were made."""
        return self._combine(y, self._products)

    def _combine(self, y: Tensor, blocks: list[Tensor]) -> Tensor:
        if not blocks:
            return torch.zeros(len(y), self.operator.size, dtype=self.operator.dtype, device=y.device)
        # A block at a time: to join them would double the memory of the basis.
        parts = y.to(blocks[0].dtype).split([len(block) for block in blocks], dim=1)
        total = parts[0] @ blocks[0]
        for part, block in zip(parts[1:], blocks[1:], strict=True):
            total.addmm_(part, block)
        return total

    def extend(self, rows: Float[Tensor, "K P"]) -> int:
        """Adds the directions of some rows that are new; returns their number. Dependent rows cost no product."""
        new = self._orthonormal(rows)
        if len(new) == 0:
            return 0
        product = self.operator.matmul(new)
        self.passes += len(new)
        _append(self._vectors, new)
        _append(self._products, product)
        self._couple(self.project(product))
        return len(new)

    def _couple(self, coupling: Float[Tensor, "b m"]) -> None:
        """Enlarges `T` by the rows of new vectors."""
        # All of T is computed, and not the band that Lanczos' recurrence would give in exact arithmetic: with it the
        # Galerkin solutions stay right where rounding has cost the recurrence its orthogonality.
        m, size = self.size, coupling.shape[1]
        T = torch.zeros(size, size, dtype=torch.float64, device=self.T.device)
        T[:m, :m] = self.T
        T[m:] = coupling
        T[:m, m:] = coupling[:, :m].T
        T[m:, m:] = (coupling[:, m:] + coupling[:, m:].T) / 2
        self.T = T

    def restrict(self, rows: Float[Tensor, "k m"]) -> None:
        """Keeps only the span of some orthonormal combinations: no product is made."""
        self._vectors, self._products = [self.combine(rows)], [self.combine_products(rows)]
        self.T = rows @ self.T @ rows.T

    def _orthonormal(self, rows: Tensor) -> Tensor:
        """Orthonormal rows for the part of some rows that is orthogonal to the basis."""
        small = max(DEPENDENT, 100 * torch.finfo(rows.dtype).eps)
        # Twice is enough. The factorisation is inside the loop: dividing a nearly dependent row by its small rest
        # would bring back what the projection removed.
        for _ in range(2):
            norm = rows.norm(dim=1, keepdim=True)
            rows = rows[(norm > 0)[:, 0]] / norm[norm > 0][:, None]
            for block in self._vectors:
                rows = rows - (rows @ block.T) @ block
            rows = rows[rows.norm(dim=1) > small]
            if len(rows) == 0:
                break
            q, r = torch.linalg.qr(rows.T)
            rows = q.T[r.diagonal().abs() > small]
        return rows


def _append(blocks: list[Tensor], new: Tensor) -> None:
    """Adds a block, joined to the last one while that is small: many single vectors would multiply slowly."""
    if blocks and len(blocks[-1]) + len(new) <= _JOINED:
        new = torch.cat([blocks.pop(), new])
    blocks.append(new)


@dataclass(frozen=True)
class BlockKrylov(IterativeSolver):
    r"""Galerkin projection on the block Krylov space of all rows: it needs the fewest products of all solvers here.

    Each row takes the minimiser of its quadratic in a space that grows by the residuals of the rows that have not
    converged; converged rows cost no product. Where the space would exceed `max_basis` vectors it is restricted to its
    leading Ritz vectors and the latest directions (as in LOBPCG), so that it converges at least as fast as conjugate
    gradients. Memory: two vectors of `P` for each of the basis.

    Args:
        tolerance: a row has converged when the error of its function on the training data,
            `‖Φ(ζ − ζ*)‖_B / ‖Φζ‖_B`, is below it, by the bound of `function_error`.
        max_iterations: largest number of block products.
        max_basis: largest number of vectors, at least 4. Rows are solved in groups of a quarter of it.
    """

    tolerance: float = 0.03
    max_iterations: int = 200
    max_basis: int | None = None

    def __post_init__(self) -> None:
        _check_settings(self.tolerance, self.max_iterations)
        if self.max_basis is not None and self.max_basis < 4:
            raise ValueError(f"`BlockKrylov(max_basis=...)` must be at least 4, but is {self.max_basis}.")

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        problem, shift, undo = whiten(problem)
        iterates = _Iterates(problem, shift, None if init is None else init / undo)
        basis = Basis(problem.operator)
        rows = len(problem.centre)
        # A quarter of the basis for residuals leaves room for the latest directions and some Ritz vectors.
        together = rows if self.max_basis is None else max(1, min(rows, self.max_basis // 4))
        with progress_bar(description, total=rows) as bar:
            for group in torch.arange(rows, device=problem.operator.device).split(together):
                self._solve_group(basis, iterates, group, bar)
        iterates.passes += basis.passes
        return iterates.solution(undo, self.tolerance)

    def _solve_group(self, basis: Basis, iterates: "_Iterates", group: Tensor, bar: tqdm) -> None:
        before = int(group[0])
        if basis.size:  # the space of earlier groups holds the leading eigenvectors already
            iterates.project(basis, group)
        active = iterates.update_error(group) > self.tolerance
        for _ in range(self.max_iterations):
            _show(bar, before + int((~active).sum()))
            if not bool(active.any()) or not self.afford(float(active.sum())):
                break
            if not self._extend(basis, iterates, group[active]):
                break
            iterates.project(basis, group)
            active = iterates.update_error(group) > self.tolerance
        _show(bar, before + len(group))

    def _extend(self, basis: Basis, iterates: "_Iterates", rows: Tensor) -> int:
        """Adds the residuals of some rows to the basis, which is restricted first if it would be too large."""
        residual, latest = iterates.residual[rows], iterates.latest
        if self.max_basis is not None and basis.size + len(residual) > self.max_basis:
            if latest is None:
                latest = residual.new_zeros(0, basis.size).double()
            num_ritz = max(1, self.max_basis - len(residual) - len(latest))
            # Ritz vectors keep the leading eigenvectors, which every row needs; the latest steps keep the
            # conjugacy that a restart would lose.
            ritz = torch.linalg.eigh(basis.T)[1].flip(1).T[: min(num_ritz, basis.size // 2)]
            basis.restrict(torch.linalg.qr(torch.cat([latest, ritz]).T)[0].T)
        return basis.extend(residual)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method, by `CG`: for the one row of an objective it finds the same steps in less memory."""
        solver = CG(self.tolerance, self.max_iterations, afford=self.afford)
        return solver.minimise(objective, init, description=description)


@dataclass(frozen=True)
class CG(IterativeSolver):
    """Preconditioned conjugate gradients, all rows at once; converged rows cost no product. Memory: five stacks.

    Args:
        tolerance: as for `BlockKrylov`.
        max_iterations: largest number of products a row (for `minimise`: a Newton step). With 0 `solve` only judges
            where it starts.
        preconditioner: an approximation of `(M + α)⁻¹` for every `α`, in the coordinates of the problem. `M` may
            have changed by a factor since it was made, as with the noise: one product finds the factor.
    """

    # Without rounding, conjugate gradients end after `P` steps at most. So many times that is a bound on those that
    # they take with it: problems of 49 weights whose condition is between 1e9 and 1e13 take 2 to 4 times `P` in
    # float64.
    _MOST_STEPS = 10
    # Passes of Newton's method for a mode, at most, and so many for each weight: ten steps that are exact, or more that
    # are not. The mode of a classifier of 83 weights takes 1,130 at `α = 1e-6`.
    _MODE_PASSES, _MODE_PASSES_OF_WEIGHT = 2000, 10

    tolerance: float = 0.03
    max_iterations: int = 1000
    preconditioner: Preconditioner | None = None

    def __post_init__(self) -> None:
        _check_settings(self.tolerance, self.max_iterations)

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        white, shift, undo = whiten(problem)
        preconditioner, passes = None, 0.0
        if self.preconditioner is not None:
            preconditioner, passes = self.preconditioner.adapted_to(problem.operator, undo)
        iterates = _Iterates(white, shift, None if init is None else init / undo)
        iterates.passes += passes
        rows = len(problem.centre)
        with progress_bar(description, total=rows) as bar:
            self._iterate(iterates, preconditioner, bar)
            _show(bar, rows)
        return iterates.solution(undo, self.tolerance)

    def _iterate(self, iterates: "_Iterates", preconditioner: Preconditioner | None, bar: tqdm) -> None:
        shift, operator = iterates.shift, iterates.problem.operator
        rows = torch.arange(len(iterates.delta), device=operator.device)
        active = iterates.update_error(rows) > self.tolerance
        direction, rho = torch.zeros_like(iterates.residual), torch.ones_like(iterates.residual[:, :1])
        for _ in range(min(self.max_iterations, self._MOST_STEPS * operator.size)):
            _show(bar, int((~active).sum()))
            unsolved = rows[active]
            if len(unsolved) == 0 or not self.afford(len(unsolved)):
                break
            # One product for all rows that have not converged; each has its own direction and length.
            r = iterates.residual[unsolved]
            s = r if preconditioner is None else preconditioner.solve(r, shift)
            new_rho = (r * s).sum(1, keepdim=True)
            p = s + (new_rho / rho[unsolved]) * direction[unsolved]
            product = operator.matmul(p)
            iterates.passes += len(unsolved)
            steepness = (p * (product + shift * p)).sum(1, keepdim=True)
            # Where rounding has the last word, a direction may have no positive curvature: its row stays where it is.
            sound = ((steepness > 0) & (new_rho > 0) & (new_rho / steepness).isfinite())[:, 0]
            length = torch.where(sound[:, None], new_rho / steepness, 0.0)
            direction[unsolved], rho[unsolved] = p, new_rho
            iterates.move(unsolved, length * p, length * product)
            active[unsolved] = (iterates.update_error(unsolved) > self.tolerance) & sound

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method with inexact steps (Eisenstat and Walker): the tolerance of a step follows the gradient."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, tolerance: float):
            zero = torch.zeros_like(gradient)
            solver = CG(tolerance, self.max_iterations, self.preconditioner, afford=self.afford)
            step = solver.solve(Quadratic(operator, precision, zero, gradient))
            return step.value, step.passes

        most = min(self._MODE_PASSES, self._MODE_PASSES_OF_WEIGHT * init.shape[1])
        limits: dict[str, Any] = {"max_passes": most, "afford": self.afford}
        return newton(objective, init, direction, tolerance=self.tolerance, description=description, **limits)


class _Iterates:
    """Iterates `δ` of all rows, `Mζ` and the residual `u − Mζ − αδ`, all from products that were made.

    `latest` are the steps of the last projection, in coordinates of its basis.
    """

    def __init__(self, problem: Quadratic, shift: float, init: Tensor | None) -> None:
        self.problem, self.shift = problem, shift
        zero = torch.zeros_like(problem.centre)
        self.delta = zero if init is None else init.clone()
        self.passes = 0.0
        start = problem.centre + self.delta
        self.product = torch.zeros_like(start)
        if bool(start.any()):
            self.product = problem.operator.matmul(start)
            self.passes = float(len(start))
        self.residual = problem.linear - self.product - problem.precision * self.delta
        self.error = torch.zeros(len(start), dtype=torch.float64, device=start.device)
        self.latest: Tensor | None = None
        self.least = LeastResidual(self.delta, self.residual) if problem.dual else None

    def move(self, rows: Tensor, step: Tensor, product: Tensor) -> None:
        self.delta[rows] += step
        self.product[rows] += product
        # From its definition: the recurrence `r − Mp` would drift away from the true residual.
        self.residual[rows] = self.problem.linear[rows] - self.product[rows] - self.shift * self.delta[rows]

    def project(self, basis: Basis, rows: Tensor) -> None:
        """Moves some rows to their minimisers in a basis."""
        inner = basis.T + self.shift * torch.eye(basis.size, dtype=torch.float64, device=basis.T.device)
        if int(torch.linalg.cholesky_ex(inner)[1]):
            # Eigenvalues of the size of rounding errors may be below zero, where the objective would have no minimum.
            values, vectors = torch.linalg.eigh(inner)
            inner = vectors * values.clamp_min(-float(values[0])) @ vectors.T
        y = torch.linalg.solve(inner, basis.project(self.residual[rows]).T).T
        self.move(rows, basis.combine(y), basis.combine_products(y))
        norm = y.norm(dim=1, keepdim=True)
        self.latest = (y / norm.clamp_min(torch.finfo(torch.float64).tiny))[norm[:, 0] > 0]

    def update_error(self, rows: Tensor) -> Tensor:
        if self.least is not None:
            self.least.take(self.delta[rows], self.residual[rows], rows)
            residual = self.least.residual[rows]
            product = self.problem.linear[rows] - self.shift * self.least.delta[rows] - residual
            self.error[rows] = dual_error(residual, product)
            return self.error[rows]
        zeta = self.problem.centre[rows] + self.delta[rows]
        self.error[rows] = function_error(self.residual[rows], zeta, self.product[rows], self.shift)
        return self.error[rows]

    def solution(self, undo: Tensor, tolerance: float) -> Solution:
        if self.least is not None:
            self.delta = self.least.delta
            self.product = self.problem.linear - self.shift * self.delta - self.least.residual
        zeta = self.problem.centre + self.delta
        residual = relative_residual(self.product - self.problem.linear, self.shift * self.delta)
        converged = bool((self.error <= tolerance).all())
        return Solution(
            zeta * undo, self.delta * undo, residual, zeta * self.product, self.passes, converged, error=self.error
        )


def _show(bar: tqdm, count: int) -> None:
    """Brings a progress bar to a count of rows."""
    bar.update(count - bar.n)


def _check_settings(tolerance: float, max_iterations: int) -> None:
    if not 0 < tolerance < 1 or max_iterations < 0:
        raise ValueError(
            "A tolerance must lie between 0 and 1, and max_iterations be at least 0: "
            f"got {tolerance}, {max_iterations}."
        )
