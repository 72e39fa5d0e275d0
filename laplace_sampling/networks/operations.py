"""Counting floating-point operations."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Operations"]


class Operations(TorchDispatchMode):
    """Counts floating-point operations of matrix products, convolutions and attention.

    torch's `FlopCounterMode` does so by module, by hooks that fail on parametrised weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counter = flop_registry.get(func._overloadpacket)
        if counter is not None:
            self.count += counter(*args, **(kwargs or {}), out_val=out)
        return out
