import math

import numpy as np
import pytest
import torch

from laplace_sampling import SGD
from laplace_sampling.arguments import (
    as_numbers,
    check_finite,
    check_flag,
    check_positive,
    check_whole,
    refuse_class,
)
from laplace_sampling.networks.memory import TensorBytes


def test_whole_numbers() -> None:
    for value in (3, np.int64(3)):
        check_whole("`n`", value, 3)
    check_whole("`n`", -100)
    for value in (2, 2.5, 3.0, "3", True, None, math.nan, [3], torch.ones(2)):
        with pytest.raises(ValueError, match="`n`"):
            check_whole("`n`", value, 3)


def test_positive_numbers() -> None:
    for value in (1, 0.5, np.float32(0.5)):
        check_positive("`a`", value, 1)
    for value in (0, -1.0, math.nan, math.inf, 1j, True, "1", None, [1.0], 2):
        with pytest.raises(ValueError, match="`a`"):
            check_positive("`a`", value, 1, ", or so")


def test_flags_and_classes() -> None:
    check_flag("`on`", True)
    for value in (None, 1, "no"):
        with pytest.raises(TypeError, match="`on`"):
            check_flag("`on`", value)
    refuse_class("solver", SGD())
    with pytest.raises(TypeError, match="solver=SGD"):
        refuse_class("solver", SGD)


def test_numbers_in_any_form() -> None:
    for values in ([1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1, 2)):
        assert as_numbers("`w`", values).tolist() == [1, 2]
    assert as_numbers("`w`", 0.1).item() == 0.1  # in float64
    assert as_numbers("`w`", [True], boolean=True).dtype == torch.bool
    for values in ("word", ["a"], None, {"a": 1}, object()):
        with pytest.raises(TypeError, match=r"`w`.*array"):
            as_numbers("`w`", values)
    for values in (1j, torch.ones(2) > 0, torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match=r"torch\."):
            as_numbers("`w`", values)


@pytest.mark.parametrize("shape", [(), (1000,), (3, 1000)])
def test_finite_numbers_are_looked_at_row_by_row(shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape)
    with TensorBytes() as made:
        check_finite("exact", {"mode": values})
    rows = shape[0] if len(shape) == 2 else 1
    assert len(made.sizes) <= 10 * rows
    values.view(-1)[-1] = math.inf
    with pytest.raises(FloatingPointError, match="NaN"):
        check_finite("exact", {"mode": values})
