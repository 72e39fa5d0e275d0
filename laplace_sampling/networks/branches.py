"""Networks that branch on values of a datum, under `vmap` over the data: those that take the same branch go together.

torch has no value for a question such as `if mask.all()` of many data at once. Where the answer is the same for all, it
is given; where it is not, the data are shared out by their answers, each part is computed by itself, and asked again
at the next branch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Weights = dict[str, Tensor]


class _DataDiffer(RuntimeError):
    """Data together of which the network asks a value that is not the same.

    Attributes:
        values: `[n]`, of each of them.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__("vmap: data take different branches")
        self.values = values


def _of_all_data(tensor: Tensor) -> Tensor | None:
    """The numbers, one for each datum, of a tensor that stands for all of them; `None` for what is none."""
    while is_functorch_wrapped_tensor(tensor) and not is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    if not is_batchedtensor(tensor) or tensor.numel() != 1:
        return None
    numbers = get_unwrapped(tensor)
    return None if is_functorch_wrapped_tensor(numbers) else numbers.detach()


def _same_for_all(question: Callable) -> Callable:
    def answer(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        numbers = _of_all_data(tensor)
        if numbers is None:
            return question(tensor, *args, **kwargs)
        with temporarily_clear_interpreter_stack():  # else torch makes tensors of all data of them again
            numbers = numbers.flatten()
            if len(numbers) > 1 and not bool((numbers == numbers[0]).all()):
                raise _DataDiffer(numbers.cpu())
            return question(numbers[0].reshape(tensor.shape), *args, **kwargs)

    return answer


# Functions of torch that take a value out of a tensor, and what is called in their places.
QUESTIONS: dict[Callable, Callable] = {
    question: _same_for_all(question)
    for question in (
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__float__,
        Tensor.item,
        Tensor.tolist,
        Tensor.is_nonzero,
        torch.is_nonzero,
    )
}


def by_branch(product: Callable[[list[Tensor]], Weights], tensors: list[Tensor], most: int) -> Weights:
    """`product` of the rows of tensors, `[n, ...]` each, apart for data that take other branches of the network.

    Args:
        product: by name, with a row for each of those of the tensors.
        tensors: the data.
        most: data at once.
    """
    if (num := len(tensors[0])) > most:
        chunks = zip(*(t.split(most) for t in tensors), strict=True)
        return _joined([by_branch(product, list(chunk), most) for chunk in chunks])
    try:
        return product(tensors)
    except _DataDiffer as differ:
        _, branch = differ.values.unique(return_inverse=True)
    order = branch.argsort(stable=True)
    parts = [[t[rows] for t in tensors] for rows in order.split(branch.bincount().tolist())]
    rows = _joined([by_branch(product, part, num) for part in parts])
    return {name: of_name[order.argsort()] for name, of_name in rows.items()}


def _joined(parts: list[Weights]) -> Weights:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
