"""What products of a network cost: floating-point operations, seconds and memory."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.linear_model.features import Features
from laplace_sampling.networks.resources import Operations, TensorBytes

__all__ = ["Cost", "measure", "rows_in_memory"]

# Tensors as large as the largest one that a JVP holds at once: inputs and output of an operation, and a copy. With 8
# vectors on a convolution with normalisation, an MLP and an attention layer the prediction was 1.0 to 2.1 times the
# measured peak; with half the value it fell to 0.65, with twice the value it reached 3.
_ALIVE = 4


@dataclass(frozen=True)
class Cost:
    """The cost of products, measured on a mini-batch.

    Attributes:
        jvp: operations of a JVP for each datum.
        vjp: operations of a VJP for each datum.
        seconds: time of a JVP and a VJP of all data.
    """

    jvp: float
    vjp: float
    seconds: float


def measure(features: Features, num_data: int = 64) -> Cost:
    """The cost of one JVP and one VJP on a mini-batch of at most `num_data` data."""
    batch = next(iter(features.chunks()))[:num_data]
    v = torch.ones(1, features.size, dtype=features.dtype, device=features.device)
    features.jvp(v, batch[:2])  # the first product of a network tries which way works
    with Operations() as forward:
        u = features.jvp(v, batch)
    with Operations() as backward:
        features.vjp(u, batch)
    # Timed in a second run: the first one also allocates memory and compiles kernels.
    _synchronise(features.device)
    started = time.perf_counter()
    features.vjp(features.jvp(v, batch), batch)
    _synchronise(features.device)
    share = len(batch) / features.num_data
    return Cost(forward.count / len(batch), backward.count / len(batch), (time.perf_counter() - started) / share)


def rows_in_memory(features: Features, bytes_: float, vectors: int) -> int:
    """Predicts how many data may go through the network at once, so that activations fit in some bytes of memory.

    A VJP holds all tensors of a forward pass, a JVP a few tensors for each vector. Tensors whose size does not grow
    with the data, such as copies of the weights, are not activations.

    Args:
        features: features of a network.
        bytes_: memory for the activations.
        vectors: number of vectors of a JVP.
    """
    v = torch.zeros(vectors, features.size, dtype=features.dtype, device=features.device)
    needed = sum(_bytes_a_datum(features, v[:1])) + _ALIVE * max(_bytes_a_datum(features, v), default=0)
    return max(1, int(bytes_ / max(needed, 1)))


def _bytes_a_datum(features: Features, v: Tensor) -> list[float]:
    """The bytes by which each tensor of a JVP grows with a datum."""
    # Two and four data: with a single one torch may drop the axis of the data.
    numbers, sizes = [min(num, features.num_data) for num in (2, 4)], []
    for num in numbers:
        with TensorBytes() as made:
            features.jvp(v, torch.arange(num))
        sizes.append(made.sizes)
    (few, more), (small, large) = numbers, sizes
    if few == more or len(small) != len(large):  # not the same operations: count all tensors
        return [size / more for size in large]
    return [max(b - a, 0) / (more - few) for a, b in zip(small, large, strict=True)]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
