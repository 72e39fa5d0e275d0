"""Forward derivatives of normalisations, as `torch.export` gives them.

Each operation returns a mean and a scale as well, which nothing in a network takes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from laplace_sampling.export.dual import Dual, aligned, broadcast, parts_of, total, value_of


def _normalised(x: Any, axes: list[int], eps: float) -> tuple[Tensor, Tensor | None]:
    """`(x − mean)/√(var + eps)` over some axes, counted from the end, and its tangents."""
    x, x_dot = parts_of(x)
    centred = x - x.mean(axes, keepdim=True)
    scale = (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    value = centred * scale
    if x_dot is None:
        return value, None
    x_dot = x_dot - x_dot.mean(axes, keepdim=True)
    return value, scale * (x_dot - value * (value * x_dot).mean(axes, keepdim=True))


def _scaled(value: Tensor, tangents: Tensor | None, weight: Any, bias: Any, axes: tuple[int, ...]) -> Dual:
    """`w x + b`, with weights that are reshaped to the axes `[-1, 1, ...]` of channels, or to their own."""
    terms = []
    (weight, weight_dot), (bias, bias_dot) = parts_of(weight), parts_of(bias)
    if tangents is not None:
        terms.append(tangents if weight is None else tangents * weight.reshape(axes))
    if weight_dot is not None:
        terms.append(value * aligned(weight_dot.reshape(len(weight_dot), *axes), value.dim()))
    if bias_dot is not None:
        terms.append(broadcast(bias_dot.reshape(len(bias_dot), *axes), value))
    value = value if weight is None else value * weight.reshape(axes)
    return Dual(value if bias is None else value + bias.reshape(axes), total(terms))


def layer_norm(
    func: Callable, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Dual, None, None]:
    axes = range(-len(shape), 0)
    return _scaled(*_normalised(x, list(axes), eps), weight, bias, tuple(shape)), None, None


def group_norm(
    func: Callable, x: Any, weight: Any, bias: Any, N: int, C: int, size: int, groups: int, eps: float
) -> tuple[Dual, None, None]:
    value, tangents = parts_of(x)
    shape, grouped = value.shape, (N, groups, C * size // groups)
    of_value = value.reshape(grouped)
    x = of_value if tangents is None else Dual(of_value, tangents.reshape(len(tangents), *grouped))
    value, tangents = _normalised(x, [-1], eps)
    tangents = None if tangents is None else tangents.reshape(len(tangents), *shape)
    return _scaled(value.reshape(shape), tangents, weight, bias, (-1, *[1] * (len(shape) - 2))), None, None


def instance_norm(
    func: Callable, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Dual, None, None]:
    """Batch normalisation by the statistics of the batch: instances come as `[1, N·C, ...]`."""
    rank = value_of(x).dim()
    axes = [axis for axis in range(-rank, 0) if axis != 1 - rank]
    return _scaled(*_normalised(x, axes, eps), weight, bias, (-1, *[1] * (rank - 2))), None, None


def batch_norm(
    func: Callable, x: Any, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Dual, None, None]:
    """With fixed statistics: linear in its input."""
    value, tangents = parts_of(x)
    axes = (-1, *[1] * (value.dim() - 2))
    scale = (var + eps).rsqrt().reshape(axes)
    value, tangents = (value - mean.reshape(axes)) * scale, None if tangents is None else tangents * scale
    return _scaled(value, tangents, weight, bias, axes), None, None
