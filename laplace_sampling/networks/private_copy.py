"""`private_copy`: the structure of a module once more, with weights that may be in the memory of others."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling.networks.sharded import BLOCK, is_dtensor, is_fsdp, is_of_fsdp


def private_copy(module: nn.Module, weight: Callable[[str, nn.Parameter], nn.Parameter]) -> nn.Module:
    """A copy in evaluation mode, with buffers, attributes and hooks of its own; what cannot be copied is shared.

    Args:
        module: of which.
        weight: gives the parameter of the copy for the name and the parameter of the module.
    """
    parts = list(module.modules())
    tensors: dict[int, Any] = {id(p): weight(name, p) for name, p in module.named_parameters()}
    # Weights that hooks compute, as those of pruning, may have a graph, which torch does not copy.
    computed = [t for part in parts for t in vars(part).values() if isinstance(t, Tensor) and not t.is_leaf]
    tensors |= {id(t): t.detach().clone() for t in computed}
    memo = dict(tensors)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception:  # a part that forbids to be copied, as those of FSDP, or that holds what cannot be
        memo = dict(tensors)
        copied = _copied_by_parts(parts, memo)
    sources = dict(module.named_modules())
    for name, part in copied.named_modules():
        part.training = False
        given = vars(sources.get(name, part))
        own = {key: _own_function(value, memo) for key, value in given.items() if isinstance(value, FunctionType)}
        vars(part).update(own)
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.update({key: _own_function(hook, memo) for key, hook in hooks.items()})
    return copied


def shared_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter in the same memory, without gradient; other classes, which hold more than numbers, as they are."""
    is_plain = type(parameter) is nn.Parameter or is_dtensor(parameter)
    return nn.Parameter(parameter.detach(), requires_grad=False) if is_plain else parameter


def own_parameter(parameter: nn.Parameter, requires_grad: bool, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A copy of a parameter, of a dtype if it is a plain one."""
    if type(parameter) is not nn.Parameter and not is_dtensor(parameter):
        try:
            copied = copy.deepcopy(parameter)
        except RuntimeError:  # a class that only adds a name to a tensor need not say how it is copied
            copied = nn.Parameter(parameter.detach().clone())
        copied.requires_grad = requires_grad
        return copied
    numbers = parameter.detach()
    return nn.Parameter(numbers.clone() if dtype is None else numbers.to(dtype), requires_grad)


def _copied_by_parts(parts: list[nn.Module], memo: dict[int, Any]) -> nn.Module:
    # Classes of FSDP are followed by `FSDPModule` and the user's.
    classes = [type(part).__mro__[2] if is_fsdp(part) else type(part) for part in parts]
    memo |= {id(part): object.__new__(kind) for part, kind in zip(parts, classes, strict=True)}
    for part in parts:
        own = vars(memo[id(part)])
        for name, value in vars(part).items():
            if isinstance(value, dict) and type(value) in (dict, OrderedDict):
                kept = {k: item for k, item in value.items() if "_hooks" not in name or not is_of_fsdp(item)}
                own[name] = type(value)((k, _own(item, memo)) for k, item in kept.items())
            elif not name.startswith("__composable_api"):  # streams and process groups of FSDP
                own[name] = _own(value, memo)
        if is_fsdp(part):
            own[BLOCK] = True
    return memo[id(parts[0])]


def _own(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an object of a user's class may raise anything
        return value.detach().clone() if isinstance(value, Tensor) else value


def _own_function(function: Any, memo: dict[int, Any]) -> Any:
    """A function that finds the copies of the modules and weights in its closure; others as they are."""
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    if id(function) in memo:
        return memo[id(function)]
    cells = tuple(CellType() for _ in function.__closure__)
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, function.__qualname__
    own.__dict__.update(function.__dict__)
    memo[id(function)] = own
    for cell, given in zip(cells, function.__closure__, strict=True):
        try:
            value = given.cell_contents
        except ValueError:  # not yet assigned
            continue
        if isinstance(value, FunctionType):
            value = _own_function(value, memo)
        elif isinstance(value, nn.Module) or (isinstance(value, Tensor) and id(value) in memo):
            value = memo.get(id(value), value)
        elif isinstance(value, MethodType):
            value = MethodType(value.__func__, memo.get(id(value.__self__), value.__self__))
        elif isinstance(value, (partial, list, tuple, dict)):
            value = _own(value, memo)
        cell.cell_contents = value
    return own
