"""Rules of tangents: what an operation does to a tensor and `K` tangents of it, all at once.

They are for exported networks, whose operations are those of `aten` (`export.program`): plain operations, which
`torch.export` traces. torch's own forward mode (`torch.func.jvp`) fixes the size of the batch when it is traced, and
`vmap` does for convolutions and pooling (torch 2.15).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_any, tree_map

aten = torch.ops.aten


@dataclass(frozen=True)
class Dual:
    """A tensor and `K` tangents of it."""

    value: Tensor
    tangents: Float[Tensor, "K ..."]


def is_dual(x: Any) -> bool:
    return isinstance(x, Dual)


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Dual) else x


def parts_of(x: Any) -> tuple[Any, Tensor | None]:
    return (x.value, x.tangents) if isinstance(x, Dual) else (x, None)


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of one term or more."""
    return reduce(torch.add, terms)


def aligned(tangents: Float[Tensor, "K ..."], rank: int) -> Tensor:
    """Tangents of a tensor that is broadcast to so many axes."""
    return tangents.reshape(len(tangents), *[1] * (rank + 1 - tangents.dim()), *tangents.shape[1:])


def broadcast(tangents: Float[Tensor, "K ..."], like: Tensor) -> Tensor:
    return aligned(tangents, like.dim()).expand(len(tangents), *like.shape)


