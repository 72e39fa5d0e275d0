"""What products of a network cost, in floating-point operations, and the memory that is free."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from laplace_sampling.operators import Features

__all__ = ["Cost", "free_memory", "measure"]


@dataclass(frozen=True)
class Cost:
    """Of products, measured on a mini-batch: operations a datum of a JVP and a VJP, and seconds a pass of both."""

    jvp: float
    vjp: float
    seconds: float


class _Operations(TorchDispatchMode):
    """Counts floating-point operations of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counter = flop_registry.get(func._overloadpacket)
        if counter is not None:
            self.count += counter(*args, **(kwargs or {}), out_val=out)
        return out


def measure(features: Features, most: int = 64) -> Cost:
    """Of one JVP and one VJP on a mini-batch; run twice, for the first run of a network is slow."""
    batch = next(iter(features.chunks()))[:most]
    v = torch.ones(1, features.size, dtype=features.dtype, device=features.device)
    with _Operations() as forward:
        u = features.jvp(v, batch)
    with _Operations() as backward:
        features.vjp(u, batch)
    _synchronise(features.device)
    started = time.perf_counter()
    features.vjp(features.jvp(v, batch), batch)
    _synchronise(features.device)
    share = len(batch) / features.num_data
    return Cost(forward.count / len(batch), backward.count / len(batch), (time.perf_counter() - started) / share)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> float:
    """Bytes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not every system tells
        return 4.0 * 2**30
