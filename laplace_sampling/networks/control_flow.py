"""Operations of torch that call functions, as the Python that they stand for.

`torch.cond` has no forward derivative and no second reverse one, `scan` and `map` have no forward one and a reverse one
that traces their functions each time, `while_loop` has none (torch 2.14).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def _cond(pred: Tensor | bool, true_fn: Callable, false_fn: Callable, operands: Sequence[Any], **_: Any) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _scan(
    combine: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], more: Sequence[Any], **_: Any
) -> list[Tensor]:
    """What is carried at the end, and the other outputs of each step."""
    carried, outputs = list(init), []
    for parts in zip(*(x.unbind() for x in xs), strict=True):
        results = combine(*carried, *parts, *more)
        carried = list(results[: len(init)])
        outputs.append(results[len(init) :])
    return carried + [torch.stack(steps) for steps in zip(*outputs, strict=True)]


def _map(function: Callable, xs: Sequence[Tensor], more: Sequence[Any], **_: Any) -> Any:
    results = [function(*parts, *more) for parts in zip(*(x.unbind() for x in xs), strict=True)]
    return tree_map(lambda *rows: torch.stack(rows), *results)


def _while_loop(
    goes_on: Callable, body: Callable, carried: Sequence[Any], more: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    while goes_on(*carried, *more):
        carried = body(*carried, *more)
    return tuple(carried)


def _num_positional(function: Callable) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


_FUNCTIONS = {"cond": _cond, "scan": _scan, "map_impl": _map, "while_loop": _while_loop}
# Operations and what is called in their places, with the same arguments; `scan` has others in torch 2.6.
CONTROL_FLOW: dict[Callable, Callable] = {
    operation: function
    for name, function in _FUNCTIONS.items()
    if (operation := getattr(torch.ops.higher_order, name, None)) is not None
    and _num_positional(operation.__call__) == _num_positional(function)
}
