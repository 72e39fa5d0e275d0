"""What computations take: operations and bytes of tensors, which are counted, and memory, which is free or not."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

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
