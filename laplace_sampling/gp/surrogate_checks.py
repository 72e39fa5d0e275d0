"""Checks of what a `TangentSurrogate` is given."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from laplace_sampling.solvers.checks import check_positive

__all__ = ["check_inputs", "check_settings", "check_training_data"]


def check_training_data(train_X: Any, train_Y: Any) -> None:
    """Raise unless these are rows of inputs and as many rows of outputs, all finite."""
    _check_tensors(train_X=train_X, train_Y=train_Y)
    if train_X.dim() != 2 or not train_X.numel():
        raise ValueError(
            f"`train_X` must have shape [N, D] with N and D of at least 1, but has {list(train_X.shape)}; an input "
            "that is no row is given flat, with its `input_shape`."
        )
    if train_Y.dim() != 2 or len(train_Y) != len(train_X) or not train_Y.numel():
        raise ValueError(f"`train_Y` must have shape [N, C] with N = {len(train_X)}, but has {list(train_Y.shape)}.")
    for name, data in (("train_X", train_X), ("train_Y", train_Y)):
        if not bool(data.isfinite().all()):
            rows = (~data.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
            raise ValueError(f"`{name}` contains NaN or infinity, in rows {rows[:5]}: leave these data out.")


def check_settings(width: int, size: int, scale: Any, input_shape: Any, **precisions: float | None) -> None:
    """Raise unless precisions are positive, and scale and shape are of the network.

    Args:
        width: `D`, numbers of a row.
        size: `P`, weights of the network.
        scale: prior standard deviations of these.
        input_shape: of one input.
        precisions: by name; `None` if they are to be learnt.
    """
    for name, value in precisions.items():
        if value is not None:
            check_positive(f"`{name}`", value, also=", or None to be learnt")
    if scale is not None and (not isinstance(scale, Tensor) or scale.shape != (size,)):
        given = f"has shape {list(scale.shape)}" if isinstance(scale, Tensor) else f"is {scale!r:.80}"
        raise ValueError(f"`scale` must be a tensor of one entry a weight, [{size}], but {given}.")
    if input_shape is not None:
        whole = isinstance(input_shape, Sequence) and all(isinstance(length, int) for length in input_shape)
        if not whole or math.prod(input_shape) != width:
            raise ValueError(f"`input_shape` must be whole numbers whose product is {width}, but is {input_shape!r}.")


def check_inputs(call: str, X: Any, width: int) -> None:
    """Raise unless inputs are `[..., Q, D]`; those that are not finite show when a covariance is factorised."""
    _check_tensors(**{f"{call}(X)": X})
    if X.dim() < 2 or X.shape[-1] != width or not X.numel():
        raise ValueError(f"`{call}(X)` needs X of shape [..., Q, D] with D = {width}, but got {list(X.shape)}.")


def _check_tensors(**tensors: Any) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_complex():
            kind = "complex tensor" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`{name}` must be a tensor of real numbers, but is a {kind}.")
