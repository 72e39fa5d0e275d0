r"""Krylov solvers: block Galerkin projection and conjugate gradients, on full products of `M`.

A single block of residuals of all `K` rows is multiplied at a time, and what it finds serves every row: after `j` block
products the subspace has up to `jK` dimensions, so that many rows need fewer products each than one. `M` does not
depend on the shift `α`; a basis holds for all of them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.solvers.newton import newton
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.preconditioners import Preconditioner
from laplace_sampling.solvers.solver import (
    Minimum,
    Objective,
    Quadratic,
    Solution,
    Solver,
    function_error,
    relative_residual,
    whiten,
)

__all__ = ["CG", "Basis", "BlockKrylov"]

# Vectors of a block of a basis, up to which blocks are joined.
_JOINED = 32


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
        parts = y.to(blocks[0].dtype).split([len(block) for block in blocks], dim=1)
        total = parts[0] @ blocks[0]
        for part, block in zip(parts[1:], blocks[1:], strict=True):
            total.addmm_(part, block)
        return total

    def extend(self, rows: Float[Tensor, "K P"]) -> int:
        """Add what is new in some rows; returns how many dimensions that is (dependent rows cost no product)."""
        new = self._orthonormal(rows)
        if len(new) == 0:
            return 0
        product = self.operator.matmul(new)
        self.passes += len(new)
        _append(self._vectors, new)
        _append(self._products, product)
        coupling = self.project(product)
        m = self.size
        T = torch.zeros(m + len(new), m + len(new), dtype=torch.float64, device=self.T.device)
        T[:m, :m] = self.T
        T[m:] = coupling
        T[:m, m:] = coupling[:, :m].T
        T[m:, m:] = (coupling[:, m:] + coupling[:, m:].T) / 2
        self.T = T
        return len(new)

    def restrict(self, rows: Float[Tensor, "k m"]) -> None:
        """Keep only the span of some orthonormal combinations: no product is made."""
        self._vectors, self._products = [self.combine(rows)], [self.combine_products(rows)]
        self.T = rows @ self.T @ rows.T

    def _orthonormal(self, rows: Tensor) -> Tensor:
        small = 100 * torch.finfo(rows.dtype).eps
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
    """Joined to the last block while that is small: a basis that grows by single vectors is not a list of them."""
    if blocks and len(blocks[-1]) + len(new) <= _JOINED:
        new = torch.cat([blocks.pop(), new])
    blocks.append(new)


@dataclass(frozen=True)
class BlockKrylov(Solver):
    r"""Galerkin projection on the block Krylov space of all rows: the fewest products of all solvers here.

    Each row takes the minimiser of its quadratic in a space that grows by the residuals of the rows that have not
    converged; converged rows cost no product. Where the space would exceed `max_basis` vectors it is restricted to its
    leading Ritz vectors and the latest directions (as in LOBPCG): it goes on at least as conjugate gradients do.
    Memory: two vectors of `P` for each of the basis.

    Args:
        tolerance: a row has converged when the error of its function on the training data,
            `‖Φ(ζ − ζ*)‖_B / ‖Φζ‖_B`, is below it, by the bound of `function_error`.
        max_iterations: block products at most.
        max_basis: vectors at most; at least 4. Rows are solved in groups of a quarter of it.
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
        state = _State(problem, None if init is None else init / undo)
        basis = Basis(problem.operator)
        rows = len(problem.centre)
        together = rows if self.max_basis is None else max(1, min(rows, self.max_basis // 4))
        with tqdm(total=rows, desc=description, disable=description is None, leave=False) as bar:
            for group in torch.arange(rows, device=problem.operator.device).split(together):
                self._solve_group(basis, state, group, shift, bar)
        return state.solution(shift, undo, state.passes + basis.passes, self.tolerance)

    def _solve_group(self, basis: Basis, state: "_State", group: Tensor, shift: float, bar: tqdm) -> None:
        if basis.size:
            self._project(basis, state, group, shift)
        active = state.update_error(group, shift) > self.tolerance
        done = 0
        for _ in range(self.max_iterations):
            done = _advance(bar, done, int((~active).sum()))
            if not bool(active.any()) or not self._extend(basis, state.residual[group[active]], state):
                break
            self._project(basis, state, group, shift)
            active = state.update_error(group, shift) > self.tolerance
        _advance(bar, done, len(group))

    def _extend(self, basis: Basis, residual: Tensor, state: "_State") -> int:
        if self.max_basis is not None and basis.size + len(residual) > self.max_basis:
            latest = state.latest if state.latest is not None else residual.new_zeros(0, basis.size).double()
            keep = max(1, self.max_basis - len(residual) - len(latest))
            ritz = torch.linalg.eigh(basis.T)[1].flip(1).T[: min(keep, basis.size // 2)]
            basis.restrict(torch.linalg.qr(torch.cat([latest, ritz]).T)[0].T)
        return basis.extend(residual)

    @staticmethod
    def _project(basis: Basis, state: "_State", group: Tensor, shift: float) -> None:
        """Minimise in the basis."""
        inner = basis.T + shift * torch.eye(basis.size, dtype=torch.float64, device=basis.T.device)
        y = torch.linalg.solve(inner, basis.project(state.residual[group]).T).T
        state.move(group, basis.combine(y), basis.combine_products(y), shift)
        norm = y.norm(dim=1, keepdim=True)
        state.latest = (y / norm.clamp_min(torch.finfo(torch.float64).tiny))[norm[:, 0] > 0]

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method; each step by Lanczos in the same way, no more exactly than the step is worth."""
        return CG(self.tolerance, self.max_iterations).minimise(objective, init, description=description)


@dataclass(frozen=True)
class CG(Solver):
    """Preconditioned conjugate gradients, all rows at once; converged rows cost no product. Memory: five stacks.

    Args:
        tolerance: as for `BlockKrylov`.
        max_iterations: products a row at most (for `minimise`: a Newton step).
        preconditioner: an approximation of `(M + α)⁻¹` for every `α`, in the coordinates of the problem. `M` may
            have changed by a factor since it was made, as with the noise: a product finds it.
    """

    tolerance: float = 0.03
    max_iterations: int = 1000
    preconditioner: Preconditioner | None = None

    def __post_init__(self) -> None:
        _check_settings(self.tolerance, self.max_iterations)

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        preconditioner, passes = self.preconditioner, 0.0
        if preconditioner is not None:
            before = preconditioner.passes
            preconditioner = preconditioner.adapted(problem.operator)
            passes = preconditioner.passes - before
        problem, shift, undo = whiten(problem)
        if preconditioner is not None and not bool((undo == 1).all()):
            preconditioner = preconditioner.congruent(undo)
        state = _State(problem, None if init is None else init / undo)
        passes, rows = passes + state.passes, torch.arange(len(problem.centre), device=problem.operator.device)
        active = state.update_error(rows, shift) > self.tolerance
        direction, rho = torch.zeros_like(state.residual), torch.ones_like(state.residual[:, :1])
        with tqdm(total=len(rows), desc=description, disable=description is None, leave=False) as bar:
            done = 0
            for _ in range(self.max_iterations):
                done = _advance(bar, done, int((~active).sum()))
                now = rows[active]
                if len(now) == 0:
                    break
                r = state.residual[now]
                s = r if preconditioner is None else preconditioner.solve(r, shift)
                new_rho = (r * s).sum(1, keepdim=True)
                p = s + (new_rho / rho[now]) * direction[now]
                product = problem.operator.matmul(p)
                passes += len(now)
                length = new_rho / (p * (product + shift * p)).sum(1, keepdim=True)
                direction[now], rho[now] = p, new_rho
                state.move(now, length * p, length * product, shift)
                active[now] = state.update_error(now, shift) > self.tolerance
            _advance(bar, done, len(rows))
        return state.solution(shift, undo, passes, self.tolerance)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method with inexact steps (Eisenstat and Walker): the tolerance of a step follows the gradient."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, tolerance: float):
            zero = torch.zeros_like(gradient)
            solver = CG(tolerance, self.max_iterations, self.preconditioner)
            step = solver.solve(Quadratic(operator, precision, zero, gradient))
            return step.value, step.passes

        return newton(objective, init, direction, tolerance=self.tolerance, description=description)


class _State:
    """Iterates `δ` of all rows, `Mζ` and the residual `u − Mζ − αδ`, all from products that were made."""

    def __init__(self, problem: Quadratic, init: Tensor | None) -> None:
        self.problem = problem
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

    def move(self, rows: Tensor, step: Tensor, product: Tensor, shift: float) -> None:
        self.delta[rows] += step
        self.product[rows] += product
        self.residual[rows] = self.problem.linear[rows] - self.product[rows] - shift * self.delta[rows]

    def update_error(self, rows: Tensor, shift: float) -> Tensor:
        self.error[rows] = function_error(
            self.residual[rows],
            self.problem.centre[rows] + self.delta[rows],
            self.product[rows],
            shift,
        )
        return self.error[rows]

    def solution(self, shift: float, undo: Tensor, passes: float, tolerance: float) -> Solution:
        zeta = self.problem.centre + self.delta
        residual = relative_residual(self.product - self.problem.linear, shift * self.delta)
        converged = bool((self.error <= tolerance).all())
        return Solution(
            zeta * undo, self.delta * undo, residual, zeta * self.product, passes, converged, error=self.error
        )


def _advance(bar: tqdm, before: int, now: int) -> int:
    bar.update(now - before)
    return now


def _check_settings(tolerance: float, max_iterations: int) -> None:
    if not 0 < tolerance < 1 or max_iterations < 1:
        raise ValueError(
            "A tolerance must lie between 0 and 1, and max_iterations be at least 1: "
            f"got {tolerance}, {max_iterations}."
        )
