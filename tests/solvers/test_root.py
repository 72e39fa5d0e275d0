"""The root of a falling function, between bounds."""

import math

import pytest

from laplace_sampling.solvers.root import falling_root


@pytest.mark.parametrize("start", [-8.0, 0.5, 9.0])
@pytest.mark.parametrize("root", [-7.5, 0.3, 8.9])
def test_a_root_between_the_bounds(start: float, root: float) -> None:
    # Nearly flat on one side, where regula falsi without a remedy takes thousands of steps.
    calls = []

    def function(u: float) -> float:
        calls.append(u)
        return 1 - math.exp(2 * (u - root))

    found, inside = falling_root(function, start, (-8.0, 9.0), 1e-6)
    assert inside
    assert found == pytest.approx(root, abs=1e-6)
    assert len(calls) <= 40
    assert all(-8.0 <= u <= 9.0 for u in calls)


@pytest.mark.parametrize(("value", "bound"), [(1.0, 9.0), (-1.0, -8.0)])
def test_a_function_without_a_root_ends_at_the_bound_it_points_to(value: float, bound: float) -> None:
    assert falling_root(lambda u: value, 0.5, (-8.0, 9.0), 1e-6) == (bound, False)
