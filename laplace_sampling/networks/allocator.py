"""All that the library does about the memory allocator of the C library: two measures for products on a CPU.

glibc takes large blocks of memory from the system and gives them back once they are freed. The system fills each new
page with zeros, which takes longer than the arithmetic on it, and Jacobian products make and free such blocks all the
time.

- `keep_freed_memory` lets glibc keep freed blocks of less than 32 MiB. For GGN products of 8 vectors on an AMD EPYC
  (Zen 5) it brings 24 ms instead of 35 on LeNet, 35 instead of 52 on the LeNet of 1998 and 27 instead of 37 on a U-Net,
  without page faults instead of 7,000 to 9,000; on two Intel Xeons 0.6 to 0.8 of the time. Single vectors and networks
  of large layers gain less than 5 %.
- `num_pieces` splits a large batch, so that the tensors of a product are smaller than 32 MiB: 0.3 to 0.8 of the time on
  the EPYC and 0.4 to 1.0 on a Xeon, for batches that are split (`python -m benchmarks.large_batches`).

Where the C library is another one, or the user has set `MALLOC_` variables, the first does nothing, and the second
computes the same numbers in pieces.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

__all__ = ["LARGEST_KEPT", "cpu_out_of_memory", "keep_freed_memory", "num_pieces"]

# Bytes of the largest block that glibc keeps: `DEFAULT_MMAP_THRESHOLD_MAX` of mallopt(3), less what glibc and torch add
# to a block. It is a definition of glibc on 64-bit systems, not tuned.
LARGEST_KEPT = 2**25 - 2**14


@cache
def keep_freed_memory() -> None:
    """Lets the C library keep freed blocks of less than 32 MiB; called by the first Jacobian product of a process.

    glibc raises its thresholds to the size of the largest block that was freed so far, so freeing one block of the
    largest such size is enough. `mallopt` would do the same by a call that overrules the user's `MALLOC_` variables.
    """
    # An untouched block takes no memory. It is a storage because a tensor would be on the user's default device.
    torch.UntypedStorage(LARGEST_KEPT, device="cpu")


def num_pieces(num_data: int, tensor_bytes: Sequence[float], weight_bytes: float, kept_bytes: float) -> int:
    """The number of pieces in which a batch goes through a CPU, so that the C library keeps their tensors.

    More than one piece is taken only if the large tensors are more bytes than the vectors of weights, which each piece
    reads and writes once more.

    Args:
        num_data: in the batch.
        tensor_bytes: sizes of the tensors that a product of the whole batch makes.
        weight_bytes: size of the vectors of weights.
        kept_bytes: the largest block that the C library keeps.
    """
    largest = max(tensor_bytes)
    if largest <= kept_bytes:
        return 1
    most_data = int(num_data * kept_bytes / largest)
    if not most_data:
        return 1
    fewest = -(-num_data // most_data)
    # Pieces of one size compile to one program, so a few pieces more are taken for it.
    pieces = next((n for n in range(fewest, 2 * fewest) if num_data % n == 0), fewest)
    saved = sum(size for size in tensor_bytes if size > kept_bytes)
    return pieces if saved > (pieces - 1) * weight_bytes else 1


class _CPUOutOfMemory:
    """Raises `torch.OutOfMemoryError` also on a CPU, where torch raises a plain `RuntimeError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error


cpu_out_of_memory = _CPUOutOfMemory()
