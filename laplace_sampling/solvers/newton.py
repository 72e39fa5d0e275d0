"""Newton's method for a smooth convex objective."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.solvers.operator import Operator, tiny
from laplace_sampling.solvers.solver import Minimum, Objective

__all__ = ["newton"]


def newton(
    objective: Objective,
    init: Float[Tensor, "1 P"],
    direction: Callable[[Operator, Tensor, Tensor, float], tuple[Tensor, float]],
    *,
    tolerance: float,
    max_steps: int = 50,
    description: str | None = None,
) -> Minimum:
    r"""Newton's method, steps halved until the objective goes down.

    It ends with the step whose length in the norm of `H` (the Newton decrement) is below `tolerance` times the norm of
    the iterate in that of `A`: the error that this step leaves is smaller still.

    Args:
        objective: to minimise.
        init: where to start.
        direction: `H⁻¹g` from the Hessian of the sum over data, the diagonal of `A`, `g`, and the relative accuracy
            that it needs; with the passes that it took.
        tolerance: see above.
        max_steps: at most so many.
        description: label of a progress bar.
    """
    theta, value, passes = init, objective.value(init), 0.5
    gradient, finished = objective.gradient(theta, None), False
    zero = not bool(theta.any())
    start = float((gradient if zero else objective.gradient(torch.zeros_like(theta), None)).norm())
    passes += 1 if zero else 2
    needed = 0.2
    for _ in tqdm(range(max_steps), desc=description, disable=description is None, leave=False):
        if float(gradient.norm()) <= 1e-14 * start:
            finished = True
            break
        step, spent = direction(objective.curvature(theta), objective.precision, gradient, max(needed, tolerance))
        passes += spent + 0.5
        decrease = float((step.double() * gradient.double()).sum())  # the squared Newton decrement
        length, moved = 1.0, False
        while length > 1e-8 and not moved:
            proposal = theta - length * step
            candidate = objective.value(proposal)
            passes += 0.5
            if moved := candidate <= value - 1e-4 * length * decrease + 1e-13 * abs(value):
                theta, value = proposal, candidate
            else:
                length /= 2
        gradient = objective.gradient(theta, None)
        passes += 1
        norm = float((objective.precision * theta.double() ** 2).sum())
        relative = math.sqrt(max(decrease, 0) / max(norm, torch.finfo(torch.float64).tiny))
        # Half a unit of rounding of the objective is as far down as its values tell.
        finished = relative <= tolerance or decrease <= 1e-18 * max(1.0, abs(value))
        if finished or not moved:
            break
        needed = min(0.2, relative)
    return Minimum(theta, float(gradient.norm()) / max(start, tiny(theta)), passes, finished)
