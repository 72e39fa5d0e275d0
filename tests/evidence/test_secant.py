import math

import pytest

from laplace_sampling.evidence.secant import Secant


def test_the_secant_goes_to_the_end_of_a_line() -> None:
    secant, x, end = Secant(moving=True), math.log(3.0), math.log(0.5)
    for _ in range(3):
        following = secant.next(math.exp(end + 0.6 * (x - end)), math.exp(x), 1e-6, 12)
        x = math.log(following)
    assert secant.rate == pytest.approx(0.6, abs=1e-3)
    assert x == pytest.approx(end, abs=1e-3)
    still = Secant(moving=False)
    assert still.next(0.5, 3.0, 0.1, 12) == pytest.approx(3.0 / 4)  # as far as the curves are trusted
    assert still.next(0.5, 0.75, 0.1, 12) == pytest.approx(0.5)
