r"""Solvers for matrices whose rows can be computed, a few at a time, as those of a kernel: `(K + A) V = Z`.

They solve a dual `Quadratic`: its rows are coefficients `ζ` of functions, and `Kζ` are their values at the data. All
rows are solved together, since the rows of `K` are what costs, and a pass is a product of `K` with all of them.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.lapack import solve_
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.solver import (
    LeastResidual,
    Quadratic,
    QuadraticSolver,
    Solution,
    dual_error,
    progress_bar,
    relative_residual,
    whiten,
)


class RowBlocks(Operator):
    """A symmetric positive semi-definite matrix, whose entries can be computed; vectors are in float64.

    Attributes:
        memory: bytes that a factor of it may take.
    """

    memory: float

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def num_data(self) -> int:
        return self.size

    @abstractmethod
    def entries(self, rows: Tensor, columns: Tensor | None = None) -> Float[Tensor, "r c"]:
        """`K[rows, columns]`, of all columns by default; single precision where its rounding does not matter."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, " P"]:
        """The diagonal."""

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Splits rows into groups whose entries are computed at once."""
        return rows.split(max(1, NUMBERS_TOGETHER // self.size))

    def matmul(self, v: Tensor, batch: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.rows_times(torch.arange(self.size), v)

    def rows_times(self, rows: Tensor, v: Float[Tensor, "K P"]) -> Float[Tensor, "K r"]:
        """`K[rows] v_k`."""
        return torch.cat([_product(v, self.entries(part).T) for part in self.parts(rows)], dim=1)

    def columns_times(self, columns: Tensor, v: Float[Tensor, "K c"]) -> Float[Tensor, "K P"]:
        """`K[:, columns] v_k`."""
        parts = self.parts(columns)
        pieces = v.split([len(part) for part in parts], dim=1)
        total = _product(pieces[0], self.entries(parts[0]))
        for part, piece in zip(parts[1:], pieces[1:], strict=True):
            total += _product(piece, self.entries(part))
        return total

    def matrix(self) -> Float[Tensor, "P P"]:
        """The matrix in full, a copy in float64 that the caller may overwrite."""
        full = torch.empty(self.size, self.size, dtype=torch.float64, device=self.device)
        for part in self.parts(torch.arange(self.size)):
            full[part] = self.entries(part).double()
        return full

    def scaled(self, w: Tensor) -> "RowBlocks":
        return ScaledRows(self, w)


@dataclass(frozen=True)
class ScaledRows(RowBlocks):
    """`WKW`, `W = diag(w)`."""

    operator: RowBlocks
    w: Float[Tensor, " P"]

    @property
    def like(self) -> RowBlocks:
        return self.operator

    @property
    def memory(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.operator.memory

    def entries(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        # Rounded scales would be off in the same way for a whole row, and so by more than rounded entries are.
        entries, w = self.operator.entries(rows, columns).double(), self.w
        return entries * w[rows, None] * (w if columns is None else w[columns])

    def diagonal(self) -> Tensor:
        return self.operator.diagonal() * self.w**2

    def matrix(self) -> Tensor:
        return self.operator.matrix().mul_(self.w).mul_(self.w[:, None])


def _product(v: Tensor, matrix: Tensor) -> Tensor:
    # Sums in single precision would be off by far more than rounded entries are: by a tenth of the noise and more.
    return v @ matrix.to(v.dtype)


def pivoted(operator: RowBlocks, rank: int, seed: int) -> Nystrom:
    r"""The Nyström approximation of `K` by rows of random pivots (`RPCholesky`; Chen, Epperly, Tropp, Webber, 2023).

    Pivots are drawn by what is left of the diagonal, so that no part of the data is missed that the kernel sees, and
    the trace of `K` that is left is near the least of this rank. It takes `rank/n` passes for the rows.
    """
    n, generator = operator.size, torch.Generator().manual_seed(seed)
    rank = min(rank, n)
    factor = torch.zeros(rank, n, dtype=torch.float64, device=operator.device)
    left, filled = operator.diagonal().double().clone(), 0
    floor = n * torch.finfo(torch.float64).eps * float(left.max())
    # A tenth at a time: pivots of one draw do not know of each other, so that some of them are superfluous.
    together = max(1, rank // 10)
    while filled < rank and float(left.sum()) > n * floor:
        chances = left.cpu() / float(left.sum())
        size = min(together, rank - filled, int((chances > 0).sum()))
        pivots = torch.multinomial(chances, size, replacement=False, generator=generator)
        rows = operator.entries(pivots).double() - factor[:filled, pivots].T @ factor[:filled]
        core = rows[:, pivots]
        values, vectors = torch.linalg.eigh((core + core.T) / 2)
        kept = values > max(floor, float(values[-1]) * n * torch.finfo(torch.float64).eps)
        if not bool(kept.any()):
            break
        new = (vectors[:, kept] / values[kept].sqrt()).T @ rows
        factor[filled : filled + len(new)] = new
        filled += len(new)
        left = (left - (new**2).sum(0)).clamp_min(0)
        left[pivots] = 0
    return Nystrom.of_factor(factor[: max(1, filled)], rank, filled / n)


class _Run:
    """A solve in white coordinates, in which `A = αI`: the state of the least residual so far, and what it has cost.

    Attributes:
        target: `u − Kθ⁰`, what `(K + α)δ` shall be.
        passes: of all rows together.
    """

    def __init__(self, problem: Quadratic, init: Tensor | None) -> None:
        assert isinstance(problem.operator, RowBlocks)
        self.problem, self.shift, self.undo = whiten(problem)
        self.operator: RowBlocks = self.problem.operator  # pyright: ignore[reportAttributeAccessIssue]
        self.passes, self.target = 0.0, self.problem.linear
        if bool(self.problem.centre.any()):
            self.target = self.target - self.problem.operator.matmul(self.problem.centre)
            self.passes += 1
        self.least = LeastResidual(torch.zeros_like(self.target), self.target)
        if init is not None:
            self.judge(init / self.undo)

    def judge(self, delta: Tensor) -> bool:
        """Takes a state by its true residual, one pass; returns whether it is finite and has not grown."""
        residual = self.target - self.operator.matmul(delta) - self.shift * delta
        self.passes += 1
        self.least.take(delta, residual)
        return bool((residual.norm(dim=1) <= 2 * self.target.norm(dim=1)).all())

    def error_of(self, state: LeastResidual) -> Tensor:
        return dual_error(state.residual, self.problem.linear - self.shift * state.delta - state.residual)

    def done(self, tolerance: float, state: LeastResidual | None = None) -> bool:
        return bool((self.error_of(state or self.least) <= tolerance).all())

    def solution(self, tolerance: float) -> Solution:
        delta = self.least.delta
        zeta, product = self.problem.centre + delta, self.problem.linear - self.shift * delta - self.least.residual
        residual = relative_residual(product - self.problem.linear, self.shift * delta)
        passes = self.passes * len(delta)
        leverage = zeta * product
        return Solution(
            zeta * self.undo,
            delta * self.undo,
            residual,
            leverage,
            passes,
            self.done(tolerance),
            error=self.error_of(self.least),
        )


@dataclass(frozen=True)
class RowSolver(QuadraticSolver):
    """A solver of dual problems by rows of their matrix.

    Args:
        tolerance: a row has converged when the error of its function, as `Solution.error` has it, is below.
        max_passes: the largest number of products of the matrix with all rows.
        seed: of the order of data, and of pivots.
    """

    tolerance: float = 0.01
    max_passes: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Cholesky(RowSolver):
    """A Cholesky factor of `K + A`, in place of `K`."""

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        run = _Run(problem, None)
        full = run.operator.matrix()
        full.diagonal().add_(run.shift)
        run.judge(solve_(full, run.target.T.contiguous()).T)
        return run.solution(self.tolerance)


@dataclass(frozen=True)
class PivotedCG(RowSolver):
    """Conjugate gradients with the approximation of `K` by some of its rows as the preconditioner."""

    # The least rank. With 100, conjugate gradients on 4,000 data of kin40k end at an error that 59 steps pass with 400.
    # Beyond 8,000 data, a twentieth of them: it is built and applied at a tenth of what the products cost.
    _RANK, _SHARE = 400, 1 / 20

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        rank = max(self._RANK, int(self._SHARE * problem.operator.size))
        assert isinstance(problem.operator, RowBlocks)
        preconditioner = pivoted(problem.operator, rank, self.seed)
        # Beside its iterations it takes a product of the start, and one for the preconditioner.
        others = preconditioner.passes + (init is not None) + 1 / len(problem.linear)
        solver = CG(self.tolerance, max(1, int(self.max_passes - others)), preconditioner)
        solution = solver.solve(problem, init, description=description)
        return replace(solution, passes=solution.passes + preconditioner.passes * len(problem.linear))


@dataclass(frozen=True)
class Projections(RowSolver):
    """Alternating projections: the equations of one block of data at a time are solved exactly.

    The block is the one with the largest residual (Wu, Wang, Maddox and others, 2023). It needs no step size, and
    never makes the objective larger. On ill-conditioned matrices it comes near soon, and then crawls.
    """

    # Data of a block. On 4,000 data of kin40k ten passes with 1,000 lead as far as thirty with 500 in the same time.
    _BLOCK = 1000

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        run = _Run(problem, init)
        if run.passes + 2 > self.max_passes or run.done(self.tolerance):
            return run.solution(self.tolerance)
        n, order = run.operator.size, torch.Generator().manual_seed(self.seed)
        blocks = torch.randperm(n, generator=order).split(self._BLOCK)
        factors = [self._factor(run, block) for block in blocks]
        run.passes += sum(len(block) ** 2 for block in blocks) / n**2
        scale = 1 / run.target.square().sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        with progress_bar(description, total=self.max_passes) as bar:
            # The last pass judges what is returned: with single precision, residuals that are kept drift away.
            while run.passes + 2 <= self.max_passes and not run.done(self.tolerance):
                latest = LeastResidual(run.least.delta, run.least.residual)
                delta, residual = latest.delta.clone(), latest.residual.clone()
                while run.passes + 2 <= self.max_passes and not run.done(self.tolerance, latest):
                    for _ in blocks:
                        sizes = (residual.square() * scale).sum(0).cpu()
                        worst = max(range(len(blocks)), key=lambda number: float(sizes[blocks[number]].sum()))
                        block = blocks[worst]
                        step = torch.cholesky_solve(residual[:, block].T, factors[worst]).T
                        delta[:, block] += step
                        residual -= run.operator.columns_times(block, step)
                        residual[:, block] -= run.shift * step
                    latest.take(delta, residual)
                    run.passes += 1
                    bar.update()
                run.judge(latest.delta)
        return run.solution(self.tolerance)

    @staticmethod
    def _factor(run: _Run, block: Tensor) -> Tensor:
        inner = run.operator.entries(block, block).double()
        inner.diagonal().add_(run.shift)
        return torch.linalg.cholesky(inner)


@dataclass(frozen=True)
class DualDescent(RowSolver):
    r"""Stochastic dual descent on `½ζᵀ(K + A)ζ − ⟨u, ζ⟩` (Lin, Padhy, Antorán and others, 2024; thesis Alg. 4.1).

    A step takes the gradient of a few coordinates, with Nesterov momentum, and iterates are averaged over the last
    hundredth of them. The step size is `1/λ` with the largest eigenvalue `λ`: with momentum .9 steps diverge from
    `1.36/λ` on.
    """

    _MOMENTUM = 0.9
    # Coordinates of a step. Steps count more than passes: half of them have .7 to .8 of the error at equal passes. With
    # fewer, momentum and averages would cost more than the rows.
    _BATCH = 32
    # Rows of the approximation of `K` that gives its largest eigenvalue: a lower bound, and a good one.
    _PIVOTS = 128
    # Passes between two looks at the residual, each of which is a pass itself.
    _ROUND = 10
    _AVERAGED = 100

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        run = _Run(problem, init)
        n, order = run.operator.size, torch.Generator().manual_seed(self.seed)
        leading = pivoted(run.operator, self._PIVOTS, self.seed)
        run.passes += leading.passes
        step = 1 / (float(leading.eigenvalues[0]) + run.shift)
        point = momentum = average = torch.empty(0)
        steps, start_anew = 0, True
        with progress_bar(description, total=self.max_passes) as bar:
            while run.passes + 2 <= self.max_passes and not run.done(self.tolerance):
                if start_anew:
                    # One datum a row: a step takes some rows, and products need no transpose.
                    point, steps = run.least.delta.T.clone(memory_format=torch.contiguous_format), 0
                    momentum, average = torch.zeros_like(point), point.clone()
                for _ in range(min(self._ROUND, int(self.max_passes - run.passes) - 1)):
                    for rows in torch.randperm(n, generator=order).split(self._BATCH):
                        entries = run.operator.entries(rows)
                        gradient = entries.double() @ point + run.shift * point[rows]
                        gradient -= run.target[:, rows].T
                        gradient *= step * n / len(rows)
                        # `point` is where the gradient is taken, one step of momentum ahead.
                        point.add_(momentum, alpha=self._MOMENTUM**2)
                        momentum *= self._MOMENTUM
                        momentum[rows] -= gradient
                        point[rows] -= (1 + self._MOMENTUM) * gradient
                        steps += 1
                        average.lerp_(point, self._AVERAGED / max(self._AVERAGED, steps))
                    run.passes += 1
                    bar.update()
                start_anew = not run.judge(average.T)
                if start_anew:
                    step /= 3
        return run.solution(self.tolerance)


@dataclass(frozen=True)
class Automatic(RowSolver):
    """A factor, where it fits in memory and takes no more operations than the passes would.

    Beyond it, a few passes of projections come first, which help on all matrices, and then conjugate gradients, which
    soon end on most. Where these end by rounding, projections go on. Each starts where the last one has ended, and none
    returns a larger residual than it started from.
    """

    # Passes of projections at the start. Conjugate gradients alone need seventy on bike for what projections have after
    # ten; on kin40k the two together are nearer than either; where the noise is large, these passes are lost.
    _FIRST = 5
    # Passes below which neither can take a step.
    _LEAST = 3

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        operator, settings = problem.operator, {"tolerance": self.tolerance, "seed": self.seed}
        assert isinstance(operator, RowBlocks)
        n, count = operator.size, len(problem.linear)
        # `n³/3` operations against `2n²` for each row and pass; a single block of projections is a factor, too.
        if n <= max(6 * count * self.max_passes, Projections._BLOCK) and 8 * n**2 <= operator.memory:
            return Cholesky(**settings).solve(problem, init, description=description)
        solution, spent = None, 0.0
        for kind in (Projections, PivotedCG, Projections):
            left = int(self.max_passes - spent / count)
            if solution is None or (left >= self._LEAST and not solution.converged):
                start = init if solution is None else solution.delta
                most = min(left, self._FIRST) if solution is None else left
                solution = kind(max_passes=most, **settings).solve(problem, start, description=description)
                spent += solution.passes
        assert solution is not None
        return replace(solution, passes=spent)


# Solvers by the name that users give.
SOLVERS: dict[str, type[RowSolver]] = {
    "auto": Automatic,
    "exact": Cholesky,
    "cg": PivotedCG,
    "projections": Projections,
    "dual_descent": DualDescent,
}
