r"""A preconditioned, variance-reduced mini-batch solver: for data so many that each pass over them counts.

After Frangella, Rathore, Zhao and Udell (2023), "PROMISE: Preconditioned Stochastic Optimization Methods by
Incorporating Scalable Curvature Estimates". For a quadratic the variance-reduced difference of two gradients of a
mini-batch, `M_b ζ − M_b ζ̃ = M_b(ζ − ζ̃)`, is one product.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.solvers.operator import Congruent, Operator, largest_eigenvalue
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver

__all__ = ["SVRG"]

# A stage of at least so many steps, in units of `λ`, goes further than its products do as conjugate gradients.
_STEPS_WORTH = 4.0
# How many directions a new one is made conjugate to.
_DIRECTIONS = 4

# Rows by which a held preconditioner tells whether `M` is what it was, and how far they may have moved, relative.
_SIGNATURE, _MOVED = 32, 0.1

# Indices of data, and their weights.
_Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SVRG(Solver):
    r"""Preconditioned SGD for one epoch, then SVRG or conjugate gradients while a row needs it; `K` rows in parallel.

    Data are drawn by how much each contributes to `M` (`Operator.sizes`), and weighted by the inverse: most data of a
    good classifier have next to no curvature, and a few have nearly all of it.

    The preconditioner `P` has the leading eigenvectors of an estimate of `M` from one random row of some data
    (`Nystrom.of_rows`); `hold` keeps it between solves. Steps are `δ ← δ − η_t P⁻¹ g_b(δ)` with
    `η_t = min(step/λ, 2/(t + 2))`; `λ` is the largest eigenvalue of `P⁻¹H` estimated on a mini-batch, over a few of
    them. At `P = H` the second makes `δ_t` solve the equation whose `Mζ` is the mean of what the batches saw, weighted
    by `t`; at the end of a stage, in which each datum came as often as it should, their noise sums to nearly zero.

    A full product then gives residual and leverage. It is the snapshot `δ̃` as well: if a row has not converged, a
    stage with gradients `g(δ̃) + M_b(δ − δ̃) + A(δ − δ̃)` follows. Where it leads is a direction only: each row goes to
    the minimum of its objective in the span of the latest directions, which full products tell, as in flexible
    conjugate gradients (Notay 2000). So no row gets worse. Where a stage has too few steps for `λ`, the direction is
    `P⁻¹g(δ̃)` instead, at one product rather than two: those are preconditioned conjugate gradients.

    A row counts as converged if `gᵀP⁻¹g ≤ tolerance · ζᵀMζ`, with `g` its full gradient: at `P = H` the left side is
    the squared error in the norm of `H`, so the ratio bounds the error in function space,
    `‖Φ(ζ − ζ*)‖²_B / ‖Φζ‖²_B`. It can be below it where the rank of `P` is small and the problem badly conditioned.

    The linear term enters in full at every step, also where the problem has a `linear_batch` (`L`): that estimate has
    more variance and saves nothing here.

    Args:
        epochs: products of a stage, in passes over the data.
        batch_size: data a step; by default a 120th of the data, but 16 to 500.
        step: the largest step, in units of `1/λ`.
        tolerance: of the estimated squared error in function space, relative.
        max_snapshots: full products at most.
        max_rank: of the preconditioner; it holds so many vectors, and four times as many while it is built.
        seed: of the rows of the preconditioner and of the mini-batches.
    """

    epochs: float = 1.0
    batch_size: int | None = None
    step: float = 2.0
    tolerance: float = 0.01
    max_snapshots: int = 40
    max_rank: int = 512
    seed: int = 0
    max_restarts: int = field(default=5, repr=False)
    held: "HeldNystrom | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        positive = (self.epochs, self.step, self.tolerance, self.max_snapshots, self.max_rank, self.batch_size or 1)
        if min(positive) <= 0:
            raise ValueError(
                "epochs, batch_size, step, tolerance, max_snapshots and max_rank must be positive, "
                f"but the solver is {self}."
            )

    def hold(self) -> "SVRG":
        """The same solver, with one preconditioner for all its solves: see `HeldNystrom`."""
        return replace(self, held=HeldNystrom())

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        # In coordinates v√(A/ā) the prior is isotropic, as the preconditioner wants it.
        shift = float(problem.precision.mean())
        whitening = (problem.precision / shift).sqrt()
        operator = Congruent(problem.operator, lambda v: v / whitening)
        centre, linear = problem.centre * whitening, problem.linear / whitening
        delta = torch.zeros_like(centre) if init is None else init * whitening
        num_data, rows = operator.num_data, len(centre)
        size = min(num_data, self.batch_size or min(500, max(16, num_data // 120)))
        steps = max(1, math.ceil(self.epochs * num_data / size))
        sizes = operator.sizes()
        sampler = _Sampler(sizes, torch.Generator().manual_seed(self.seed))
        drawn = sampler.batches(1, min(4 * self.max_rank, num_data))[0]

        def build(generator: torch.Generator) -> Nystrom:
            return Nystrom.of_rows(operator, *drawn, max_rank=self.max_rank, generator=generator)

        if self.held is None:
            preconditioner = build(sampler.generator)
            made = preconditioner.passes
        else:
            # From other numbers, so that mini-batches do not depend on whether it is made.
            other = torch.Generator().manual_seed(self.seed)
            preconditioner, made = self.held.of(problem.operator, whitening, sizes, drawn[0], lambda: build(other))
        curvature, spent = self._curvature(
            Congruent(operator, lambda v: preconditioner.solve_root(v, shift)), size, sampler
        )
        passes = made + spent
        if not math.isfinite(curvature):
            raise FloatingPointError(
                f"The largest curvature of the problem was estimated as {curvature}: the Jacobian products of the "
                "model contain NaN or infinity."
            )

        def descend(gradient: Callable[[Tensor, _Batch], Tensor], start: Tensor) -> tuple[Tensor, int]:
            return self._descend(
                gradient,
                lambda g: preconditioner.solve(g, shift),
                lambda: sampler.batches(steps, size),
                start,
                curvature,
                description,
            )

        def gradient(delta: Tensor, batch: _Batch) -> Tensor:
            return operator.matmul(centre + delta, *batch) + shift * delta - linear

        if init is not None:
            delta, seen = _better_start(gradient, delta, sampler.batches(3, size))
            passes += rows * seen / num_data
        delta, seen = descend(gradient, delta)
        product = operator.matmul(centre + delta)
        passes += rows * (seen / num_data + 1)
        snapshots = 1
        directions: list[tuple[Tensor, Tensor]] = []
        while True:
            zeta = centre + delta
            full = product - linear + shift * delta
            error = (full * preconditioner.solve(full, shift)).sum(1)
            converged = bool((error <= self.tolerance * (zeta * product).sum(1)).all())
            if converged or snapshots == self.max_snapshots:
                break
            if steps >= _STEPS_WORTH * curvature:
                proposal, seen = descend(_variance_reduced(operator, shift, delta, full), delta)
                move, change = proposal - delta, operator.matmul(centre + proposal) - product
            else:
                move, seen = -preconditioner.solve(full, shift), 0
                change = operator.matmul(move)
            passes += rows * (seen / num_data + 1)
            for earlier, its_change in directions:
                share = _ratio(move, change, earlier, its_change, shift)
                move, change = move - share * earlier, change - share * its_change
            directions = [*directions[1 - _DIRECTIONS :], (move, change)]
            length = _ratio(full, None, move, change, shift)
            delta, product = delta - length * move, product - length * change
            snapshots += 1
        fit, pull = (product - linear) * whitening, shift * delta * whitening
        size_of_terms = (fit.norm(dim=1) + pull.norm(dim=1)).clamp_min(torch.finfo(fit.dtype).tiny)
        residual = (fit + pull).norm(dim=1) / size_of_terms
        delta = delta / whitening
        # ‖g‖² in P⁻¹ estimates the energy of the error, which is at least the square of that of the function.
        energy = (zeta.double() * product.double()).sum(1)
        relative = (error.double() / energy.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        return Solution(problem.centre + delta, delta, residual, zeta * product, passes, converged, error=relative)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """By `SGD`: an objective of one row would not earn its preconditioner back."""
        return SGD(seed=self.seed).minimise(objective, init, description=description)

    def _curvature(
        self, operator: Operator, size: int, sampler: "_Sampler", num_batches: int = 4, iterations: int = 6
    ) -> tuple[float, float]:
        """The largest eigenvalue among some mini-batch estimates of `P⁻¹H`, and the passes that it took."""
        largest = max(
            largest_eigenvalue(operator, batch, iterations, sampler.generator, weights)
            for batch, weights in sampler.batches(num_batches, size)
        )
        return largest + 1, num_batches * iterations * size / operator.num_data  # shift·P⁻¹ is 1 at most

    def _descend(
        self,
        gradient: Callable[[Tensor, _Batch], Tensor],
        precondition: Callable[[Tensor], Tensor],
        draw: Callable[[], list[_Batch]],
        start: Tensor,
        curvature: float,
        description: str | None,
    ) -> tuple[Tensor, int]:
        """Where the steps lead, and how many data they saw; a diverging run is restarted with a third of the step."""
        seen, largest = 0, min(1.0, self.step / curvature)
        for _ in range(self.max_restarts + 1):
            delta, scale, batches = start, None, draw()
            for t, batch in enumerate(tqdm(batches, desc=description, disable=description is None, leave=False)):
                seen += len(batch[0])
                g = gradient(delta, batch)
                direction = precondition(g)
                size = (g * direction).sum(1)
                scale = size if scale is None else scale
                if not bool((size <= 1e6 * scale).all()):  # also when it is NaN
                    break
                delta = delta - min(largest, 2 / (t + 2)) * direction
            else:
                return delta, seen
            largest /= 3
        raise FloatingPointError(
            f"SVRG diverged {self.max_restarts + 1} times, last with step size {3 * largest:.1e}; the Jacobian "
            "products of the model may be inaccurate in its precision. Try float64 or a larger `SVRG(batch_size=...)`."
        )


class HeldNystrom:
    """The preconditioner of one `M`, for every `α`, and for multiples of `M`, as other noise precisions give.

    It is made in the first solve, and again in one where `M` has moved, as it does with a mode at which `B` is taken:
    some random rows, the same ones each time, tell that, and the factor.
    """

    def __init__(self) -> None:
        self.preconditioner: Nystrom | None = None

    def of(
        self,
        operator: Operator,
        whitening: Float[Tensor, " P"],
        sizes: Float[Tensor, " N"],
        data: Tensor,
        build: Callable[[], Nystrom],
    ) -> tuple[Nystrom, float]:
        """That of `operator` in coordinates `v · whitening`, and the passes it took.

        Args:
            operator: `M`.
            whitening: see above.
            sizes: of the data.
            data: indices, of which the first ones are looked at if there is nothing held.
            build: makes it.
        """
        if self.preconditioner is None:
            self._data = data[:_SIGNATURE].clone()
        rows = operator.random_rows(self._data, torch.Generator().manual_seed(0)).double()
        signature, passes = rows @ rows.T, len(rows) / (2 * operator.num_data)
        if self.preconditioner is not None:
            factor, moved = _multiple(signature, self._signature)
            if max(moved, _multiple(sizes, self._sizes)[1]) <= _MOVED:
                return self._rescaled(factor, whitening), passes
        self.preconditioner = build()
        self._signature, self._sizes, self._whitening = signature, sizes, whitening
        return self.preconditioner, self.preconditioner.passes + passes

    def _rescaled(self, factor: float, whitening: Tensor) -> Nystrom:
        assert self.preconditioner is not None
        held = self.preconditioner
        change = self._whitening / whitening
        if not bool((change == 1).all()):
            held = held.congruent(change)
        return Nystrom(held.vectors, held.eigenvalues * factor, held.passes)


def _multiple(new: Tensor, old: Tensor) -> tuple[float, float]:
    """`c` for which `new ≈ c old`, and the relative distance; infinite if there is no such `c > 0`."""
    factor = float((new * old).sum() / (old * old).sum())
    if not 0 < factor < math.inf:
        return 1.0, math.inf
    return factor, float((new - factor * old).norm() / (factor * old.norm()))


class _Sampler:
    """Mini-batches of data drawn with probabilities by their sizes, and weights that make sums over them unbiased.

    No probability is below a tenth of a uniform one, roughly: a size is an estimate. Over a set of mini-batches the
    draw is systematic: each datum comes as often as it should, up to one time. With equal sizes it comes once an epoch.
    """

    def __init__(self, sizes: Tensor, generator: torch.Generator) -> None:
        floored = sizes.clamp_min(0) + 0.1 * sizes.mean()
        equal = not bool(floored.sum() > 0) or not bool(floored.isfinite().all())
        floored = torch.ones_like(sizes) if equal else floored
        self.probabilities, self.generator = floored / floored.sum(), generator

    def batches(self, number: int, size: int) -> list[_Batch]:
        total, num_data = number * size, len(self.probabilities)
        order = torch.randperm(num_data, generator=self.generator)
        offset = torch.rand(1, generator=self.generator, dtype=torch.float64)
        points = (torch.arange(total, dtype=torch.float64) + offset) / total
        drawn = order[torch.searchsorted(self.probabilities[order].cumsum(0), points).clamp_max(num_data - 1)]
        weights = 1 / (size * self.probabilities)
        # Every `number`-th point to a mini-batch: a datum that comes twice comes in two of them.
        parts = [drawn[i::number] for i in torch.randperm(number, generator=self.generator).tolist()]
        return [(part, weights[part]) for part in parts]


def _ratio(left: Tensor, left_change: Tensor | None, move: Tensor, change: Tensor, shift: float) -> Tensor:
    """`⟨x, d⟩_H / ‖d‖²_H` of each row, or `⟨x, d⟩ / ‖d‖²_H` without `Mx`, for a direction `d` and `Md`."""
    inner = left if left_change is None else left_change + shift * left
    steepness = (move * (change + shift * move)).sum(1, keepdim=True)
    return (inner * move).sum(1, keepdim=True) / steepness.clamp_min(torch.finfo(move.dtype).tiny)


def _variance_reduced(
    operator: Operator, shift: float, anchor: Tensor, full: Tensor
) -> Callable[[Tensor, _Batch], Tensor]:
    """The gradient at `δ` from a mini-batch, given the full one at `anchor`."""

    def gradient(delta: Tensor, batch: _Batch) -> Tensor:
        move = delta - anchor
        return full + operator.matmul(move, *batch) + shift * move

    return gradient


def _better_start(
    gradient: Callable[[Tensor, _Batch], Tensor], delta: Tensor, probes: list[_Batch]
) -> tuple[Tensor, int]:
    """Each row of a warm start, or zero where its gradient is smaller there, and how many data that took."""
    zero = torch.zeros_like(delta)
    cold, warm = (torch.stack([gradient(v, b) for b in probes]).norm(dim=2).mean(0)[:, None] for v in (zero, delta))
    return torch.where(warm <= cold, delta, zero), 2 * sum(len(batch) for batch, _ in probes)
