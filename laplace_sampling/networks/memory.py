"""How many data go through a network at once: what memory is foretold to hold, and half of it where it does not.

And freed memory that is kept.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LARGEST_KEPT", "BatchLimit", "TensorBytes", "cpu_out_of_memory", "keep_freed_memory"]

T = TypeVar("T")

# The largest block that glibc keeps (`DEFAULT_MMAP_THRESHOLD_MAX`, mallopt(3)), less what it and torch add to it.
LARGEST_KEPT = 2**25 - 2**14


@cache
def keep_freed_memory() -> None:
    """Lets the C library keep freed blocks of less than 32 MiB, of which each product makes many.

    glibc gives those back to the system that are larger than any that was freed before, and getting pages anew takes
    up to two fifths of a product of a small network. Elsewhere, and where `mallopt` was called, it does nothing.
    """
    # A storage: a tensor would be on the user's default device, or filled. Nothing is written, so it takes no memory.
    torch.UntypedStorage(LARGEST_KEPT, device="cpu")


@contextmanager
def cpu_out_of_memory() -> Iterator[None]:
    """`torch.OutOfMemoryError` also on a CPU, where torch raises a plain `RuntimeError`, as of missing derivatives."""
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


class BatchLimit:
    """The most data that go through a network at once; halved, with a notice, where memory does not hold them.

    Attributes:
        most: so many; `None` for as many as are given.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        self._said = False

    def in_parts(self, num: int, product: Callable[[slice], T]) -> list[T]:
        """`product` of pieces of `num` data.

        Raises:
            torch.OutOfMemoryError: if memory does not hold a single datum.
        """
        parts: list[T] = []
        start = 0
        while start < num:
            rows = min(num - start, self.most or num)
            # Halved outside of `except`, whose error holds what was allocated.
            part = self._attempt(slice(start, start + rows), product)
            if part is None:
                self._halve(rows)
                continue
            parts.append(part)
            start += rows
        return parts

    @staticmethod
    def _attempt(rows: slice, product: Callable[[slice], T]) -> T | None:
        try:
            with cpu_out_of_memory():
                return product(rows)
        except torch.OutOfMemoryError:
            if rows.stop - rows.start == 1:
                raise
            return None

    def _halve(self, rows: int) -> None:
        self.most = rows // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self._said:
            self._said = True
            warnings.warn(
                f"Memory does not hold {rows} data in the network at once: {self.most} are taken from here on, and "
                "fewer if need be. Results do not depend on it; a smaller batch size of the loader avoids the attempt.",
                stacklevel=2,
            )


class TensorBytes(TorchDispatchMode):
    """The bytes of each new tensor, in the order in which they are made."""

    supports_higher_order_operators = True  # as `flex_attention` is

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _dense(args, kwargs)}
        self.sizes += [t.numel() * t.element_size() for t in _dense(out) if t.untyped_storage()._cdata not in given]
        return out


def _dense(*tree: Any) -> list[Tensor]:
    """The tensors that have a storage, as sparse ones have not."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.layout == torch.strided]


def free_memory(device: torch.device) -> float:
    """Bytes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not every system tells
        return 4.0 * 2**30
