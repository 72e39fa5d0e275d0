r"""A preconditioned, variance-reduced mini-batch solver: for data so many that each pass over them counts.

After Frangella, Rathore, Zhao and Udell (2023), "PROMISE: Preconditioned Stochastic Optimization Methods by
Incorporating Scalable Curvature Estimates". For a quadratic the variance-reduced difference of two gradients of a
mini-batch, `M_b ζ − M_b ζ̃ = M_b(ζ − ζ̃)`, is one product.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.solvers.operator import Congruent, Operator, largest_of_batches, tiny
from laplace_sampling.solvers.preconditioners import Nystrom, Preconditioner
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.sgd import PROBES, SGD, first_iterate, restarted
from laplace_sampling.solvers.solver import (
    IterativeSolver,
    Minimum,
    Objective,
    Quadratic,
    Solution,
    progress_bar,
    relative_residual,
    whiten,
)

# Indices and weights of data.
Batch = tuple[Tensor, Tensor]


class WeightedBatches:
    """Mini-batches of data drawn with probabilities by their sizes, and weights that make sums over them unbiased.

    No probability is below a tenth of a uniform one, roughly, because sizes are estimates. Over a set of mini-batches
    the draw is systematic: each datum comes as often as its probability says, up to one time. With equal sizes it comes
    once an epoch.
    """

    def __init__(self, sizes: Tensor, generator: torch.Generator) -> None:
        floored = sizes.clamp_min(0) + 0.1 * sizes.mean()
        equal = not bool(floored.sum() > 0) or not bool(floored.isfinite().all())
        floored = torch.ones_like(sizes) if equal else floored
        self.probabilities, self.generator = floored / floored.sum(), generator

    def batches(self, number: int, size: int) -> list[Batch]:
        # Points at equal distances on the cumulated probabilities of the data in random order.
        total, num_data = number * size, len(self.probabilities)
        order = torch.randperm(num_data, generator=self.generator)
        offset = torch.rand(1, generator=self.generator, dtype=torch.float64)
        points = (torch.arange(total, dtype=torch.float64) + offset) / total
        drawn = order[torch.searchsorted(self.probabilities[order].cumsum(0), points).clamp_max(num_data - 1)]
        weights = 1 / (size * self.probabilities)
        # Every `number`-th point to a mini-batch: a datum that comes twice comes in two of them.
        parts = [drawn[i::number] for i in torch.randperm(number, generator=self.generator).tolist()]
        return [(part, weights[part]) for part in parts]


@dataclass(frozen=True)
class SVRG(IterativeSolver):
    r"""Preconditioned SGD for one epoch, then SVRG or conjugate gradients while a row needs it; `K` rows in parallel.

    Data are drawn with probabilities that follow their contributions to `M` (`Operator.sizes`), and weighted by the
    inverse: most data of a good classifier have next to no curvature, and a few have nearly all of it.

    The preconditioner `P` has the leading eigenvectors of an estimate of `M` from one random row of some data
    (`Nystrom.of_rows`), or those of `M` itself where all its rows are no more (`Nystrom.of_root`); `hold` keeps it
    between solves. Steps are `δ ← δ − η_t P⁻¹ g_b(δ)` with
    `η_t = min(step/λ, 2/(t + 2))`; `λ` is the largest eigenvalue of `P⁻¹H` estimated on a mini-batch, over a few of
    them. At `P = H` the second makes `δ_t` solve the equation in which `Mζ` is the mean of the estimates of batches,
    weighted by `t`; over a stage, in which each datum comes as often as it should, their noise sums to nearly zero.

    A full product then gives residual and leverage. It is the snapshot `δ̃` as well: if a row has not converged, a
    stage with gradients `g(δ̃) + M_b(δ − δ̃) + A(δ − δ̃)` follows. Its end gives a direction only: each row goes to
    the minimum of its objective in the span of the latest directions, which is known from full products, as in flexible
    conjugate gradients (Notay 2000). So no row gets worse. Where a stage has too few steps for `λ`, the direction is
    `P⁻¹g(δ̃)` instead, at one product rather than two: those are preconditioned conjugate gradients.

    A row counts as converged if `gᵀP⁻¹g ≤ tolerance · ζᵀMζ`, with `g` its full gradient: at `P = H` the left side is
    the squared error in the norm of `H`, so the ratio bounds the error in function space,
    `‖Φ(ζ − ζ*)‖²_B / ‖Φζ‖²_B`. It can be below it where the rank of `P` is small and the problem badly conditioned.

    Args:
        epochs: products of a stage, in passes over the data.
        batch_size: data a step; by default a 120th of the data, between 16 and 500.
        step: the largest step, in units of `1/λ`.
        tolerance: of the estimated squared error in function space, relative.
        max_snapshots: largest number of full products.
        max_rank: rank of the preconditioner, which holds so many vectors, and four times as many while it is built.
        seed: of the rows of the preconditioner and of the mini-batches.
    """

    epochs: float = 1.0
    batch_size: int | None = None
    step: float = 2.0
    tolerance: float = 0.01
    max_snapshots: int = 40
    max_rank: int = 512
    seed: int = 0
    held: Nystrom | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("epochs", "step", "tolerance"):
            check_positive(f"`SVRG({name}=...)`", getattr(self, name))
        for name, least in (("batch_size", 1), ("max_snapshots", 1), ("max_rank", 1), ("seed", 0)):
            if name != "batch_size" or self.batch_size is not None:
                check_whole(f"`SVRG({name}=...)`", getattr(self, name), least)

    def hold(self, operator: Operator) -> "SVRG":
        """Returns the solver with a preconditioner that serves all its solves, for each `A` and multiples of `M`."""
        sampler = WeightedBatches(operator.sizes(), torch.Generator().manual_seed(self.seed))
        rows = torch.Generator().manual_seed(self.seed)
        return replace(self, held=self._build(operator, self._drawn(sampler), rows))

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        # The preconditioner wants an isotropic prior.
        white, shift, undo = whiten(problem, float(problem.precision.mean()))
        sampler = WeightedBatches(white.operator.sizes(), torch.Generator().manual_seed(self.seed))
        # Drawn also where it is held, so that mini-batches are those that follow.
        drawn = self._drawn(sampler)
        if self.held is None:
            preconditioner = self._build(white.operator, drawn, sampler.generator)
            passes = preconditioner.passes
        else:
            preconditioner, passes = self.held.adapted_to(problem.operator, undo)
        descent = _Descent(self, white, shift, preconditioner, sampler, description)
        descent.start(None if init is None else init / undo)
        started = 0 if init is None else 1
        # A stage of mini-batches and a full product.
        needed = len(problem.centre) * (1 + self.epochs)
        while descent.snapshots < self.max_snapshots and self.afford(needed):
            if descent.snapshots > started and descent.converged():
                break
            descent.advance()
        return descent.solution(problem, undo, passes)

    def _drawn(self, sampler: WeightedBatches) -> Batch:
        """Data for the preconditioner, four times as many as its rank: small eigenvalues of a sample are noise."""
        return sampler.batches(1, min(4 * self.max_rank, len(sampler.probabilities)))[0]

    def _build(self, operator: Operator, drawn: Batch, generator: torch.Generator) -> Nystrom:
        # One row of each of few data spans a part of what they decide, and `P` is as large elsewhere as within: the
        # error in the norm of `P⁻¹` would say nothing. All rows are no more than those of many data.
        if operator.num_rows <= 4 * self.max_rank:
            return Nystrom.of_root(operator, max_rank=self.max_rank)
        return Nystrom.of_rows(operator, *drawn, max_rank=self.max_rank, generator=generator)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """By `SGD`: a preconditioner costs more than it saves where there is one row."""
        solver = SGD(seed=self.seed, tolerance=math.sqrt(self.tolerance), afford=self.afford)
        return solver.minimise(objective, init, description=description)


@recorded
def _stage(
    gradient: Callable[[Tensor, Batch], Tensor],
    precondition: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    start: Tensor,
    largest: float,
) -> tuple[Tensor | None, int]:
    """One step for each mini-batch: the end, `None` if the steps diverge, and the number of data."""
    delta, scale, seen = start, None, 0
    for t, batch in enumerate(batches):
        seen += len(batch[0])
        g = gradient(delta, batch)
        direction = precondition(g)
        size = (g * direction).sum(1)
        scale = size if scale is None else scale
        if not bool((size <= 1e6 * scale).all()):  # also when it is NaN
            return None, seen
        delta = delta - min(largest, 2 / (t + 2)) * direction
    return delta, seen


class _Descent:
    """The iterates `δ` of one solve in coordinates of an isotropic prior, and the products that were made at them.

    `snapshots` counts the full products, `seen` the data of mini-batches, and `passes` all that both took.
    """

    # A stage of at least so many steps, in units of `λ`, reduces the error more than its products would in conjugate
    # gradients. Half and twice have no effect on classifiers of 100 weights and 3,000 data.
    _STEPS_WORTH = 4.0
    # Mini-batches on which the largest curvature is estimated, and steps of power iteration on each.
    _ESTIMATES, _ITERATIONS = 4, 6
    # The number of earlier directions that a new one is made conjugate to. Half and twice change no number of passes on
    # classifiers of 100 weights with a preconditioner of rank 10 or 20, and the error by a quarter at most.
    _DIRECTIONS = 4

    def __init__(
        self,
        solver: SVRG,
        problem: Quadratic,
        shift: float,
        preconditioner: Preconditioner,
        sampler: WeightedBatches,
        description: str | None,
    ) -> None:
        self.solver, self.problem, self.shift, self.preconditioner = solver, problem, shift, preconditioner
        self.sampler, self.description = sampler, description
        self.operator, num_data = problem.operator, problem.operator.num_data
        # Small batches cost the overhead of a call each, large ones waste data on the noise of a single step.
        self.size = min(num_data, solver.batch_size or min(500, max(16, num_data // 120)))
        self.steps = max(1, math.ceil(solver.epochs * num_data / self.size))
        preconditioned = Congruent(self.operator, lambda v: preconditioner.solve_root(v, shift))
        largest, self.passes = largest_of_batches(
            preconditioned, sampler.batches(self._ESTIMATES, self.size), self._ITERATIONS, sampler.generator
        )
        self.curvature = largest + 1  # shift·P⁻¹ is 1 at most
        self.snapshots = 0
        self.directions: list[tuple[Tensor, Tensor]] = []

    def start(self, warm: Tensor | None) -> None:
        """The first stage, with plain gradients of mini-batches; a warm start, and a step that follows, replace it."""
        problem, shift = self.problem, self.shift

        def gradient(delta: Tensor, batch: Batch) -> Tensor:
            return self.operator.matmul(problem.centre + delta, *batch) + shift * delta - problem.linear

        self.delta = torch.zeros_like(problem.centre)
        if warm is not None:
            probes = self.sampler.batches(PROBES, self.size)
            self.delta, _ = first_iterate(gradient, warm, probes)
            self._count(2 * PROBES * self.size)
        else:
            self.delta = self._descend(gradient)
        self._set_product(self.operator.matmul(problem.centre + self.delta))

    def _descend(self, gradient: Callable[[Tensor, Batch], Tensor]) -> Tensor:
        """The end of a stage from the present iterates."""

        def attempt(largest: float) -> tuple[Tensor | None, int]:
            batches = progress_bar(self.description, self.sampler.batches(self.steps, self.size))
            return _stage(gradient, self._precondition, batches, self.delta, largest)

        end, seen = restarted("SVRG", attempt, min(1.0, self.solver.step / self.curvature))
        self._count(seen)
        return end

    def _precondition(self, v: Tensor) -> Tensor:
        return self.preconditioner.solve(v, self.shift)

    def _count(self, num_data: int) -> None:
        self.passes += len(self.delta) * num_data / self.operator.num_data

    def _set_product(self, product: Tensor) -> None:
        """The snapshot: `Mζ`, and with it the full gradient and its squared norm in `P⁻¹`."""
        self.passes += len(product)
        self.snapshots += 1
        self.product = product
        self.full = product - self.problem.linear + self.shift * self.delta
        self.error = (self.full * self._precondition(self.full)).sum(1)

    def converged(self) -> bool:
        zeta = self.problem.centre + self.delta
        return bool((self.error <= self.solver.tolerance * (zeta * self.product).sum(1)).all())

    def advance(self) -> None:
        """Moves each row to the minimum of its objective along a new direction."""
        move, change = self._direction()
        # Made conjugate to the latest directions, so that their minima are kept. Not by a call with these as arguments,
        # whose caller would hold both stacks twice.
        for earlier, earlier_change in self.directions:
            share = _ratio(move, change, earlier, earlier_change, self.shift)
            move, change = move - share * earlier, change - share * earlier_change
        self.directions = [*self.directions[1 - self._DIRECTIONS :], (move, change)]
        length = _ratio(self.full, None, move, change, self.shift)
        self.delta = self.delta - length * move
        self._set_product(self.product - length * change)

    def _direction(self) -> tuple[Tensor, Tensor]:
        """A direction and its product with `M`."""
        if self.steps >= self._STEPS_WORTH * self.curvature:
            end = self._descend(_variance_reduced(self.operator, self.shift, self.delta, self.full))
            return end - self.delta, self.operator.matmul(self.problem.centre + end) - self.product
        move = -self._precondition(self.full)
        return move, self.operator.matmul(move)

    def solution(self, problem: Quadratic, undo: Tensor, passes: float) -> Solution:
        """The solution of the problem in its own coordinates; some passes were spent before."""
        self.directions.clear()  # frees memory for the stacks of the solution
        product, delta = self.product, self.delta * undo
        residual = relative_residual((product - self.problem.linear) / undo, self.shift * self.delta / undo)
        zeta = self.problem.centre + self.delta
        # ‖g‖² in P⁻¹ estimates the energy of the error, which is at least the square of that of the function.
        energy = (zeta.double() * product.double()).sum(1)
        error = (self.error.double() / energy.clamp_min(tiny(energy))).sqrt()
        total = passes + self.passes
        return Solution(problem.centre + delta, delta, residual, zeta * product, total, self.converged(), error=error)


def _ratio(x: Tensor, x_product: Tensor | None, move: Tensor, change: Tensor, shift: float) -> Tensor:
    """`⟨x, d⟩_H / ‖d‖²_H` of each row, or `⟨x, d⟩ / ‖d‖²_H` without `Mx`, for a direction `d` and `Md`."""
    inner = x if x_product is None else x_product + shift * x
    steepness = (move * (change + shift * move)).sum(1, keepdim=True)
    return (inner * move).sum(1, keepdim=True) / steepness.clamp_min(tiny(move))


def _variance_reduced(
    operator: Operator, shift: float, anchor: Tensor, full: Tensor
) -> Callable[[Tensor, Batch], Tensor]:
    """The gradient at `δ` from a mini-batch, given the full one at `anchor`."""

    def gradient(delta: Tensor, batch: Batch) -> Tensor:
        move = delta - anchor
        return full + operator.matmul(move, *batch) + shift * move

    return gradient
