"""How many data and how many vectors go through a network at once.

Two limits act on a product, and `Batching` holds both:

- Memory limits the data: after an out-of-memory error a batch goes in parts of half the size.
- The caches of a CPU limit the vectors: their tensors are read again by the next operation while they are still there.

The second comes from the sizes of the tensors of one forward pass, which are counted and not timed: a choice by
measured seconds would differ on a busy machine, and the same seed would then give other numbers.

`Operations` and `TensorBytes` count what a computation takes, and `free_memory` says what is left.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from laplace_sampling.data.batches import batched
from laplace_sampling.networks.solving import exclusive


class _Counting(TorchDispatchMode):
    """A mode in which other threads wait: torch has one flag in a process that says whether there is such a mode."""

    supports_higher_order_operators = True  # those that call functions, as `cond`, `scan` and `flex_attention`

    def __enter__(self) -> Self:
        exclusive.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            exclusive.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch leaves the mode for an operation, and so for those that it calls.
        if isinstance(func, HigherOrderOperator):
            args = [self._within(arg) if callable(arg) and not isinstance(arg, OperatorBase) else arg for arg in args]
        elif _is_composite(func):
            return self._within(func.decompose)(*args, **kwargs)
        out = func(*args, **kwargs)
        self._see(func, args, kwargs, out)
        return out

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation that was run."""
        raise NotImplementedError

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return within


@cache
def _is_composite(func: OpOverload) -> bool:
    """Whether an operation consists of others, as `linear`; a mode sees it only in what another operation calls."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class Operations(_Counting):
    """Counts floating-point operations of matrix products, convolutions and attention.

    torch's `FlopCounterMode` counts them for each module by hooks, which fail on parametrised weights.
    """

    def __init__(self) -> None:
        # This import takes 0.2 s, and few programs count operations.
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.count = 0.0
        self._counters = flop_registry

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        operation = getattr(func, "_overloadpacket", func)
        if operation == torch.ops.aten.convolution_backward:
            self.count += _of_convolution_backward(*args)
        elif (counter := self._counters.get(operation)) is not None:
            self.count += counter(*args, **kwargs, out_val=out)


def _of_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> float:
    """Each gradient takes as much as the convolution itself; torch counts that of weights once more for each group."""
    transposed, wanted = rest[4], rest[7]
    return 2.0 * (x if transposed else grad).numel() * weight[0].numel() * sum(wanted[:2])


class TensorBytes(_Counting):
    """Records the bytes of each new tensor, in the order in which they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        # Views share the storage of an argument: they are no new tensors.
        given = {t.untyped_storage()._cdata for t in _dense_tensors(args, kwargs)}
        new = [t for t in _dense_tensors(out) if t.untyped_storage()._cdata not in given]
        self.sizes += [t.numel() * t.element_size() for t in new]


def _dense_tensors(*tree: Any) -> list[Tensor]:
    """The tensors that have a storage, which sparse ones do not have."""
    # Arguments of operations are tensors, numbers and lists: torch's `tree_leaves` took more time than the operations.
    found: list[Tensor] = []
    for item in tree:
        if isinstance(item, Tensor):
            found += [item] if item.layout == torch.strided else []
        elif isinstance(item, list | tuple):
            found += _dense_tensors(*item)
        elif isinstance(item, dict):
            found += _dense_tensors(*item.values())
    return found


def free_memory(device: torch.device) -> float:
    """Bytes that new tensors on a device may take."""
    module: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        # What torch has reserved and no tensor uses is free for us, though not for others.
        reserved = module.memory_reserved(device) - module.memory_allocated(device)
        return float(module.mem_get_info(device)[0] + reserved)
    try:  # the CPU, and devices that share its memory
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not every system knows this number
        return 4.0 * 2**30


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
