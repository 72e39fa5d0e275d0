"""Bounds within which prior and noise precisions are kept."""

from collections.abc import Sequence
from numbers import Real

__all__ = ["check_bounds", "clamped", "is_at_bound"]

Bounds = tuple[float, float]


def check_bounds(precision_bounds: Bounds, noise_bounds: Bounds) -> None:
    """Raises if bounds are not positive and in order."""
    for name, bounds in (("precision_bounds", precision_bounds), ("noise_bounds", noise_bounds)):
        pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(isinstance(bound, Real) for bound in bounds)
        if not pair:
            raise TypeError(f"`{name}` must be two numbers, (low, high), but is {bounds!r:.80}.")
        if not 0 < bounds[0] < bounds[1]:
            raise ValueError(f"`{name}` must be positive and in order, but is {tuple(bounds)}.")


def clamped(value: float, bounds: Bounds) -> float:
    """The value, or the bound that it exceeds."""
    low, high = bounds
    return min(max(value, low), high)


def is_at_bound(value: float, bounds: Bounds) -> bool:
    """Whether a value is one of the bounds themselves, as `clamped` returns them."""
    return value in bounds
