"""Forward mode of many vectors in one pass: tensors that carry the tangents of all vectors as one tensor.

`vmap` of `jvp` goes through two interpreters of functorch for each operation, and copies each tangent that is a part of
a larger tensor, as those of samples `[K, P]` are. Here the operations that small networks consist of have rules of
their own: one kernel for the value, and one for all tangents.

A network that calls anything else is left to `jvp`: with one operation after the other by `vmap` of `jvp`, vision
transformers and MobileNets took 1.5 of its time. A tensor can also lose its tangents where a network hides an operation
from torch (scripts, functions with derivatives of their own), so the first product is compared with that of `jvp`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vmap

from laplace_sampling.networks.elementary_layers import BatchNormCall

Weights = dict[str, Tensor]
Function = Callable[..., Tensor]

# Differences that rounding brings about, as a power of the precision, as in `consistency`: 2e-3 in float32. Half and
# twice the power are 4e-2 and 3e-6; a tangent that is lost is an error of its own size.
_ROUNDING_EXPONENT = 0.4


class _Unstackable(RuntimeError):
    """A call that no rule is made for."""


class _Stacked(Tensor):
    """A tensor and `K` tangents of it."""

    primal: Tensor
    tangents: Float[Tensor, "K ..."]

    @classmethod
    def of(cls, primal: Tensor, tangents: Tensor) -> "_Stacked":
        self = torch.Tensor._make_subclass(cls, primal)
        self.primal, self.tangents = primal, tangents
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
                answer = func(*map(_primal, args), **kwargs)
                if not isinstance(answer, Tensor):
                    return answer
            rule = _RULES.get(func)
            # `no_grad` in the network stops forward derivatives as it stops reverse ones.
            result = rule(func, args, kwargs) if rule is not None and torch.is_grad_enabled() else None
        if result is None:
            raise _Unstackable(f"`{getattr(func, '__name__', func)}` has no rule.")
        return result


class StackedTangents:
    """Products of one network, for each choice of random weights as long as they are those of `jvp`."""

    def __init__(self) -> None:
        self._works: dict[tuple[str, ...], bool] = {}

    def push(self, f: Function, weights: Weights, tangents: Weights, together: int) -> Float[Tensor, "K N C"] | None:
        """`φ v_k`, without a graph; `None` where they fail, or are other than those of `jvp`.

        Args:
            f: the network, `{name: tensor} -> [N, C]`, with an option `composed`.
            weights: where it is differentiated.
            tangents: `v_k`, by weight `[K, ...]`.
            together: vectors at once.
        """
        key = tuple(weights)
        if not self._works.get(key, True):
            return None
        parts = zip(*(t.split(together) for t in tangents.values()), strict=True)
        try:
            # Outside of `enable_grad`, forward derivatives stop too.
            with torch.enable_grad():
                products = [_product(f, weights, dict(zip(weights, part, strict=True))).detach() for part in parts]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # rules meet calls of all kinds; an error of the network itself comes again in the next way
            self._works[key] = False
            return None
        product = products[0] if len(products) == 1 else torch.cat(products)
        if key not in self._works:
            works = _is_product(product[0], f, weights, {name: t[0] for name, t in tangents.items()})
            if works is None:
                return None
            self._works[key] = works
        return product if self._works[key] else None


def _product(f: Function, weights: Weights, tangents: Weights) -> Tensor:
    out = f({name: _Stacked.of(weight, tangents[name]) for name, weight in weights.items()}, composed=False)
    if not isinstance(out, _Stacked):
        raise _Unstackable("The outputs have no tangents.")
    return out.tangents


def _is_product(product: Tensor, f: Function, weights: Weights, tangent: Weights) -> bool | None:
    """Whether it is that of `jvp`: torch does not see all that happens in a network. `None` if that one is zero."""
    try:
        with torch.enable_grad():
            expected = jvp(f, (weights,), (tangent,))[1].detach()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it is the next ways that say what is lacking
        return False
    size, error = float(expected.norm()), float((product - expected).norm())
    eps = max(torch.finfo(dtype).eps for dtype in (expected.dtype, next(iter(weights.values())).dtype))
    return error <= eps**_ROUNDING_EXPONENT * size if 0 < size < math.inf else None


def _primal(x: Any) -> Any:
    return x.primal if isinstance(x, _Stacked) else x


# Rules: for a call, a value with tangents; `None` for calls that they are not made for --------------------------------


def _elementwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """`f(x)` of each number: the tangents are those of `x` times `f'(x)`."""
    x, *rest = args or (None,)
    others = (*rest, *kwargs.values())
    if not isinstance(x, _Stacked) or kwargs.get("inplace") or any(isinstance(t, Tensor) for t in others):
        return None
    leaf = x.primal.detach().requires_grad_()
    value = func(leaf, *rest, **kwargs)
    (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return _Stacked.of(value.detach(), x.tangents * slope)


def _relu(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """As `_elementwise`, without the graph of a slope, which takes longer than a small layer."""
    if kwargs.get("inplace"):
        return None
    value = func(args[0].primal)
    return _Stacked.of(value, args[0].tangents * (value > 0))


def _of_each(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """A function that is linear in its one tensor: it is applied to each tangent."""
    x, *rest = args or (None,)
    others = (*rest, *kwargs.values())
    if not isinstance(x, _Stacked) or kwargs.get("inplace") or any(isinstance(t, Tensor) for t in others):
        return None
    return _Stacked.of(func(x.primal, *rest, **kwargs), vmap(lambda t: func(t, *rest, **kwargs))(x.tangents))


def _sum(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """`x + y` of one shape."""
    if len(args) != 2 or kwargs or not all(isinstance(t, _Stacked) for t in args) or args[0].shape != args[1].shape:
        return None
    return _Stacked.of(func(args[0].primal, args[1].primal), func(args[0].tangents, args[1].tangents))


def _parts(x: Any) -> tuple[Any, Tensor | None]:
    return (x.primal, x.tangents) if isinstance(x, _Stacked) else (x, None)


def _linear(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """`x Wᵀ + b`: the tangents of `W` take one batch of products, those of `x` one product."""
    if kwargs or len(args) not in (2, 3):
        return None
    (x, x_dot), (weight, weight_dot), (bias, bias_dot) = map(_parts, (*args, None)[:3])
    if weight.dim() != 2 or x.dim() < 2 or x.dtype != weight.dtype:
        return None
    value, terms = func(x, weight, bias), []
    num = next(len(t) for t in (x_dot, weight_dot, bias_dot) if t is not None)
    if weight_dot is not None:
        rows = x.reshape(1, -1, x.shape[-1]).expand(num, -1, -1)
        terms.append(rows @ weight_dot.mT)
    if x_dot is not None:
        terms.append((x_dot.reshape(-1, x.shape[-1]) @ weight.T).view(num, -1, len(weight)))
    if bias_dot is not None:
        terms.append(bias_dot[:, None].expand(num, value[..., 0].numel(), -1))
    return _Stacked.of(value, _total(terms).reshape(num, *value.shape))


def _convolution(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """A convolution: the tangents of the kernels are more output channels, those of the inputs more data."""
    if kwargs or len(args) < 2 or (len(args) > 6 and args[6] != 1):
        return None
    (x, x_dot), (weight, weight_dot), (bias, bias_dot) = map(_parts, (*args[:3], None)[:3])
    if x.dim() != weight.dim() or x.dtype != weight.dtype:
        return None
    value, terms, options = func(x, weight, bias, *args[3:]), [], args[3:]
    if weight_dot is not None:
        stacked = None if bias_dot is None else bias_dot.reshape(-1)
        channels = func(x, weight_dot.reshape(-1, *weight.shape[1:]), stacked, *options)
        terms.append(channels.unflatten(1, (len(weight_dot), len(weight))).transpose(0, 1))
    elif bias_dot is not None:
        axes = [1] * (weight.dim() - 2)
        terms.append(bias_dot.reshape(len(bias_dot), 1, -1, *axes).expand(-1, *value.shape))
    if x_dot is not None:
        terms.append(func(x_dot.flatten(0, 1), weight, None, *options).unflatten(0, x_dot.shape[:2]))
    return _Stacked.of(value, _total(terms))


def _total(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _batch_norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """With fixed statistics it is linear in its input, as `derivative_rules` says."""
    input, mean, var, weight, bias, training, momentum, eps = BatchNormCall(*args, **kwargs)
    if training or mean is None or var is None or isinstance(mean, _Stacked) or input.dtype != mean.dtype:
        return None
    (x, x_dot), (w, w_dot), (b, b_dot) = map(_parts, (input, weight, bias))
    value, scale = F.batch_norm(x, mean, var, w, b, False, momentum, eps), (var + eps).rsqrt()
    axes, terms = (-1, *[1] * (x.dim() - 2)), []
    if x_dot is not None:
        terms.append(x_dot * (scale if w is None else scale * w).view(axes))
    if w_dot is not None:
        slope = w_dot * scale
        b_dot = -mean * slope if b_dot is None else b_dot - mean * slope
        terms.append(x * slope.view(len(slope), 1, *axes))
    if b_dot is not None:
        terms.append(b_dot.reshape(len(b_dot), 1, *axes).expand(-1, *value.shape))
    return _Stacked.of(value, _total(terms))


def _max_pool(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The tangents at the places of the maxima."""
    if not isinstance(args[0], _Stacked) or args[0].dim() != 4 or kwargs.get("return_indices"):
        return None
    x = args[0]
    value, places = F.max_pool2d_with_indices(x.primal, *args[1:], **kwargs)
    tangents = x.tangents.flatten(3).gather(3, places.flatten(2).expand(len(x.tangents), -1, -1, -1))
    return _Stacked.of(value, tangents.unflatten(3, places.shape[2:]))


_ELEMENTWISE = [
    *(getattr(F, name) for name in ("relu", "relu6", "gelu", "silu", "elu", "selu", "leaky_relu", "softplus", "mish")),
    *(getattr(F, name) for name in ("hardswish", "hardsigmoid", "hardtanh", "tanh", "sigmoid", "logsigmoid")),
    *(getattr(of, name) for of in (torch, Tensor) for name in ("relu", "tanh", "sigmoid", "exp", "sin", "cos")),
]
_LINEAR = [
    *(getattr(of, name) for of in (torch, Tensor) for name in ("flatten", "reshape", "permute", "transpose", "mean")),
    *(getattr(Tensor, name) for name in ("view", "contiguous", "__getitem__")),
    *(F.avg_pool2d, F.adaptive_avg_pool2d),
]
_SUMS = [torch.add, Tensor.add, Tensor.__add__, torch.sub, Tensor.sub, Tensor.__sub__]
_RULES: dict[Callable, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys(_LINEAR, _of_each),
    **dict.fromkeys(_SUMS, _sum),
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool,
}
# What has no derivative, beside attributes.
_QUESTIONS = {getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")}
