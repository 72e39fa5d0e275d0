"""Bounds within which prior and noise precisions are kept."""

__all__ = ["check_bounds", "clamped", "is_at_bound"]

Bounds = tuple[float, float]


def check_bounds(precision_bounds: Bounds, noise_bounds: Bounds) -> None:
    """Raises if bounds are not positive and in order."""
    for name, (low, high) in (("precision_bounds", precision_bounds), ("noise_bounds", noise_bounds)):
        if not 0 < low < high:
            raise ValueError(f"`{name}` must be positive and in order, but is {(low, high)}.")


def clamped(value: float, bounds: Bounds) -> float:
    """The value, or the bound that it exceeds."""
    low, high = bounds
    return min(max(value, low), high)


def is_at_bound(value: float, bounds: Bounds) -> bool:
    """Whether a value is one of the bounds themselves, as `clamped` returns them."""
    return value in bounds
