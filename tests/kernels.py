"""How many kernels of torch a call runs."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def kernels_of(call: Callable[[], object]) -> int:
    """Views count as kernels."""
    with _Kernels() as kernels:
        call()
    return kernels.count
