"""The root of a function of a logarithm, between bounds."""

from collections.abc import Callable
from functools import cache
from typing import cast


def falling_root(
    function: Callable[[float], float], start: float, bounds: tuple[float, float], tolerance: float
) -> tuple[float, bool]:
    """Where a function goes from positive to negative: doubled steps bracket it, Brent's method finds it.

    Args:
        function: positive where its argument is too small.
        start: where to begin, within the bounds.
        bounds: of the argument.
        tolerance: of the argument.

    Returns:
        The root, and whether it is inside the bounds; else the bound that the function points to.
    """
    from scipy.optimize import brentq  # slow to import

    # Both ends of the bracket are known when Brent's method asks for them.
    value = cache(function)
    u, stride = start, 1.0
    while True:
        rising = value(u) > 0
        edge = bounds[1] if rising else bounds[0]
        if u == edge:
            return edge, False
        proposal = min(u + stride, edge) if rising else max(u - stride, edge)
        if (value(proposal) > 0) != rising:
            return cast(float, brentq(value, u, proposal, xtol=tolerance)), True
        u, stride = proposal, 2 * stride
