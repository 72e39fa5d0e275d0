"""The ranking of scores."""

import math

import pytest
import torch
from torch.testing import assert_close

from laplace_sampling import Score, compare


def loo(log_probs: torch.Tensor, data: torch.Tensor, size: int = 2000) -> Score:
    return Score.of("loo", log_probs, data, 1.0, size)


def test_differences_are_paired() -> None:
    generator = torch.Generator().manual_seed(0)
    common = 5 * torch.randn(200, generator=generator, dtype=torch.float64)
    change = 0.1 + 0.2 * torch.randn(200, generator=generator, dtype=torch.float64)
    data = torch.arange(200)
    found = compare({"b": loo(common - change, data), "a": loo(common, data)})
    assert found.names == ("a", "b")
    assert_close(found.differences[1], -change.mean())
    assert_close(found.standard_errors[1], change.std() / math.sqrt(200))
    # Seven standard errors apart, though each score is known to 0.35 only.
    assert float(found.probabilities[0]) > 0.999
    assert float(found.standard_errors[1]) < 0.1 * found.scores[0].standard_error


def test_the_probability_is_that_of_a_normal_difference() -> None:
    generator = torch.Generator().manual_seed(1)
    change = torch.randn(2000, generator=generator, dtype=torch.float64)
    error = float(change.std()) / math.sqrt(2000)
    change = change - change.mean() + error  # one standard error apart
    data = torch.arange(2000)
    found = compare({"a": loo(change, data), "b": loo(torch.zeros(2000).double(), data)})
    assert float(found.probabilities[0]) == pytest.approx(0.8413, abs=0.02)
    assert float(found.probabilities.sum()) == pytest.approx(1)


def test_data_in_common_are_compared_whatever_their_order() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    a, b = loo(values, torch.tensor([7, 3, 5, 1])), loo(torch.tensor([4.0, 3.0, 2.5]).double(), torch.tensor([1, 5, 3]))
    found = compare({"a": a, "b": b})
    # Of 1, 3 and 5: `a` has 4, 2 and 3, `b` has 4, 2.5 and 3.
    assert found.names == ("b", "a")
    assert float(found.differences[1]) == pytest.approx(-0.5 / 3)
    with pytest.raises(ValueError, match="num_data"):
        compare({"a": a, "b": loo(values, torch.tensor([0, 2, 4, 6]))})


def test_probabilities_of_evidences_are_those_of_the_models() -> None:
    nothing = torch.zeros(0)

    def evidence(value: float, error: float, num: int = 10) -> Score:
        return Score("evidence", value, error, num, nothing, nothing.long(), 1.0, num)

    found = compare({"a": evidence(-1.0, 0.0), "b": evidence(-1.1, 0.0)})
    assert float(found.probabilities[0]) == pytest.approx(1 / (1 + math.exp(-1)))
    assert found.standard_errors.tolist() == [0.0, 0.0]
    # Errors of the probes take certainty away.
    blurred = compare({"a": evidence(-1.0, 0.3), "b": evidence(-1.1, 0.4)})
    assert float(blurred.standard_errors[1]) == pytest.approx(0.5)
    assert float(blurred.probabilities[0]) < float(found.probabilities[0])
    with pytest.raises(ValueError, match="'a': 10"):
        compare({"a": evidence(-1.0, 0.0), "b": evidence(-1.1, 0.0, 12)})
