"""Checks of the arguments that users give: one sentence for each kind of value, the same everywhere.

`what` is the argument as the message names it, for instance "`SGD(batch_size=...)`".
"""

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_whole(what: str, value: Any, least: int | None = None) -> None:
    """Raise unless a value is a whole number, and not below the least."""
    # `True` is the number 1 for Python, but nobody means it.
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and (least is None or int(value) >= least):
        return
    kind = "whole number" if least is None else f"whole number of at least {least}"
    raise ValueError(f"{what} must be a {kind}, but is {value!r:.80}.")


def check_positive(what: str, value: Any, most: float = math.inf, also: str = "") -> None:
    """Raise unless a value is a finite number above 0, and not above the most.

    Args:
        what: the argument.
        value: of it.
        most: the largest value that is allowed.
        also: what else may be given, as the message says it.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if real and 0 < float(value) < math.inf and float(value) <= most:
        return
    limit = "" if most == math.inf else f", and at most {most:g}"
    raise ValueError(f"{what} must be positive and finite{limit}{also}, but is {value!r:.80}.")


def check_flag(what: str, value: Any) -> None:
    """Raise unless a value is True or False: a word would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, but is {value!r:.80}.")


def refuse_class(what: str, value: Any) -> None:
    """Raise if a class is given in place of an object of it."""
    if isinstance(value, type):
        raise TypeError(f"`{what}={value.__name__}` is a class; give an object, as `{what}={value.__name__}(...)`.")


def as_numbers(what: str, values: Any, *, boolean: bool = False) -> Tensor:
    """Numbers that are given as a tensor, an array or a list, as a tensor without a graph.

    Args:
        what: the argument.
        values: of it.
        boolean: whether True and False are numbers, too.

    Raises:
        TypeError: for anything else, and for complex numbers and tensors without numbers.
    """
    try:
        numbers = torch.as_tensor(values).detach()
        if isinstance(values, float | list | tuple) and numbers.is_floating_point():
            # Numbers of python are in float64.
            numbers = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} must be numbers, as a tensor, an array or a list, but is {values!r:.80}.") from error
    if numbers.is_complex() or numbers.is_meta or (numbers.dtype == torch.bool and not boolean):
        where = " on the device 'meta', which holds no numbers" if numbers.is_meta else ""
        raise TypeError(f"{what} must be real numbers, but is a tensor in {numbers.dtype}{where}.")
    return numbers


def check_finite(method: str, quantities: dict[str, Tensor]) -> None:
    """Raise a `FloatingPointError` if what a fit by a method ended with is not finite."""
    # Row by row: a mask of all samples would take a quarter of their memory. A vector is one row: number by number the
    # mode of 3.4 million weights took 30 s.
    wrong = [
        name for name, value in quantities.items() if not all(bool(v.isfinite().all()) for v in torch.atleast_2d(value))
    ]
    if wrong:
        raise FloatingPointError(
            f'The fit by method="{method}" ended with NaN or infinity in the {" and the ".join(wrong)}, '
            "so that nothing of it is kept: check the weights of the model and the data for extreme values, or use "
            "`model.double()`."
        )
