"""Line search by halving the step."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def halve_until_accepted(attempt: Callable[[float], T | None], shortest: float = 1e-8) -> T | None:
    """Tries a step at the lengths 1, 1/2, 1/4, … and returns what the first accepted length gives.

    A Newton step of a convex objective points downhill, so that some length lowers the objective; near the minimum
    that is the full step, and the search costs one evaluation.

    Args:
        attempt: takes a length; returns the new point, or `None` where its objective is not low enough.
        shortest: only longer steps are tried; the result is `None` if all of them are refused.
    """
    length = 1.0
    while length > shortest:
        accepted = attempt(length)
        if accepted is not None:
            return accepted
        length /= 2
    return None
