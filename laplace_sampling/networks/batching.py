"""How many data and how many vectors go through a network at once.

Three limits act on a product, and `Batching` holds all of them:

- Memory limits the data: after an out-of-memory error a batch goes in parts of half the size.
- The caches of a CPU limit the vectors: their tensors are read again by the next operation while they are still there.
- The allocator of the C library limits the data of large batches on a CPU: see `allocator`.

The second and the third come from the sizes of the tensors of one forward pass, which are counted and not timed: a
choice by measured seconds would differ on a busy machine, and the same seed would then give other numbers.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace_sampling.data.batches import batched, num_rows, split
from laplace_sampling.networks.allocator import LARGEST_KEPT, cpu_out_of_memory, num_pieces
from laplace_sampling.networks.resources import TensorBytes

__all__ = ["DEFAULT_CHUNK", "Batching"]

T = TypeVar("T")
Forward = Callable[[Any], Tensor]

# The constants were tuned on the networks of `benchmarks/products.py`: an MLP, two LeNets, a U-Net and a ResNet-18.
# Times are those of 64 products (8 of the ResNet) on one core of an AMD EPYC, at half and at twice the value, divided
# by those at the value.

# Vectors together under `vmap`. On a CPU it matters for networks of small tensors only: JVPs of the MLP take 1.2 and
# 0.8, others the same within noise. Twice as many take twice the memory.
DEFAULT_CHUNK = 16
# Bytes of the largest tensor of a product that stay in the caches of a CPU. JVPs take 1.1 to 1.4 at half, and 0.8
# (LeNet of 1998) to 1.6 (LeNet) at twice.
_CACHED_BYTES = 12 * 2**20
# The fewest vectors that are worth a forward pass of their own on a CPU. All take 0.93 to 1.08 both ways, within noise;
# on a Xeon 8 JVPs of the ResNet took 6.6 gradients two by two, 5.2 four by four and 5.4 together.
_FEWEST_VECTORS = 4
# Beyond so many bytes of the largest tensor, pullbacks go one by one on a CPU: the forward pass is not repeated, and
# torch's backward convolutions run vector by vector anyway. At half, pullbacks of the LeNet of 1998 and the U-Net, of
# tensors of 1.1 MB, take 1.3; at twice, those of the ResNet, of 2.1 MB, take 1.1.
_PULLED_TOGETHER_BYTES = 2 * 10**6


class Batching:
    """Limits to the data and the vectors that go through one network at once.

    Args:
        chunk_size: how many vectors go through the network together, if its tensors are not small.
        kept_bytes: the largest block that the C library keeps after it is freed.

    Attributes:
        max_rows: the most data at once, `None` for all that are given; halved after an out-of-memory error.

    Raises:
        ValueError: if `chunk_size` is not positive.
    """

    def __init__(self, chunk_size: int = DEFAULT_CHUNK, kept_bytes: float = LARGEST_KEPT) -> None:
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1, but is {chunk_size}.")
        self.chunk_size, self.kept_bytes = chunk_size, kept_bytes
        self.max_rows: int | None = None
        self._warned = False
        # Bytes of each tensor of a forward pass, rising, and of its output, for each number in the inputs.
        self._bytes_per_input: list[float] = []
        self._output_bytes_per_input = 0.0
        self._proportional: bool | None = None

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
        if not self._bytes_per_input:
            sizes, output = _bytes_made(forward, x)
            self._bytes_per_input = sorted(size / max(inputs, 1) for size in sizes or [0])
            self._output_bytes_per_input = output.numel() * output.element_size() / max(inputs, 1)
        return self._bytes_per_input[-1] * inputs

    def forward_bytes(self, x: Any) -> tuple[float, float]:
        """Bytes of all tensors of a forward pass and of the largest, as far as they are counted; else zeros."""
        sizes = [size * _num_inputs(x) for size in self._bytes_per_input]
        return sum(sizes), max(sizes, default=0)

    def vectors_together(self, num: int, device: torch.device, largest: float) -> int:
        """How many of `num` vectors go together, in parts of one size.

        Args:
            num: of vectors.
            device: of the network.
            largest: bytes of the largest tensor of a forward pass.
        """
        most = self.max_vectors(device, largest)
        return -(-num // -(-num // most))

    def max_vectors(self, device: torch.device, largest: float) -> int:
        """As many vectors as a CPU's caches hold."""
        fewest = min(_FEWEST_VECTORS, self.chunk_size) if device.type == "cpu" else self.chunk_size
        return min(max(int(_CACHED_BYTES / max(largest, 1)), fewest), 4 * self.chunk_size)

    def pullbacks_together(self, num: int, device: torch.device, largest: float) -> int:
        """How many of `num` cotangents are pulled back together."""
        alone = device.type == "cpu" and largest > _PULLED_TOGETHER_BYTES
        return 1 if alone else self.vectors_together(num, device, largest)

    def pieces(self, forward: Forward, x: Any, num_vectors: int, weight_bytes: int, device: torch.device) -> list[Any]:
        """A batch in the pieces in which products of so many vectors are fastest on a CPU."""
        largest = self.largest_tensor(forward, x)
        if device.type != "cpu" or self._proportional is False or _FEWEST_VECTORS * largest <= self.kept_bytes:
            return [x]
        num, together = num_rows(x), self.vectors_together(num_vectors, device, largest)
        sizes = [size * _num_inputs(x) * together for size in self._bytes_per_input]
        pieces = num_pieces(num, sizes, together * weight_bytes, self.kept_bytes)
        parts = [x] if pieces == 1 else split(x, -(-num // pieces))
        return parts if len(parts) == 1 or self._is_proportional(forward, parts[0]) else [x]

    def curvature_in_pieces(self, pieces: list[Any], x: Any) -> bool:
        """Whether the curvature, which is that of all data, may be applied once for each piece."""
        return len(pieces) * self._output_bytes_per_input * _num_inputs(x) <= self.kept_bytes

    def _is_proportional(self, forward: Forward, piece: Any) -> bool:
        """Whether a piece makes smaller tensors than the batch, as many bytes as `largest_tensor` expects.

        A graph or weights that belong to the module are as large for fewer data, and some networks fail on fewer.
        """
        if self._proportional is None:
            try:
                sizes, _ = _bytes_made(forward, piece)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a network may raise anything
                sizes = []
            inputs, expected = _num_inputs(piece), self._bytes_per_input
            pairs = [(max(sizes, default=0), expected[-1]), (sum(sizes), sum(expected))]
            self._proportional = all(2 / 3 < size / (each * inputs) < 1.5 for size, each in pairs)
        return self._proportional


def _bytes_made(forward: Forward, x: Any) -> tuple[list[int], Tensor]:
    """The bytes of each tensor of a forward pass, and its output."""
    with torch.no_grad(), TensorBytes() as made:
        output = forward(x)
    return made.sizes, output


def _num_inputs(x: Any) -> int:
    return sum(t.numel() for t in batched(x)[0])
