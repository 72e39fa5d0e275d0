"""The root of a function of a logarithm, between bounds."""

from collections.abc import Callable

__all__ = ["falling_root"]

# Steps of regula falsi at most: a guard, for Illinois' variant takes some ten from a bracket of one.
_MAX_STEPS = 200


def falling_root(
    function: Callable[[float], float], start: float, bounds: tuple[float, float], tolerance: float
) -> tuple[float, bool]:
    """Where a function goes from positive to negative: doubled steps bracket it, regula falsi (Illinois) finds it.

    Args:
        function: positive where its argument is too small.
        start: where to begin, within the bounds.
        bounds: of the argument.
        tolerance: of the argument.

    Returns:
        The root, and whether it is inside the bounds; else the bound that the function points to.
    """
    u, value, stride = start, function(start), 1.0
    while True:
        edge = bounds[1] if value > 0 else bounds[0]
        if u == edge:
            return edge, False
        proposal = min(u + stride, edge) if value > 0 else max(u - stride, edge)
        proposal_value = function(proposal)
        if (proposal_value > 0) != (value > 0):
            break
        u, value, stride = proposal, proposal_value, 2 * stride
    (low, f_low), (high, f_high) = sorted([(u, value), (proposal, proposal_value)])
    return _regula_falsi(function, low, f_low, high, f_high, tolerance), True


def _regula_falsi(
    function: Callable[[float], float], low: float, f_low: float, high: float, f_high: float, tolerance: float
) -> float:
    """The root in a bracket of which both function values are known."""
    side = 0
    for _ in range(_MAX_STEPS):
        if high - low <= tolerance or f_low == 0 or f_high == 0:
            break
        middle = (low * f_high - high * f_low) / (f_high - f_low)
        # Both ends are to come close: a step of the tolerance beyond the root closes the bracket.
        middle = min(max(middle, low + 0.5 * tolerance), high - 0.5 * tolerance)
        value = function(middle)
        if abs(value) <= 1e-14:
            return middle
        # An end that stays twice has its value halved; else it would stay for ever (Illinois).
        if value > 0:
            low, f_low = middle, value
            f_high = f_high / 2 if side == 1 else f_high
            side = 1
        else:
            high, f_high = middle, value
            f_low = f_low / 2 if side == -1 else f_low
            side = -1
    if f_low == 0 or f_high == 0:
        return low if f_low == 0 else high
    return (low + high) / 2
