"""What products of a network cost: floating-point operations and memory, both counted."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.linear_model.features import Features
from laplace_sampling.networks.memory import Operations, TensorBytes

# Tensors as large as the largest one that a JVP holds at once: inputs and output of an operation, and a copy. With 8
# vectors on a convolution with normalisation, an MLP and an attention layer the prediction was 1.0 to 2.1 times the
# measured peak; with half the value it fell to 0.65, with twice the value it reached 3.
_ALIVE = 4
# Data whose operations are counted. Operations grow with the data, except those on weights alone (parametrisations),
# which are counted too often by fewer data. With 2 and 8 the counts of a LeNet, an MLP and a CNN are the same.
_COUNTED = 4


@dataclass(frozen=True)
class Cost:
    """What products take of one datum, in floating-point operations of matrix products, convolutions and attention.

    Attributes:
        jvp: of one vector.
        vjp: of one cotangent, with its forward pass.
        gradient: of all trainable weights, forward and backward.
        measurements: of a datum, where the targets are measurements of the outputs.
    """

    jvp: float
    vjp: float
    gradient: float
    measurements: int = 0

    @property
    def passes(self) -> float:
        """Operations of a JVP and a VJP, the unit in which solvers count."""
        return self.jvp + self.vjp

    def epoch(self, num_data: int) -> float:
        """Operations of a training epoch: a gradient of each datum, or of each measurement of one if these are more.

        A single image with thousands of measurements is a training set, too.
        """
        return self.gradient * max(num_data, self.measurements)


def measure(features: Features, gradient: Callable[[Tensor], object] | None = None) -> Cost:
    """The cost of one JVP and one VJP, counted on a few data.

    Args:
        features: `Φ`.
        gradient: computes the gradient of all trainable weights on a batch; by default that is a VJP.
    """
    batch = next(iter(features.chunks()))[:_COUNTED]
    v = torch.ones(1, features.size, dtype=features.dtype, device=features.device)
    features.jvp(v, batch[:2])  # the first product of a network tries which way works
    with Operations() as forward:
        u = features.jvp(v, batch)
    with Operations() as backward:
        features.vjp(u, batch)
    trained = backward
    if gradient is not None:
        with Operations() as trained:
            gradient(batch)
    # Networks without any such operation, with look-ups alone, still touch each weight.
    least = (4.0 * features.size, 6.0 * features.size, 6.0 * features.size)
    counts = (found.count / len(batch) for found in (forward, backward, trained))
    jvp, vjp, trained = (count or instead for count, instead in zip(counts, least, strict=True))
    return Cost(jvp, vjp, trained)


def rows_in_memory(features: Features, bytes_: float, vectors: int) -> int:
    """Predicts how many data may go through the network at once, so that activations fit in some bytes of memory.

    A VJP holds all tensors of a forward pass, a JVP a few tensors for each vector. Tensors whose size does not grow
    with the data, such as copies of the weights, are not activations.

    Args:
        features: features of a network.
        bytes_: memory for the activations.
        vectors: number of vectors of a JVP.
    """
    # One vector gives a bound, as no tensor grows faster than the vectors. Products of all vectors would take longer
    # than some fits, those of few data with large inputs.
    v = torch.zeros(1, features.size, dtype=features.dtype, device=features.device)
    of_one = _bytes_a_datum(features, v)
    bound = int(bytes_ / max(sum(of_one) + _ALIVE * vectors * max(of_one, default=0), 1))
    if bound >= features.batch_size:
        return bound
    needed = sum(of_one) + _ALIVE * max(_bytes_a_datum(features, v.expand(vectors, -1).clone()), default=0)
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
