r"""A preconditioned, variance-reduced mini-batch solver: for data so many that each pass over them counts.

After Frangella, Rathore, Zhao and Udell (2023), "PROMISE: Preconditioned Stochastic Optimization Methods by
Incorporating Scalable Curvature Estimates". For a quadratic the variance-reduced difference of two gradients of a
mini-batch, `M_b ζ − M_b ζ̃ = M_b(ζ − ζ̃)`, is one product.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.operators import Operator
from laplace_sampling.preconditioners import Nystrom
from laplace_sampling.solvers import Congruent, Minimum, Objective, Quadratic, Solution, Solver, largest_eigenvalue
from laplace_sampling.stochastic import SGD

__all__ = ["SVRG"]


@dataclass(frozen=True)
class SVRG(Solver):
    r"""Preconditioned SGD for one epoch, then preconditioned SVRG while a row needs it; `K` rows in parallel.

    The preconditioner `P` is a Nyström approximation of `H` from a subsample of the data. Steps are
    `δ ← δ − η_t P⁻¹ g_b(δ)` with `η_t = min(step/λ, 2/(t + 2))`. At `P = H` the second makes `δ_t` the solution of the
    equation whose `Mζ` is the mean of what the batches saw, weighted by `t`; at the end of an epoch, in which each
    datum came once, their noise sums to nearly zero, and the error is well below that of sampling with replacement.
    `λ` is the largest eigenvalue of `P⁻¹H` estimated on a mini-batch, over a few of them.

    A full product then gives residual and leverage. It is the snapshot `δ̃` as well: if a row has not
    converged, an epoch with gradients `g(δ̃) + (N/n)M_b(δ − δ̃) + A(δ − δ̃)` follows, and each row goes from `δ̃` along its
    move to the minimum of its objective, which the two full products tell. So no row gets worse.

    A row counts as converged if `gᵀP⁻¹g ≤ tolerance · ζᵀMζ`, with `g` its full gradient: at `P = H` the left side is
    the squared error in the norm of `H`, so the ratio bounds the error in function space,
    `‖Φ(ζ − ζ*)‖²_B / ‖Φζ‖²_B`. It is usually about three times that error. It can be below it where the rank of `P` is
    small and the problem badly conditioned.

    The linear term enters in full at every step, also where the problem has a `linear_batch` (`L`): that estimate has
    more variance and saves nothing here.

    Args:
        epochs: passes over the data before the first snapshot.
        batch_size: data a step; by default a 500th of the data, but 32 to 128.
        step: the largest step, in units of `1/λ`.
        tolerance: of the estimated squared error in function space, relative.
        max_snapshots: full products at most.
        max_rank: of the preconditioner.
        seed: of the subsample, the sketch and the order of mini-batches.
    """

    epochs: float = 1.0
    batch_size: int | None = None
    step: float = 2.0
    tolerance: float = 0.03
    max_snapshots: int = 4
    max_rank: int = 128
    seed: int = 0
    max_restarts: int = field(default=5, repr=False)

    def __post_init__(self) -> None:
        positive = (self.epochs, self.step, self.tolerance, self.max_snapshots, self.max_rank, self.batch_size or 1)
        if min(positive) <= 0:
            raise ValueError(
                "epochs, batch_size, step, tolerance, max_snapshots and max_rank must be positive, "
                f"but the solver is {self}."
            )

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        # In coordinates v√(A/ā) the prior is isotropic, as the preconditioner wants it.
        shift = float(problem.precision.mean())
        whitening = (problem.precision / shift).sqrt()
        operator = Congruent(problem.operator, lambda v: v / whitening)
        centre, linear = problem.centre * whitening, problem.linear / whitening
        delta = torch.zeros_like(centre) if init is None else init * whitening
        num_data, rows = operator.num_data, len(centre)
        size = min(num_data, self.batch_size or min(128, max(32, num_data // 500)))
        generator = torch.Generator().manual_seed(self.seed)
        preconditioner = self._precondition(operator, shift, rows, generator)
        curvature, spent = self._curvature(
            Congruent(operator, lambda v: preconditioner.solve_root(v, shift)), size, generator
        )
        passes = preconditioner.passes + spent
        if not math.isfinite(curvature):
            raise FloatingPointError(
                f"The largest curvature of the problem was estimated as {curvature}: the Jacobian products of the "
                "model contain NaN or infinity."
            )
        batches = _batches(num_data, size, generator)

        def descend(gradient: Callable[[Tensor, Tensor], Tensor], start: Tensor, epochs: float) -> tuple[Tensor, float]:
            steps = max(1, math.ceil(epochs * num_data / size))
            return self._descend(
                gradient, lambda g: preconditioner.solve(g, shift), batches, start, steps, curvature, description
            )

        def gradient(delta: Tensor, batch: Tensor) -> Tensor:
            return num_data / len(batch) * operator.matmul(centre + delta, batch) + shift * delta - linear

        if init is not None:
            delta, seen = _better_start(gradient, delta, [next(batches) for _ in range(3)])
            passes += rows * seen / num_data
        delta, seen = descend(gradient, delta, self.epochs)
        product = operator.matmul(centre + delta)
        passes += rows * (seen / num_data + 1)
        snapshots = 1
        while True:
            zeta = centre + delta
            full = product - linear + shift * delta
            error = (full * preconditioner.solve(full, shift)).sum(1)
            converged = bool((error <= self.tolerance * (zeta * product).sum(1)).all())
            if converged or snapshots == self.max_snapshots:
                break
            proposal, seen = descend(_variance_reduced(operator, shift, delta, full), delta, 1.0)
            move, change = proposal - delta, operator.matmul(centre + proposal) - product
            passes += rows * (seen / num_data + 1)
            steepness = (move * (change + shift * move)).sum(1, keepdim=True)
            length = -(full * move).sum(1, keepdim=True) / steepness.clamp_min(torch.finfo(move.dtype).tiny)
            delta, product = delta + length * move, product + length * change
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

    def _precondition(self, operator: Operator, shift: float, rows: int, generator: torch.Generator) -> Nystrom:
        num_data = operator.num_data
        subsample = torch.randperm(num_data, generator=generator)[: max(500, num_data // 20)]
        # The rule of conjugate gradients errs on the large side here, where noise limits the steps as well.
        return Nystrom.of(operator, subsample, max_rank=self.max_rank, shift=shift, num_rhs=rows, seed=self.seed)

    def _curvature(
        self, operator: Operator, size: int, generator: torch.Generator, num_batches: int = 5, iterations: int = 6
    ) -> tuple[float, float]:
        """The largest eigenvalue among some mini-batch estimates of `P⁻¹H`, and the passes that it took."""
        batches = torch.randperm(operator.num_data, generator=generator).split(size)
        batches = [b for b in batches if len(b) == size][:num_batches]
        largest = max(largest_eigenvalue(operator, b, iterations, generator) for b in batches)
        return largest + 1, len(batches) * iterations * size / operator.num_data  # shift·P⁻¹ is 1 at most

    def _descend(
        self,
        gradient: Callable[[Tensor, Tensor], Tensor],
        precondition: Callable[[Tensor], Tensor],
        batches: Iterator[Tensor],
        start: Tensor,
        steps: int,
        curvature: float,
        description: str | None,
    ) -> tuple[Tensor, int]:
        """Where the steps lead, and how many data they saw; a diverging run is restarted with a third of the step."""
        seen, largest = 0, min(1.0, self.step / curvature)
        for _ in range(self.max_restarts + 1):
            delta, scale = start, None
            for t in tqdm(range(steps), desc=description, disable=description is None, leave=False):
                batch = next(batches)
                seen += len(batch)
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


def _batches(num_data: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(num_data, generator=generator).split(size)


def _variance_reduced(
    operator: Operator, shift: float, anchor: Tensor, full: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient at `δ` from a mini-batch, given the full one at `anchor`."""

    def gradient(delta: Tensor, batch: Tensor) -> Tensor:
        move = delta - anchor
        return full + operator.num_data / len(batch) * operator.matmul(move, batch) + shift * move

    return gradient


def _better_start(
    gradient: Callable[[Tensor, Tensor], Tensor], delta: Tensor, probes: list[Tensor]
) -> tuple[Tensor, int]:
    """Each row of a warm start, or zero where its gradient is smaller there, and how many data that took."""
    zero = torch.zeros_like(delta)
    cold, warm = (torch.stack([gradient(v, b) for b in probes]).norm(dim=2).mean(0)[:, None] for v in (zero, delta))
    return torch.where(warm <= cold, delta, zero), 2 * sum(len(b) for b in probes)
