"""What products of a network cost, in floating-point operations, and the memory that is free."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.linear_model.features import Features
from laplace_sampling.networks.resources import Operations, TensorBytes

__all__ = ["Cost", "measure", "rows_in_memory"]

# Tensors as large as the largest that are alive at once in a product: inputs and output of an operation, and a copy.
_ALIVE = 4


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
    features.jvp(v, batch[:2])  # the first product of a network tries ways to take it
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


def rows_in_memory(features: Features, bytes_: float, vectors: int) -> int:
    """How many data at a time products of so many vectors may take, so that activations keep within some bytes.

    Foretold from a few data: a VJP holds all that a forward pass makes, a JVP a few tensors for each vector. What does
    not grow with the data, as tensors of the size of weights, is no activation.
    """
    v = torch.zeros(vectors, features.size, dtype=features.dtype, device=features.device)
    needed = sum(_bytes_a_datum(features, v[:1])) + _ALIVE * max(_bytes_a_datum(features, v), default=0)
    return max(1, int(bytes_ / max(needed, 1)))


def _bytes_a_datum(features: Features, v: Tensor) -> list[float]:
    """Of each tensor that a JVP makes, by how much it grows with a datum."""
    numbers, sizes = [min(num, features.num_data) for num in (2, 4)], []  # a single one may lose its axis
    for num in numbers:
        with TensorBytes() as made:
            features.jvp(v, torch.arange(num))
        sizes.append(made.sizes)
    (few, more), (small, large) = numbers, sizes
    if few == more or len(small) != len(large):  # another computation: as if all of it grew
        return [size / more for size in large]
    return [max(b - a, 0) / (more - few) for a, b in zip(small, large, strict=True)]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
