"""Newton's method for a smooth convex objective."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.operator import Operator, tiny
from laplace_sampling.solvers.solver import Afford, Minimum, Objective, progress_bar, unlimited

# The loosest relative accuracy of a step. For 18 modes of classifiers of 200 weights by conjugate gradients: 1,940
# passes; 2,160 at half of it and 1,840 at twice.
_LOOSEST = 0.2
# Passes of a step besides those of its direction: a value, a gradient, the outputs; and one of the direction.
_STEP_PASSES = 3.0

Point = TypeVar("Point")


def newton(
    objective: Objective,
    init: Float[Tensor, "1 P"],
    direction: Callable[[Operator, Tensor, Tensor, float], tuple[Tensor, float]],
    *,
    tolerance: float,
    max_steps: int = 50,
    max_passes: float = math.inf,
    afford: Afford = unlimited,
    description: str | None = None,
) -> Minimum:
    r"""Minimises by Newton's method, with steps that are halved until the objective goes down.

    It has converged once a step was shorter than `tolerance` times the iterate, the lengths in the norms of `H` (the
    Newton decrement) and of `A`; or once the gradient, or the decrease that a step promises, is below rounding error.
    Convergence is quadratic, so that the error after the last step is smaller still. It ends without having converged
    where no halved step goes down, or where steps or passes run out, and returns the best point with `converged=False`.

    Args:
        objective: to minimise.
        init: where to start.
        direction: computes `H⁻¹g` from the Hessian of the sum over data, the diagonal of `A`, `g`, and the relative
            accuracy that the step needs; returns it with the passes that it took.
        tolerance: relative length of the last step.
        max_steps: largest number of steps.
        max_passes: no step begins after so many passes.
        afford: no step begins either whose gradient and value it does not allow.
        description: label of a progress bar.
    """
    point, accuracy, finished = _Iterate(objective, init), _LOOSEST, False
    for _ in progress_bar(description, range(max_steps)):
        if (finished := point.is_stationary()) or point.passes >= max_passes or not afford(_STEP_PASSES):
            break
        curvature, needed = objective.curvature(point.theta), max(accuracy, tolerance)
        step, passes = direction(curvature, objective.precision, point.gradient, needed)
        point.passes += passes + 0.5  # the outputs at which the curvature is taken are half a pass
        decrement = point.squared_decrement(step)
        moved = point.move(step, decrement)
        relative = point.relative_length(decrement)
        # A decrease below the rounding error of the objective cannot be seen in its values.
        finished = relative <= tolerance or decrement <= 1e-18 * max(1.0, abs(point.value))
        if finished or not moved:
            break
        # A step has about the relative error that was asked of it. Eisenstat and Walker: no more accuracy than the
        # step before shows to be worth it, which keeps convergence superlinear.
        accuracy = min(_LOOSEST, relative)
    return Minimum(point.theta, point.residual, point.passes, finished)


class _Iterate:
    """A point with the value of the objective, its gradient, and the passes spent so far."""

    def __init__(self, objective: Objective, theta: Float[Tensor, "1 P"]) -> None:
        self.objective, self.theta, self.passes = objective, theta, 0.0
        self.value = self._value(theta)
        self.gradient = self._gradient(theta)
        # Residuals are relative to the gradient at zero, wherever the iteration starts.
        at_zero = self._gradient(torch.zeros_like(theta)) if bool(theta.any()) else self.gradient
        self._scale = float(at_zero.norm())

    def _value(self, theta: Tensor) -> float:
        self.passes += 0.5  # a JVP without a VJP
        return self.objective.value(theta)

    def _gradient(self, theta: Tensor) -> Tensor:
        self.passes += 1
        return self.objective.gradient(theta, None)

    @property
    def residual(self) -> float:
        return float(self.gradient.norm()) / max(self._scale, tiny(self.theta))

    def is_stationary(self) -> bool:
        """Whether the gradient is zero up to rounding."""
        return float(self.gradient.norm()) <= 1e-14 * self._scale

    def squared_decrement(self, step: Tensor) -> float:
        """`gᵀH⁻¹g`, twice the decrease of the objective that its quadratic model predicts."""
        return float((step.double() * self.gradient.double()).sum())

    def relative_length(self, squared_decrement: float) -> float:
        norm = float((self.objective.precision * self.theta.double() ** 2).sum())
        return math.sqrt(max(squared_decrement, 0) / max(norm, torch.finfo(torch.float64).tiny))

    def move(self, step: Tensor, squared_decrement: float) -> bool:
        """Goes along `-step` as far as the objective goes down; whether it went at all."""

        def attempt(length: float) -> tuple[Tensor, float] | None:
            proposal = self.theta - length * step
            value = self._value(proposal)
            # Armijo's condition. The last term lets steps pass that change the objective by its rounding error only.
            highest = self.value - 1e-4 * length * squared_decrement + 1e-13 * abs(self.value)
            return (proposal, value) if value <= highest else None

        accepted = halve_until_accepted(attempt)
        self.theta, self.value = accepted or (self.theta, self.value)
        self.gradient = self._gradient(self.theta)
        return accepted is not None


def halve_until_accepted(attempt: Callable[[float], Point | None], shortest: float = 1e-8) -> Point | None:
    """Tries a step at the lengths 1, 1/2, 1/4, … and returns what the first accepted length gives.

    A Newton step of a convex objective points downhill, so that some length lowers the objective; near the minimum
    that is the full step, and the search costs one evaluation.

    Args:
        attempt: takes a length; returns the new point, or `None` where its objective is not low enough.
        shortest: only longer steps are tried; the result is `None` if all of them are refused.
    """
    length = 1.0
    while length > shortest:
        if (accepted := attempt(length)) is not None:
            return accepted
        length /= 2
    return None