def pushed(func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, with tangents where its arguments have some and it has a derivative.

    Raises:
        NotImplementedError: for an operation without a rule.
    """
    # Items of tuples and arithmetic of sizes are functions of Python.
    if not isinstance(func, OpOverload) or not tree_any(is_dual, (args, kwargs)):
        return func(*args, **kwargs)
    if (rule := _RULES.get(func)) is not None:
        return rule(func, *args, **kwargs)
    plain = func(*tree_map(value_of, tuple(args)), **tree_map(value_of, kwargs))
    whole = isinstance(plain, Tensor) and not plain.is_floating_point() and not plain.is_complex()
    if func in _CONSTANT or whole:
        return plain
    raise NotImplementedError(f"`{func}` has no rule for forward derivatives")


# Linear in one tensor -------------------------------------------------------------------------------------------------


def _same(func: Callable, x: Dual, *args: Any, **kwargs: Any) -> Dual:
    """Number by number, with the same arguments."""
    return Dual(func(x.value, *args, **kwargs), func(x.tangents, *args, **kwargs))


def _copy(func: Callable, x: Dual, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Dual:
    """Copies; of the layout in memory nothing depends."""
    return Dual(x.value if dtype is None else x.value.to(dtype), x.tangents if dtype is None else x.tangents.to(dtype))


def _view(func: Callable, x: Dual, shape: Sequence[int]) -> Dual:
    return Dual(x.value.reshape(shape), x.tangents.reshape(len(x.tangents), *shape))


def _expand(func: Callable, x: Dual, shape: Sequence[int], **kwargs: Any) -> Dual:
    return Dual(x.value.expand(shape), aligned(x.tangents, len(shape)).expand(len(x.tangents), *shape))


def _repeat(func: Callable, x: Dual, times: Sequence[int]) -> Dual:
    return Dual(x.value.repeat(times), aligned(x.tangents, len(times)).repeat(1, *times))


def _permute(func: Callable, x: Dual, axes: Sequence[int]) -> Dual:
    return Dual(x.value.permute(*axes), x.tangents.permute(0, *(axis % len(axes) + 1 for axis in axes)))


def _unsqueeze(func: Callable, x: Dual, axis: int) -> Dual:
    return Dual(x.value.unsqueeze(axis), x.tangents.unsqueeze(axis % (x.value.dim() + 1) + 1))


def _of_axes(func: Callable, x: Dual, axes: Any = 0, *args: Any, **kwargs: Any) -> Dual:
    """A function of a tensor and some of its axes, which are the next ones of its tangents."""
    rank = x.value.dim()
    # No axes are all.
    shifted = axes % rank + 1 if isinstance(axes, int) else [axis % rank + 1 for axis in axes or range(rank)]
    return Dual(func(x.value, axes, *args, **kwargs), func(x.tangents, shifted, *args, **kwargs))


def _split(func: Callable, x: Dual, sizes: Sequence[int], axis: int = 0) -> list[Dual]:
    parts = x.value.split_with_sizes(sizes, axis), x.tangents.split_with_sizes(sizes, axis % x.value.dim() + 1)
    return [Dual(*part) for part in zip(*parts, strict=True)]


def _cat(func: Callable, tensors: Sequence[Any], axis: int = 0) -> Dual:
    num = next(len(x.tangents) for x in tensors if isinstance(x, Dual))
    pairs = [(x.value, x.tangents) if isinstance(x, Dual) else (x, _zeros(x, num)) for x in tensors]
    values, tangents = zip(*pairs, strict=True)
    return Dual(torch.cat(values, axis), torch.cat(tangents, axis % values[0].dim() + 1))


def _zeros(x: Tensor, num: int) -> Tensor:
    return torch.zeros_like(x).expand(num, *x.shape)


def _pad(func: Callable, x: Dual, pad: Sequence[int], value: float = 0.0) -> Dual:
    return Dual(func(x.value, pad, value), func(x.tangents, pad, 0.0))


def _index(func: Callable, x: Any, indices: Sequence[Tensor | None]) -> Dual:
    places = [n for n, index in enumerate(indices) if index is not None]
    if not isinstance(x, Dual) or places != list(range(places[0], places[-1] + 1)):
        raise NotImplementedError(
            f"`{func}` of several axes that are no neighbours has no rule for forward derivatives"
        )
    return Dual(func(x.value, indices), func(x.tangents, [None, *indices]))


def _embedding(func: Callable, weight: Dual, index: Tensor, padding: int = -1, *args: Any) -> Dual:
    tangents = aten.index.Tensor(weight.tangents, [None, index])
    # As in `derivatives`: the row of padding is a constant.
    tangents = tangents if padding < 0 else tangents * (index != padding)[..., None]
    return Dual(func(weight.value, index, padding, *args), tangents)


def _of_images(func: Callable, x: Dual, *args: Any, **kwargs: Any) -> Dual:
    """Linear maps of each image, `[N, C, H, W]`: tangents are more images."""
    tangents = func(x.tangents.flatten(0, 1), *args, **kwargs)
    return Dual(func(x.value, *args, **kwargs), tangents.unflatten(0, x.tangents.shape[:2]))


# Of several tensors ---------------------------------------------------------------------------------------------------


def _add(func: Callable, a: Any, b: Any, *, alpha: float = 1) -> Dual:
    (a, a_dot), (b, b_dot) = parts_of(a), parts_of(b)
    value, sign = func(a, b, alpha=alpha), -alpha if func in (aten.sub.Tensor, aten.sub.Scalar) else alpha
    terms = [broadcast(t, value) for t in (a_dot, None if b_dot is None else b_dot * sign) if t is not None]
    return Dual(value, total(terms))


def _product(times: Callable[[Any, Any], Tensor]) -> Callable[..., Dual]:
    """The rule of a function that is linear in either of two tensors, and takes tensors with more axes in front."""

    def rule(func: Callable, a: Any, b: Any) -> Dual:
        (a, a_dot), (b, b_dot) = parts_of(a), parts_of(b)
        value, terms = times(a, b), []
        if a_dot is not None:
            terms.append(times(aligned(a_dot, value.dim()), b))
        if b_dot is not None:
            terms.append(times(a, aligned(b_dot, value.dim())))
        return Dual(value, total(terms))

    return rule


_matmul = _product(torch.matmul)


def _addmm(func: Callable, bias: Any, a: Any, b: Any) -> Dual:
    (bias, bias_dot), value = parts_of(bias), func(value_of(bias), value_of(a), value_of(b))
    terms = [] if bias_dot is None else [broadcast(bias_dot, value)]
    if isinstance(a, Dual) or isinstance(b, Dual):
        terms.append(_matmul(torch.mm, a, b).tangents)
    return Dual(value, total(terms))


def _divide(func: Callable, a: Any, b: Any) -> Dual:
    (a, a_dot), (b, b_dot) = parts_of(a), parts_of(b)
    value, terms = func(a, b), []
    if a_dot is not None:
        terms.append(aligned(a_dot, value.dim()) / b)
    if b_dot is not None:
        terms.append(-value / b * aligned(b_dot, value.dim()))
    return Dual(value, total(terms))


def _where(func: Callable, condition: Tensor, a: Any, b: Any) -> Dual:
    (a, a_dot), (b, b_dot) = parts_of(a), parts_of(b)
    value, zero = func(condition, a, b), a.new_zeros(())
    parts = [zero if t is None else aligned(t, value.dim()) for t in (a_dot, b_dot)]
    tangents = torch.where(condition, *parts)
    return Dual(value, tangents.expand(len(tangents), *value.shape))


def _extreme(func: Callable, a: Any, b: Any) -> Dual:
    first = value_of(a) > value_of(b) if func is aten.maximum.default else value_of(a) < value_of(b)
    return _where(torch.where, first, a, b)


def _convolution(func: Callable, x: Any, weight: Any, bias: Any, *options: Any) -> Dual:
    """Tangents of the kernels are more output channels, those of the inputs more data."""
    (x, x_dot), (weight, weight_dot), (bias, bias_dot) = map(parts_of, (x, weight, bias))
    *_, transposed, _, groups = options
    value, terms = func(x, weight, bias, *options), []
    if weight_dot is not None:
        num, channels = len(weight_dot), value.shape[1] // groups
        # In memory the channels of a group are neighbours; a transposed kernel has them on axis 1.
        kernels = (
            weight_dot.transpose(0, 1).flatten(1, 2)
            if transposed
            else (weight_dot.unflatten(1, (groups, channels)).transpose(0, 1).flatten(0, 2))
        )
        shift = None if bias_dot is None else bias_dot.unflatten(1, (groups, channels)).transpose(0, 1).flatten()
        stacked = func(x, kernels, shift, *options).unflatten(1, (groups, num, channels))
        terms.append(stacked.movedim(2, 0).flatten(2, 3))
    elif bias_dot is not None:
        terms.append(broadcast(bias_dot.reshape(*bias_dot.shape, *[1] * (value.dim() - 2)), value))
    if x_dot is not None:
        terms.append(func(x_dot.flatten(0, 1), weight, None, *options).unflatten(0, x_dot.shape[:2]))
    return Dual(value, total(terms))


# Nonlinear ------------------------------------------------------------------------------------------------------------


def _elementwise(slope: Callable[..., Tensor]) -> Callable[..., Dual]:
    """The rule of a function of each number by its derivative, of the number, the value and other arguments."""

    def rule(func: Callable, x: Dual, *args: Any, **kwargs: Any) -> Dual:
        value = func(x.value, *args, **kwargs)
        return Dual(value, x.tangents * slope(x.value, value, *args, **kwargs))

    return rule


def _between(x: Tensor, y: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool) if low is None else x >= low
    return inside if high is None else inside & (x <= high)


def _elu_slope(x: Tensor, y: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    below = scale * alpha * input_scale * (x.clamp(max=0) * input_scale).exp()
    return torch.where(x > 0, scale, below)


def _gelu_slope(x: Tensor, y: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    inner, inner_slope = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3), math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2)
    tanh = inner.tanh()
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner_slope


def _softmax(func: Callable, x: Dual, axis: int, *args: Any) -> Dual:
    value, axis = func(x.value, axis, *args), axis % x.value.dim()
    if func is aten._softmax.default:
        return Dual(value, value * (x.tangents - (value * x.tangents).sum(axis + 1, keepdim=True)))
    return Dual(value, x.tangents - (value.exp() * x.tangents).sum(axis + 1, keepdim=True))


def _variance(
    func: Callable, x: Dual, axes: Sequence[int] | None = None, *, correction: float = 1, keepdim: bool = False
) -> Dual:
    axes = [axis % x.value.dim() for axis in (axes or range(x.value.dim()))]
    centred = x.value - x.value.mean(axes, keepdim=True)
    num = math.prod(x.value.shape[axis] for axis in axes) - correction
    slope = 2 * (centred * x.tangents).sum([axis + 1 for axis in axes], keepdim=keepdim) / num
    return Dual(centred.square().sum(axes, keepdim=keepdim) / num, slope)


def _largest(func: Callable, x: Dual, axis: Any, keepdim: bool = False) -> Any:
    axes = [axis] if isinstance(axis, int) else axis
    if len(axes) != 1:
        raise NotImplementedError(f"`{func}` of several axes has no rule for forward derivatives")
    axis = axes[0] % x.value.dim()
    value, place = x.value.max(axis, keepdim=True)
    tangents = x.tangents.gather(axis + 1, place.expand(len(x.tangents), *place.shape))
    if not keepdim:
        value, place, tangents = value.squeeze(axis), place.squeeze(axis), tangents.squeeze(axis + 1)
    return (Dual(value, tangents), place) if func is aten.max.dim else Dual(value, tangents)


def _max_pool(func: Callable, x: Dual, *args: Any, **kwargs: Any) -> tuple[Dual, Tensor]:
    """The tangents at the places of the maxima."""
    value, places = func(x.value, *args, **kwargs)
    tangents = x.tangents.flatten(3).gather(3, places.flatten(2).expand(len(x.tangents), *places.shape[:2], -1))
    return Dual(value, tangents.unflatten(3, places.shape[2:])), places


# Normalisation --------------------------------------------------------------------------------------------------------


class BatchNormCall(NamedTuple):
    """The arguments of `F.batch_norm`."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _batch_norm(
    func: Callable, x: Any, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Dual, None, None]:
    """By fixed statistics; the operation returns a mean and a scale as well, which nothing in a network takes."""
    (x, x_dot), (weight, weight_dot), (bias, bias_dot) = map(parts_of, (x, weight, bias))
    value = func(x, weight, bias, mean, var, momentum, eps)[0]
    return Dual(value, batch_norm_tangents(x, mean, var, weight, eps, x_dot, weight_dot, bias_dot)), None, None


