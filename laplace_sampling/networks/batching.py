"""How many data and how many vectors go through a network at once.

Two limits act on a product, and `Batching` holds both:

- Memory limits the data: after an out-of-memory error a batch goes in parts of half the size.
- The caches of a CPU limit the vectors: their tensors are read again by the next operation while they are still there.

The second comes from the sizes of the tensors of one forward pass, which are counted and not timed: a choice by
measured seconds would differ on a busy machine, and the same seed would then give other numbers.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace_sampling.data.batches import batched
from laplace_sampling.networks.resources import TensorBytes

T = TypeVar("T")
Forward = Callable[[Any], Tensor]

# The constants were tuned on an MLP, two LeNets, a U-Net and a ResNet-18.
# Times are those of 64 products (8 of the ResNet) on one core of an AMD EPYC, at half and at twice the value, divided
# by those at the value.

# Beyond so many bytes of the largest tensor, pullbacks go one by one on a CPU: the forward pass is not repeated, and
# torch's backward convolutions run vector by vector anyway. At half, pullbacks of the LeNet of 1998 and the U-Net, of
# tensors of 1.1 MB, take 1.3; at twice, those of the ResNet, of 2.1 MB, take 1.1.
_PULLED_TOGETHER_BYTES = 2 * 10**6


@cache
def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks of less than 32 MiB, by freeing one; called by the first product of a process.

    The system fills each page that it gives with zeros, which takes longer than the arithmetic on it: GGN products of 8
    vectors on LeNet take 24 ms instead of 35. Where the user has set `MALLOC_` variables this changes nothing.
    """
    # `DEFAULT_MMAP_THRESHOLD_MAX` of mallopt(3), less what a block has around it. An untouched block takes no memory.
    torch.UntypedStorage(2**25 - 2**14, device="cpu")


class _CPUOutOfMemory:
    """Raises `torch.OutOfMemoryError` also on a CPU, where torch raises a plain `RuntimeError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error


cpu_out_of_memory = _CPUOutOfMemory()


class Batching:
    """Limits to the data and the vectors that go through one network at once.

    Attributes:
        max_rows: the most data at once, `None` for all that are given; halved after an out-of-memory error.
        chunk_size: how many vectors go through the network together, if its tensors are not small.
    """

    # On a CPU it matters for networks of small tensors only: JVPs of the MLP take 1.2 and 0.8, others the same within
    # noise. Twice as many take twice the memory.
    chunk_size = 16
    # Bytes of the largest tensor of a product that stay in the caches of a CPU. JVPs take 1.1 to 1.4 at half, and 0.8
    # (LeNet of 1998) to 1.6 (LeNet) at twice.
    _CACHED_BYTES = 12 * 2**20
    # The fewest vectors that are worth a forward pass of their own on a CPU. All take 0.93 to 1.08 both ways, within
    # noise; on a Xeon 8 JVPs of the ResNet took 6.6 gradients two by two, 5.2 four by four and 5.4 together.
    _FEWEST_VECTORS = 4

    def __init__(self) -> None:
        self.max_rows: int | None = None
        self._warned = False
        # Bytes of the largest tensor of a forward pass for each number in the inputs.
        self._bytes_per_input: float | None = None

    def in_parts(self, num: int, product: Callable[[slice], T]) -> list[T]:
        """`product` of parts of `num` data that memory holds, one after the other; one part of no data.

        Raises:
            torch.OutOfMemoryError: if memory does not hold a single datum.
        """
        parts: list[T] = []
        start = 0
        while start < num or not parts:
            size = min(num - start, self.max_rows or num)
            # The size is halved outside of `except`, where the error would still hold what was allocated.
            part = self._attempt(slice(start, start + size), product)
            if part is None:
                self._halve(size)
                continue
            parts.append(part)
            start += size
        return parts

    @staticmethod
    def _attempt(rows: slice, product: Callable[[slice], T]) -> T | None:
        try:
            with cpu_out_of_memory:
                return product(rows)
        except torch.OutOfMemoryError:
            if rows.stop - rows.start == 1:
                raise
            return None

    def _halve(self, size: int) -> None:
        self.max_rows = size // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Memory does not hold {size} data in the network at once: {self.max_rows} are taken from here on, and "
                "fewer if need be. Results do not depend on it; a smaller batch size of the loader avoids the attempt.",
                stacklevel=2,
            )

    def largest_tensor(self, forward: Forward, x: Any) -> float:
        """Bytes of the largest tensor of a forward pass, in proportion to the numbers in the inputs.

        The first call runs the network and counts; the others multiply.
        """
        inputs = _num_inputs(x)
        if self._bytes_per_input is None:
            with torch.no_grad(), TensorBytes() as made:
                forward(x)
            self._bytes_per_input = max(made.sizes, default=0) / max(inputs, 1)
        return self._bytes_per_input * inputs

    def vectors_together(self, num: int, device: torch.device, largest: float) -> int:
        """How many of `num` vectors go together, in parts of one size.

        Args:
            num: of vectors.
            device: of the network.
            largest: bytes of the largest tensor of a forward pass.
        """
        fewest = min(self._FEWEST_VECTORS, self.chunk_size) if device.type == "cpu" else self.chunk_size
        most = min(max(int(self._CACHED_BYTES / max(largest, 1)), fewest), 4 * self.chunk_size)
        return -(-num // -(-num // most))

    def pullbacks_together(self, num: int, device: torch.device, largest: float) -> int:
        """How many of `num` cotangents are pulled back together."""
        alone = device.type == "cpu" and largest > _PULLED_TOGETHER_BYTES
        return 1 if alone else self.vectors_together(num, device, largest)


def _num_inputs(x: Any) -> int:
    return sum(t.numel() for t in batched(x)[0])
