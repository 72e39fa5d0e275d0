import pytest

from laplace_sampling.evidence.bounds import check_bounds, clamped, is_at_bound


def test_values_outside_are_brought_to_the_bound() -> None:
    assert [clamped(v, (1.0, 2.0)) for v in (0.5, 1.5, 3.0)] == [1.0, 1.5, 2.0]
    assert [is_at_bound(v, (1.0, 2.0)) for v in (1.0, 1.5, 2.0)] == [True, False, True]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (-1.0, 1.0)])
def test_bounds_out_of_order_are_refused(bounds: tuple[float, float]) -> None:
    check_bounds((1.0, 2.0), (1.0, 2.0))
    with pytest.raises(ValueError, match="`precision_bounds` must be positive and in order"):
        check_bounds(bounds, (1.0, 2.0))
    with pytest.raises(ValueError, match="`noise_bounds` must be positive and in order"):
        check_bounds((1.0, 2.0), bounds)


@pytest.mark.parametrize("bounds", [3.0, (1.0, 2.0, 3.0), ("a", "b"), None])
def test_bounds_are_two_numbers(bounds) -> None:
    with pytest.raises(TypeError, match=r"`precision_bounds` must be two numbers, \(low, high\), but is"):
        check_bounds(bounds, (1.0, 2.0))
