"""Forward derivatives of products and of batch normalisation, in fewer operations than torch takes.

torch multiplies zeros where a factor has no tangent, as inputs and weights that are not random: a third of the forward
derivative of a frozen layer, of the first one, and of one that takes a graph's adjacency matrix. And the tangent of a
batch normalisation with fixed statistics, which is linear in the tangents of its input, scale and shift, takes it five
to eight tensors of the size of the input.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.autograd.forward_ad import make_dual, unpack_dual

__all__ = ["addmm", "affine", "batch_norm", "bilinear", "einsum"]


def _halves(tensor: Any) -> tuple[Any, Tensor | None]:
    """A tensor without its tangent, and the tangent, which sparse ones have none of."""
    return (tensor, None) if tensor is None or tensor.layout != torch.strided else unpack_dual(tensor)


def _plain(*tensors: Tensor | None) -> bool:
    """Whether their tangents can be asked for: not of every subclass, nor within a `vmap` of the network's own."""
    return all(t is None or (type(t) in (Tensor, nn.Parameter) and not is_batchedtensor(t)) for t in tensors)


def _product(func: Callable, a: Tensor, b: Tensor) -> Tensor | None:
    """`func(a, b)`, which is linear in both, of dual numbers if one of them has no tangent."""
    if not _plain(a, b):
        return None
    (value, tangent), (other, change) = _halves(a), _halves(b)
    if (tangent is None) == (change is None):
        return None
    return make_dual(func(value, other), func(tangent, other) if change is None else func(value, change))


def bilinear(func: Callable) -> Callable:
    """`func(a, b)`, linear in either, as `torch.matmul`."""

    def rule(*args: Any, **kwargs: Any) -> Tensor:
        found = _product(func, *args) if len(args) == 2 and not kwargs else None
        return func(*args, **kwargs) if found is None else found

    return rule


def einsum(*args: Any) -> Tensor:
    """`torch.einsum` of two factors."""
    found = _product(lambda a, b: torch.einsum(args[0], a, b), *args[1:]) if len(args) == 3 else None
    return torch.einsum(*args) if found is None else found


def affine(func: Callable, trailing: int) -> Callable:
    """`func(input, weight, bias, ...)`, a product and a bias of an axis with so many behind it, as `F.linear`."""

    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if not _plain(input, weight, bias):
            return func(input, weight, bias, *args, **kwargs)
        (x, dx), (w, dw), (b, db) = _halves(input), _halves(weight), _halves(bias)
        if dx is dw is db is None or (dx is not None and dw is not None):
            return func(input, weight, bias, *args, **kwargs)
        value = func(x, w, b, *args, **kwargs)
        if dw is not None:
            tangent = func(x, dw, db, *args, **kwargs)
        elif dx is not None:
            tangent = func(dx, w, db, *args, **kwargs)
        else:
            assert db is not None
            tangent = db.reshape(*db.shape, *[1] * trailing).to(value.dtype).expand_as(value)
        return make_dual(value, tangent)

    return rule


def addmm(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.addmm`: a bias and a product of matrices."""
    if len(args) != 3 or kwargs:
        return torch.addmm(*args, **kwargs)
    return _addmm(args[1], args[2], args[0])


_addmm = affine(lambda a, b, bias: a @ b if bias is None else torch.addmm(bias, a, b), 0)


def batch_norm(
    input: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """`F.batch_norm`, whose tangent with fixed statistics is `ẋ γ/σ + (x - μ) γ̇/σ + β̇`."""
    if training or mean is None or var is None or not _plain(input, mean, var, weight, bias):
        return F.batch_norm(input, mean, var, weight, bias, training, momentum, eps)
    (x, dx), (w, dw), (b, db) = _halves(input), _halves(weight), _halves(bias)
    if dx is dw is db is None:
        return F.batch_norm(input, mean, var, weight, bias, training, momentum, eps)
    mean, var = unpack_dual(mean).primal, unpack_dual(var).primal  # constants, as for torch
    value = F.batch_norm(x, mean, var, w, b, training, momentum, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale = (var.to(dtype) + eps).rsqrt()
    axes = (-1, *[1] * (x.dim() - 2))
    tangent = None
    if dx is not None:
        tangent = dx * (scale if w is None else scale * w).reshape(axes)
    if dw is not None:
        slope = dw * scale
        db = -mean * slope if db is None else db - mean * slope
        tangent = _plus(tangent, x, slope.reshape(axes))
    if db is not None:
        shift = db.reshape(axes)
        tangent = shift.expand_as(value) if tangent is None else tangent.add_(shift)
    assert tangent is not None
    return make_dual(value, tangent.to(value.dtype))


def _plus(tangent: Tensor | None, x: Tensor, slope: Tensor) -> Tensor:
    return x * slope if tangent is None else torch.addcmul(tangent, x, slope)