def batch_norm_tangents(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    eps: float,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
) -> Float[Tensor, "K ..."]:
    """`ẋ γ/σ + (x - μ) γ̇/σ + β̇` of a normalisation with fixed statistics, in three passes over the data."""
    # They are computed in float32 at least, as torch computes the value.
    scale = (var.to(torch.promote_types(x.dtype, torch.float32)) + eps).rsqrt()
    axes, tangents = (-1, *[1] * (x.dim() - 2)), None
    # Terms are added in place, to keep the number of passes over the data small.
    if x_dot is not None:
        tangents = x_dot * (scale if weight is None else scale * weight).reshape(axes)
    if weight_dot is not None:
        slope = weight_dot * scale
        bias_dot = -mean * slope if bias_dot is None else bias_dot - mean * slope
        slope = slope.reshape(len(slope), 1, *axes)
        tangents = x * slope if tangents is None else torch.addcmul(tangents, x, slope)
    if bias_dot is not None:
        shift = bias_dot.reshape(len(bias_dot), 1, *axes)
        tangents = shift.expand(-1, *x.shape) if tangents is None else tangents.add_(shift)
    assert tangents is not None
    return tangents


# Tables ---------------------------------------------------------------------------------------------------------------

_SLOPES: dict[Any, Callable[..., Tensor]] = {
    aten.relu.default: lambda x, y: x > 0,
    aten.leaky_relu.default: lambda x, y, slope=0.01: torch.where(x > 0, torch.ones_like(x), slope),
    aten.elu.default: _elu_slope,
    aten.gelu.default: _gelu_slope,
    aten.hardtanh.default: lambda x, y, low=-1.0, high=1.0: (x > low) & (x < high),
    aten.clamp.default: _between,
    aten.tanh.default: lambda x, y: 1 - y**2,
    aten.sigmoid.default: lambda x, y: y * (1 - y),
    aten.exp.default: lambda x, y: y,
    aten.expm1.default: lambda x, y: y + 1,
    aten.log.default: lambda x, y: 1 / x,
    aten.log1p.default: lambda x, y: 1 / (1 + x),
    aten.sqrt.default: lambda x, y: 0.5 / y,
    aten.rsqrt.default: lambda x, y: -0.5 * y**3,
    aten.reciprocal.default: lambda x, y: -(y**2),
    aten.sin.default: lambda x, y: x.cos(),
    aten.cos.default: lambda x, y: -x.sin(),
    aten.erf.default: lambda x, y: 2 / math.sqrt(math.pi) * (-(x**2)).exp(),
    aten.abs.default: lambda x, y: x.sign(),
    aten.pow.Tensor_Scalar: lambda x, y, power: power * x ** (power - 1),
}

