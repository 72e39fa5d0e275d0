"""What products of a network cost, in floating-point operations, and the memory that is free."""

import os
import time
from dataclasses import dataclass

import torch

from laplace_sampling.operations import Operations
from laplace_sampling.operators import Features

__all__ = ["Cost", "free_memory", "measure"]


@dataclass(frozen=True)
class Cost:
    """Of products, measured on a mini-batch: operations a datum of a JVP and a VJP, and seconds a pass of both."""

    jvp: float
    vjp: float
    seconds: float


def measure(features: Features, most: int = 64) -> Cost:
    """Of one JVP and one VJP on a mini-batch; run twice, for the first run of a network is slow."""
    batch = next(iter(features.chunks()))[:most]
    v = torch.ones(1, features.size, dtype=features.dtype, device=features.device)
    with Operations() as forward:
        u = features.jvp(v, batch)
    with Operations() as backward:
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
