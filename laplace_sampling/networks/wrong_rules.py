"""Operations whose forward derivative is wrong in torch, found one by one by differences.

A network of which forward and reverse mode give two Jacobians is run once more, and each of its operations is compared
with `(f(a + hȧ) − f(a − hȧ)) / 2h` in float64. Where reverse mode is right, it can take the place of forward mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_unflatten

from laplace_sampling.networks.derivative_rules import ComposedLayers, forward_mode_kernels
from laplace_sampling.networks.jacobian_products import origin_of
from laplace_sampling.networks.shell import Shell
from laplace_sampling.solvers.placement import normal

# Central differences are right to two thirds of the digits with steps of a third of them; derivatives that agree in a
# third of the digits are the same.
_STEP = _SAME = torch.finfo(torch.float64).eps ** (1 / 3)
# What takes a dual number apart: its value alone has no forward derivative.
_APART = torch._C._VariableFunctions._unpack_dual  # pyright: ignore


class _WrongRule(Exception):
    pass


def wrong_forward_rule(shell: Shell, x: Any) -> str | None:
    """The first operation whose forward derivative is wrong where its reverse one is right, with its module.

    `None` if there is none; what the network or an operation raises is raised.

    Args:
        shell: a network in float64.
        x: inputs.
    """
    weights = shell.random()
    num = sum(shell.sizes)
    tangents = shell.unflatten(normal(1, num, seed=0, dtype=shell.dtype, device=shell.device)[0])
    try:
        with torch.enable_grad(), shell.opened(), forward_mode_kernels(layers=False), dual_level(), _Rules():
            shell.outputs(x)({name: make_dual(w, tangents[name].to(w.dtype)) for name, w in weights.items()})
    except _WrongRule as found:
        return origin_of(found, shell.module)
    return None


class _Rules(TorchFunctionMode):
    """Raises at the first operation whose forward derivative is wrong and whose reverse one is right."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _APART:
            return func(*args, **(kwargs or {}))
        values, spec = tree_flatten((args, kwargs or {}))
        duals = {n: unpack_dual(value) for n, value in enumerate(values) if _has_numbers(value)}
        changing = {n: dual.tangent for n, dual in duals.items() if dual.tangent is not None}
        # Operations in place change what they are given.
        given = [duals[n].primal.detach().clone() if n in duals else value for n, value in enumerate(values)]
        ways = [tangent.detach().clone() for tangent in changing.values()]
        output = func(*args, **(kwargs or {}))
        found = [unpack_dual(value) for value in tree_flatten(output)[0] if _has_numbers(value)]
        if not changing or not found:
            return output
        forward = _flat([torch.zeros_like(p) if t is None else t for p, t in found])

        def at(places: list[Tensor]) -> Tensor:
            moved = dict(zip(changing, places, strict=True))
            some = [moved.get(n, value.clone() if n in duals else value) for n, value in enumerate(given)]
            args, kwargs = tree_unflatten(some, spec)
            with ComposedLayers():
                return _flat([value for value in tree_flatten(func(*args, **kwargs))[0] if _has_numbers(value)])

        points = [given[n] for n in changing]
        try:
            h = _STEP * float(_flat(points).norm() / _flat(ways).norm())
            above, below = (at([a + s * h * t for a, t in zip(points, ways, strict=True)]) for s in (1, -1))
            change = (above - below).detach() / (2 * h)
            if _same(forward, change) or not _same(self._reverse(at, points, ways, change), change.square().sum()):
                return output
        except Exception:  # what has no reverse derivative, say
            return output
        raise _WrongRule(f"`{resolve_name(func) or func.__name__}`")

    def _reverse(self, at: Callable, points: list[Tensor], ways: list[Tensor], u: Tensor) -> Tensor:
        """`⟨∂f/∂a ᵀ u, ȧ⟩`."""
        leaves = [a.clone().requires_grad_() for a in points]
        pulled = torch.autograd.grad(at([leaf.clone() for leaf in leaves]), leaves, u, materialize_grads=True)
        return (_flat(list(pulled)) * _flat(ways)).sum()


def _has_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= _SAME * b.norm())
