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
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp
from torch.utils._pytree import tree_map

from laplace_sampling.networks.agreement import difference, rounding
from laplace_sampling.networks.tangents import RULES, Dual

Weights = dict[str, Tensor]
Function = Callable[..., Tensor]


class _Unstackable(RuntimeError):
    """A call that no rule is made for."""


class _Stacked(Tensor):
    """A `Dual` that a network takes for a tensor."""

    dual: Dual

    @classmethod
    def of(cls, dual: Dual) -> "_Stacked":
        self = torch.Tensor._make_subclass(cls, dual.value)
        self.dual = dual
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
                answer = func(*(x.dual.value if isinstance(x, _Stacked) else x for x in args), **kwargs)
                if not isinstance(answer, Tensor):
                    return answer
            # `no_grad` in the network stops forward derivatives as it stops reverse ones.
            rule = RULES.get(func) if torch.is_grad_enabled() and not kwargs.pop("inplace", False) else None
            args, kwargs = tree_map(lambda x: x.dual if isinstance(x, _Stacked) else x, (args, kwargs))
            result = None if rule is None else rule(func, *args, **kwargs)
        if result is None:
            raise _Unstackable(f"`{getattr(func, '__name__', func)}` has no rule.")
        return cls.of(result)


def stacked(f: Function, weights: Weights, tangents: Weights, together: int) -> Float[Tensor, "K N C"]:
    """`φ v_k`, without a graph.

    Args:
        f: the network, `{name: tensor} -> [N, C]`, with an option `composed`.
        weights: where it is differentiated.
        tangents: `v_k`, by weight `[K, ...]`.
        together: vectors at once.
    """
    parts = zip(*(t.split(together) for t in tangents.values()), strict=True)
    with torch.enable_grad():  # outside of it, forward derivatives stop too
        products = [_product(f, weights, dict(zip(weights, part, strict=True))).detach() for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products)


def _product(f: Function, weights: Weights, tangents: Weights) -> Tensor:
    out = f({name: _Stacked.of(Dual(weight, tangents[name])) for name, weight in weights.items()}, composed=False)
    if not isinstance(out, _Stacked):
        raise _Unstackable("The outputs have no tangents.")
    return out.dual.tangents


def is_product(product: Tensor, f: Function, weights: Weights, tangent: Weights) -> bool | None:
    """Whether it is that of `jvp`: torch does not see all that happens in a network. `None` if that one is zero."""
    with torch.enable_grad():
        expected = jvp(f, (weights,), (tangent,))[1].detach()
    dtypes = (expected.dtype, next(iter(weights.values())).dtype)
    return difference(product, expected) <= max(map(rounding, dtypes)) if 0 < expected.norm() < math.inf else None


# What has no derivative, beside attributes.
_QUESTIONS = {getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")}