# By operation of `aten`.
_RULES: dict[Any, Callable[..., Any]] = {
    **{func: _elementwise(slope) for func, slope in _SLOPES.items()},
    **dict.fromkeys((aten.neg.default, aten.mul.Scalar, aten.div.Scalar), _same),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten._to_copy.default), _copy),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _view),
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims), _of_axes),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList, aten.flip.default, aten.cumsum.default), _of_axes),
    aten.index_select.default: _of_axes,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.index.Tensor: _index,
    aten.embedding.default: _embedding,
    **dict.fromkeys((aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default), _of_images),
    **dict.fromkeys((aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec), _of_images),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar), _add),
    aten.mul.Tensor: _product(torch.mul),
    **dict.fromkeys((aten.mm.default, aten.bmm.default), _matmul),
    aten.addmm.default: _addmm,
    aten.div.Tensor: _divide,
    aten.where.self: _where,
    **dict.fromkeys((aten.maximum.default, aten.minimum.default), _extreme),
    aten.convolution.default: _convolution,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    aten.var.correction: _variance,
    **dict.fromkeys((aten.amax.default, aten.max.dim), _largest),
    aten.max_pool2d_with_indices.default: _max_pool,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}
# Operations whose derivative is zero.
_CONSTANT = {
    *(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.sign.default),
    *(aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default),
}
