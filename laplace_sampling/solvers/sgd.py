"""Mini-batch gradient descent: for data so many that each pass over them counts."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.operator import Operator, largest_of_batches, tiny
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import IterativeSolver, Minimum, Objective, Quadratic, Solution, progress_bar

Gradient = Callable[[Tensor, Tensor], Tensor]
Batch = TypeVar("Batch")

# Mini-batches whose gradients tell the scale of each row, and whether a warm start is better than none. With two or six
# of them the error on classifiers of 100 weights changes by less than one percent of it.
PROBES = 3


@dataclass(frozen=True)
class SGD(IterativeSolver):
    """Mini-batch gradient descent with Nesterov momentum, for `K` rows in parallel; it chooses its step size itself.

    The step size is `step / λ`, where `λ` is the largest eigenvalue found by power iteration among the mini-batch
    estimates of the Hessian, so that every single step is stable, and not only the mean one. It goes down linearly to
    1/330 of its start. The gradient of each row is clipped by itself. A diverging run is restarted with a third of the
    step.

    A full product judges the last iterate. Conjugate gradients (`CG`) finish the rows that have not converged: each of
    their steps is a full product, keeps the true residual and makes no row's objective larger, while a longer descent
    would first make its iterates noisy again. Newton's method finishes a mode.

    Args:
        epochs: passes over the data.
        min_steps: smallest number of steps, for few data.
        batch_size: number of data in a step.
        momentum: Nesterov's momentum (thesis §4.2.4).
        step: the step size in units of `1/λ`.
        clip: a row's gradient is clipped to `clip` times its norm at `δ = 0`.
        mode_epochs: passes for `minimise`, which has one row only and needs more accuracy in weight space.
        tolerance: a row has converged when the error of its function on the training data,
            `‖Φ(ζ − ζ*)‖_B / ‖Φζ‖_B`, is below it, by the bound of `function_error`. `None` is 0.09, and in a `method`
            what the tolerance of predicted standard deviations needs.
        finish_passes: the largest number of full products for each row after the descent; 0 ends with the descent.
        seed: the seed of the order of mini-batches.
    """

    # The last step size of a decay, as a fraction of the first: the paper's (docs/equations.md).
    # Half and twice change the error on classifiers of 100 weights by less than one percent of it.
    _LAST_STEP = 1 / 330
    # The error of the function that 64 samples may have for standard deviations to 1.5 %.
    _TOLERANCE = 0.09

    epochs: float = 10.0
    min_steps: int = 100
    batch_size: int = 100
    momentum: float = 0.9
    step: float = 1.0
    clip: float = 1.0
    mode_epochs: float = 40.0
    tolerance: float | None = None
    finish_passes: int = 140
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "step", "clip", "mode_epochs"):
            check_positive(f"`SGD({name}=...)`", getattr(self, name))
        for name, least in (("min_steps", 1), ("batch_size", 1), ("finish_passes", 0), ("seed", 0)):
            check_whole(f"`SGD({name}=...)`", getattr(self, name), least)
        if not (isinstance(self.momentum, float | int) and 0 <= self.momentum < 1):
            raise ValueError(f"`SGD(momentum=...)` must lie between 0 and 1, without 1, but is {self.momentum!r:.80}.")
        if not (isinstance(self._tolerance, float | int) and 0 < self._tolerance < 1):
            raise ValueError(f"`SGD(tolerance=...)` must lie between 0 and 1, but is {self.tolerance!r:.80}.")

    def shortened(self, part: float) -> "SGD":
        """With a part of the passes, as for starts near the solution; what has not converged is finished as ever."""
        steps = max(1, round(part * self.min_steps))
        return replace(self, epochs=part * self.epochs, mode_epochs=part * self.mode_epochs, min_steps=steps)

    @property
    def _tolerance(self) -> float:
        return self._TOLERANCE if self.tolerance is None else self.tolerance

    @property
    def _finish(self) -> CG:
        """What goes on where a descent has ended."""
        return CG(self._tolerance, self.finish_passes, afford=self.afford)

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        operator = problem.operator
        delta = torch.zeros_like(problem.centre) if init is None else init
        curvature, passes = self._stable_curvature(operator)
        curvature += float(problem.precision.max())
        steps = self._num_steps(self.epochs, operator.num_data)
        delta, spent = self._descend(problem.gradient, delta, operator.num_data, curvature, steps, True, description)
        solution = self._finish.solve(problem, delta, description=description)
        return replace(solution, passes=passes + spent + solution.passes)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        theta, value, passes = init, objective.value(init), 0.0
        steps = self._num_steps(self.mode_epochs, objective.num_data)
        # The curvature moves with the iterate, most at the start: it is measured again after a quarter of the way.
        for share, decay in ((0.25, False), (0.75, True)):
            part = max(1, round(share * steps))
            theta, value, spent = self._minimise_part(objective, theta, value, part, decay, description)
            passes += spent
        if self.finish_passes:
            minimum = self._finish.minimise(objective, theta, description=description)
            return replace(minimum, passes=passes + minimum.passes)
        slope, start = (objective.gradient(point, None) for point in (theta, torch.zeros_like(theta)))
        residual = float(slope.norm() / start.norm().clamp_min(tiny(start)))
        # The objective is strongly convex: `‖θ − θ̄‖` in the norm of `A` is at most that of the gradient in `A⁻¹`.
        squared = (slope.double() ** 2 / objective.precision).sum()
        converged = squared <= self._tolerance**2 * (objective.precision * theta.double() ** 2).sum()
        return Minimum(theta, residual, passes + 2, bool(converged))

    def _minimise_part(
        self, objective: Objective, theta: Tensor, value: float, steps: int, decay: bool, description: str | None
    ) -> tuple[Tensor, float, float]:
        """A descent that does not raise the objective: where it leads, the objective there, and passes."""
        curvature, passes = self._stable_curvature(objective.curvature(theta))
        # Three times the curvature of a quadratic, because it may grow on the way; and more if the objective went up.
        curvature = 3 * (curvature + float(objective.precision.max()))
        for _ in range(6):
            proposal, spent = self._descend(
                objective.gradient, theta, objective.num_data, curvature, steps, decay, description
            )
            reached = objective.value(proposal)
            passes += spent + 0.5  # a value is half a product: a JVP
            if reached <= value + 1e-6 * abs(value):
                return proposal, reached, passes
            curvature *= 3
        return theta, value, passes

    def _num_steps(self, epochs: float, num_data: int) -> int:
        return max(self.min_steps, math.ceil(epochs * math.ceil(num_data / self.batch_size)))

    def _batches(self, num_data: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(num_data, generator=generator).split(self.batch_size)

    def _stable_curvature(self, operator: Operator, num_batches: int = 8, iterations: int = 8) -> tuple[float, float]:
        """The largest eigenvalue among some mini-batch estimates of `M`, and the passes that it took."""
        generator = torch.Generator().manual_seed(self.seed)
        batches = torch.randperm(operator.num_data, generator=generator).split(self.batch_size)
        # Without a short last batch, whose estimate is mostly noise.
        size = len(batches[0])
        weights = torch.full((size,), operator.num_data / size, dtype=torch.float64)
        weighted = [(batch, weights) for batch in batches if len(batch) == size]
        return largest_of_batches(operator, weighted[:num_batches], iterations, generator)

    def _descend(
        self,
        gradient: Gradient,
        start: Tensor,
        num_data: int,
        curvature: float,
        steps: int,
        decay: bool,
        description: str | None,
    ) -> tuple[Tensor, float]:
        """A descent that is restarted with a third of the step if it diverges: where it leads, and the passes."""
        passes = len(start) * min(self.batch_size, num_data) / num_data
        # A constant step ends in a cloud around the minimum as wide as the noise of mini-batches; a decay shrinks it.
        last = self._LAST_STEP if decay else 1.0

        def attempt(step: float) -> tuple[Tensor | None, int]:
            batches = self._batches(num_data)
            probes = list(islice(batches, PROBES))
            sizes = [step * (1 - (1 - last) * t / steps) for t in range(steps)]
            bar = progress_bar(description, zip(sizes, batches, strict=False), total=steps)
            # The iterates are judged by a product of all data, which is paid for as well.
            return self._run(gradient, start, probes, bar, lambda: self.afford(len(start) + passes))

        end, num_gradients = restarted("SGD", attempt, self.step / curvature)
        return end, num_gradients * passes

    @recorded
    def _run(
        self,
        gradient: Gradient,
        start: Tensor,
        probes: Sequence[Tensor],
        steps: Iterable[tuple[float, Tensor]],
        affordable: Callable[[], bool],
    ) -> tuple[Tensor | None, int]:
        """One descent by steps of given sizes as far as they are affordable, and the number of gradients that it took.

        The descent is `None` if it diverged.
        """
        x, scale = first_iterate(gradient, start, probes)
        velocity, num_gradients = torch.zeros_like(x), 2 * len(probes)
        for step, batch in steps:
            if not affordable():
                break
            num_gradients += 1
            g = gradient(x + self.momentum * velocity, batch)
            size = g.norm(dim=1, keepdim=True) / scale
            if not bool((size < 1e3).all()):  # also when it is NaN
                return None, num_gradients
            # Each row by its own norm, so that a row does not depend on the others that are solved with it.
            g = g * (self.clip / size).clamp_max(1)
            velocity = self.momentum * velocity - step * g
            x = x + velocity
        return x, num_gradients


def restarted(
    solver: str, attempt: Callable[[float], tuple[Tensor | None, int]], step: float, most: int = 6
) -> tuple[Tensor, int]:
    """What the first descent that does not diverge leads to, each with a third of the step of the one before.

    Args:
        solver: its name.
        attempt: takes a step size; returns the end, `None` if it diverged, and what it counted.
        step: of the first descent.
        most: number of descents.

    Returns:
        The end, and the sum of all counts.

    Raises:
        FloatingPointError: if all of them diverge.
    """
    total = 0
    for _ in range(most):
        end, count = attempt(step)
        total += count
        if end is not None:
            return end, total
        step /= 3
    raise FloatingPointError(
        f"{solver} diverged {most} times, last with step size {3 * step:.1e}; the Jacobian products of the model may "
        f"be inaccurate in its precision. Try float64 or a larger `{solver}(batch_size=...)`."
    )


def first_iterate(
    gradient: Callable[[Tensor, Batch], Tensor], warm: Tensor, probes: Sequence[Batch]
) -> tuple[Tensor, Tensor]:
    """Each row of a warm start, or zero where the gradient is smaller there; and the gradient's norm at zero."""
    zero = torch.zeros_like(warm)
    cold, warmed = (
        torch.stack([gradient(v, batch) for batch in probes]).norm(dim=2).mean(0)[:, None] for v in (zero, warm)
    )
    scale = cold.clamp_min(tiny(cold))
    return torch.where(warmed > scale, zero, warm), scale
