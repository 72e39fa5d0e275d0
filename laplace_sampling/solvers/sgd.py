"""Mini-batch gradient descent: for data so many that each pass over them counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.solvers.operator import Operator, largest_eigenvalue, tiny
from laplace_sampling.solvers.solver import (
    Minimum,
    Objective,
    Quadratic,
    Solution,
    Solver,
    function_error,
    relative_residual,
)

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD(Solver):
    """Mini-batch gradient descent with Nesterov momentum, for `K` rows in parallel; no step size to give.

    The step size is `step / λ`, with `λ` the largest eigenvalue found by power iteration among the mini-batch
    estimates of the Hessian: what keeps every single step stable, not only the mean one. Each row's gradient is
    clipped by itself. A diverging run is restarted with a third of the step.

    Args:
        epochs: passes over the data.
        min_steps: at least so many steps, where an epoch has few.
        batch_size: data a step.
        momentum: Nesterov's (thesis §4.2.4).
        step: the step size in units of `1/λ`.
        clip: a row's gradient is clipped to `clip` times its norm at `δ = 0`.
        averaging: `"decay"`, the step size goes down linearly to 1/330 of its start and the last iterate is
            returned; or `"geometric"`, constant step and `ᾱ ← χα + (1 − χ)ᾱ` with `χ = 100 / steps`.
        mode_epochs: passes for `minimise`, which has one row only and needs more accuracy in weight space.
        tolerance: residual under which a row counts as converged. Steep directions dominate it, so that it looks
            large: on digits 0.5 goes with an error of one to two percent in function space.
        max_doublings: while a row has not converged, go on with twice the steps, at most so many times.
        seed: of the order of mini-batches.
    """

    epochs: float = 10.0
    min_steps: int = 100
    batch_size: int = 100
    momentum: float = 0.9
    step: float = 1.0
    clip: float = 1.0
    averaging: str = "decay"
    mode_epochs: float = 40.0
    tolerance: float = 0.5
    max_doublings: int = 3
    seed: int = 0
    max_restarts: int = field(default=5, repr=False)

    def __post_init__(self) -> None:
        if self.averaging not in ("decay", "geometric"):
            raise ValueError(f'`averaging` must be "decay" or "geometric", but is {self.averaging!r}.')
        positive = (self.epochs, self.mode_epochs, self.batch_size, self.step, self.clip)
        if min(positive) <= 0 or self.max_doublings < 0:
            raise ValueError(
                f"epochs, mode_epochs, batch_size, step and clip must be positive, max_doublings not negative: {self}."
            )

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        operator = problem.operator
        delta = torch.zeros_like(problem.centre) if init is None else init
        curvature, passes = self._stable_curvature(operator)
        curvature += float(problem.precision.max())
        steps = self._num_steps(self.epochs, operator.num_data)
        for doubling in range(self.max_doublings + 1):
            delta, spent = self._descend(
                problem.gradient, delta, operator.num_data, curvature, steps * 2**doubling, True, description
            )
            zeta = problem.centre + delta
            product = operator.matmul(zeta)
            passes += spent + len(zeta)
            fit, pull = product - problem.linear, problem.precision * delta
            residual = relative_residual(fit, pull)
            converged = bool((residual < self.tolerance).all())
            if converged or doubling == self.max_doublings:
                error = function_error(fit + pull, zeta, product, float(problem.precision.min()))
                return Solution(zeta, delta, residual, zeta * product, passes, converged, error=error)
        raise AssertionError("unreachable")

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        theta, passes, value = init, 0.0, objective.value(init)
        steps = self._num_steps(self.mode_epochs, objective.num_data)
        # The curvature moves with the iterate, most at the start: measure it again after a quarter of the way, take
        # smaller steps than for a quadratic, and smaller ones still if the objective went up.
        for share, decay in ((0.25, False), (0.75, True)):
            curvature, spent = self._stable_curvature(objective.curvature(theta))
            curvature = 3 * (curvature + float(objective.precision.max()))
            passes += spent
            part = max(1, round(share * steps))
            for _ in range(self.max_restarts + 1):
                proposal, spent = self._descend(
                    objective.gradient, theta, objective.num_data, curvature, part, decay, description
                )
                reached = objective.value(proposal)
                passes += spent + 0.5  # a value is half a product: a JVP
                if reached <= value + 1e-6 * abs(value):
                    theta, value = proposal, reached
                    break
                curvature *= 3
        start = objective.gradient(torch.zeros_like(theta), None).norm()
        residual = float(objective.gradient(theta, None).norm() / start.clamp_min(tiny(start)))
        return Minimum(theta, residual, passes + 2, residual < self.tolerance)

    def _num_steps(self, epochs: float, num_data: int) -> int:
        return max(self.min_steps, math.ceil(epochs * math.ceil(num_data / self.batch_size)))

    def _batches(self, num_data: int, generator: torch.Generator):
        while True:
            yield from torch.randperm(num_data, generator=generator).split(self.batch_size)

    def _stable_curvature(self, operator: Operator, num_batches: int = 8, iterations: int = 8) -> tuple[float, float]:
        """The largest eigenvalue among some mini-batch estimates of `M`, and the passes that it took."""
        generator = torch.Generator().manual_seed(self.seed)
        batches = torch.randperm(operator.num_data, generator=generator).split(self.batch_size)
        batches = [b for b in batches if len(b) == len(batches[0])][:num_batches]  # a short last batch is all noise
        largest = max(largest_eigenvalue(operator, b, iterations, generator) for b in batches)
        return largest, len(batches) * iterations * len(batches[0]) / operator.num_data

    def _descend(
        self,
        gradient: Callable[[Tensor, Tensor], Tensor],
        start: Tensor,
        num_data: int,
        curvature: float,
        steps: int,
        decay: bool,
        description: str | None,
    ) -> tuple[Tensor, float]:
        if not (math.isfinite(curvature) and curvature > 0):
            raise FloatingPointError(
                f"The largest curvature of the problem was estimated as {curvature}: the Jacobian products of the "
                "model contain NaN or infinity, or the outputs do not depend on the weights."
            )
        step = self.step / curvature
        spent = 0
        for _ in range(self.max_restarts + 1):
            result, gradients = self._run(gradient, start, num_data, step, steps, decay, description)
            spent += gradients
            if result is not None:
                return result, len(start) * spent * min(self.batch_size, num_data) / num_data
            step /= 3
        raise FloatingPointError(
            f"SGD diverged {self.max_restarts + 1} times, last with step size {3 * step:.1e}; the Jacobian products "
            "of the model may be inaccurate in its precision. Try float64 or a larger `SGD(batch_size=...)`."
        )

    def _run(
        self,
        gradient: Callable[[Tensor, Tensor], Tensor],
        start: Tensor,
        num_data: int,
        step: float,
        steps: int,
        decay: bool,
        description: str | None,
    ) -> tuple[Tensor | None, int]:
        """One descent, `None` if it diverged, and the number of gradients that it took."""
        generator = torch.Generator().manual_seed(self.seed)
        batches = self._batches(num_data, generator)
        zero = torch.zeros_like(start)
        probes = [next(batches) for _ in range(3)]
        scale, warm = (
            torch.stack([gradient(v, b) for b in probes]).norm(dim=2).mean(0)[:, None] for v in (zero, start)
        )
        scale = scale.clamp_min(tiny(scale))
        x, velocity = torch.where(warm > scale, zero, start), zero  # a warm start that is worse than none is none
        geometric = self.averaging == "geometric" and decay
        average, share = start.clone(), min(1.0, 100 / steps)
        for t in tqdm(range(steps), desc=description, disable=description is None, leave=False):
            g = gradient(x + self.momentum * velocity, next(batches))
            size = g.norm(dim=1, keepdim=True) / scale
            if not bool((size < 1e3).all()):  # also when it is NaN
                return None, t + 7
            g = g * (self.clip / size).clamp_max(1)
            now = step * (1 - (1 - 1 / 330) * t / steps) if decay and not geometric else step
            velocity = self.momentum * velocity - now * g
            x = x + velocity
            if geometric:
                average = share * x + (1 - share) * average
        return average if geometric else x, steps + 6
