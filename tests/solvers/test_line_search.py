import pytest

from laplace_sampling.solvers.line_search import halve_until_accepted


def test_the_first_accepted_length_is_taken() -> None:
    tried = []

    def attempt(length: float) -> str | None:
        tried.append(length)
        return f"at {length}" if length <= 0.25 else None

    assert halve_until_accepted(attempt) == "at 0.25"
    assert tried == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(("shortest", "number"), [(0.3, 2), (0.25, 2), (1e-8, 27)])
def test_steps_that_are_all_refused_give_nothing(shortest: float, number: int) -> None:
    tried = []
    assert halve_until_accepted(tried.append, shortest) is None
    assert len(tried) == number
