"""Inputs and targets of a batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from laplace_sampling.data.batches import as_tensors, batched

__all__ = ["Unpack", "unpacking"]

Unpack = Callable[[Any], tuple[Any, Any]]


def unpacking(unpack: Unpack | None) -> Unpack:
    """The user's function with a check of what it returns, or the one for pairs and for mappings with `labels`.

    Raises:
        TypeError: if it is no function.
    """
    if unpack is not None and not callable(unpack):
        raise TypeError(f"`unpack` must be a function of a batch, but is {unpack!r:.80}.")
    return _pair if unpack is None else partial(_unpacked, unpack)


def _pair(batch: Any) -> tuple[Any, Any]:
    batch = as_tensors(batch)
    if isinstance(batch, Mapping) and "labels" in batch:
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    known = isinstance(batch, list | tuple) and len(batch) == 2
    if not known or not batched(batch[0])[0] or not batched(batch[1])[0]:
        given = [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else type(batch).__name__
        hint = " To give all data at once, pass the list [(x, y)]." if isinstance(batch, Tensor) else ""
        raise TypeError(
            "Batches of the loader must be pairs (x, y) of tensors (or of tuples or dictionaries of them), or "
            f"mappings with `labels`, but one is {given}.{hint} Others take `unpack=`, a function of a batch that "
            "returns (inputs, targets)."
        )
    return batch[0], batch[1]


def _unpacked(unpack: Unpack, batch: Any) -> tuple[Any, Any]:
    pair = as_tensors(unpack(batch))
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(batched(part)[0] for part in pair):
        given = [type(part).__name__ for part in pair] if isinstance(pair, list | tuple) else type(pair).__name__
        raise TypeError(
            "`unpack(batch)` must return (inputs, targets), both tensors or tuples or dictionaries of them, but "
            f"returned {given}."
        )
    return pair[0], pair[1]
