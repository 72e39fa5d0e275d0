"""The frozen randomness of samples: white noise that is keyed by seed, sample and datum."""

from dataclasses import dataclass, replace
from enum import IntEnum, unique

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@unique
class Stream(IntEnum):
    """What noise is drawn for: each purpose has its own stream of the seed, so that none is correlated with another.

    Streams of posterior samples count up from `SAMPLES`: the fit has the first, and each call of `sample` the next.
    All others are below or far above them.
    """

    EM = 0
    PRIOR_SCALE = 1
    SAMPLES = 2
    EVIDENCE = 2**20
    LEFT_OUT = 2**20 + 1
    LOSS_RISE = 2**20 + 2
    VALIDATION = 2**20 + 3
    SUBSET = 2**20 + 4
    LEFT_OUT_LABELS = 2**20 + 5
    RULE = 2**20 + 6
    SUBSET_PROBES = 2**20 + 7
    FACTORS = 2**20 + 8
    OUTPUTS = 2**20 + 9
    DESIGN = 2**20 + 10
    DESIGN_NOISE = 2**20 + 11


# Noise is generated for blocks of data: `_BLOCK` data, or fewer where that would be more than `_NUMBERS` numbers for a
# sample. Both are part of what a seed means: other values give other samples of the same distribution. With 16 samples
# of 10 outputs, blocks of half (twice) the size took twice (half) the time for data in order, and half (twice) the
# memory.
_BLOCK, _NUMBERS = 256, 2**16


def _normal(shape: tuple[int, ...], *key: int) -> Tensor:
    """Standard normal numbers that depend on the key alone: not on device, default dtype or global generators."""
    # Seeds of a generator that differ in a few bits give correlated numbers: a hash of the key does not.
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    generator = torch.Generator("cpu").manual_seed(int(state) & (2**63 - 1))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class SeededNoise:
    """Standard normal `z`, `[K, N, C]`, generated when needed: a datum has the same numbers in every batch.

    Args:
        num_samples: `K`.
        num_outputs: `C`.
        seed: of the generator.
        stream: noise of other streams is independent.
        first: number of the first sample.
    """

    def __init__(self, num_samples: int, num_outputs: int, seed: int, stream: int, first: int = 0) -> None:
        self.num_samples, self.num_outputs, self.first = num_samples, num_outputs, first
        self.seed, self.stream = seed, stream
        self.rows = max(1, min(_BLOCK, _NUMBERS // num_outputs))
        # The last block: mini-batches in order, and all products of a pass, ask for it many times.
        self._last: tuple[int, Tensor] | None = None

    def _block(self, number: int) -> Tensor:
        if self._last is None or self._last[0] != number:
            shape = (self.rows, self.num_outputs)
            samples = range(self.first, self.first + self.num_samples)
            rows = [_normal(shape, self.seed, self.stream, k, number) for k in samples]
            self._last = (number, torch.stack(rows))
        return self._last[1]

    def parts(self, rows: int) -> list["SeededNoise"]:
        """Splits the noise into parts of at most `rows` samples."""
        starts = range(0, self.num_samples, rows)
        return [
            SeededNoise(min(rows, self.num_samples - k), self.num_outputs, self.seed, self.stream, self.first + k)
            for k in starts
        ]

    def __call__(self, batch: Tensor) -> Float[Tensor, "K n C"]:
        blocks = batch // self.rows
        out = torch.empty(self.num_samples, len(batch), self.num_outputs, dtype=torch.float32, device="cpu")
        for number in blocks.unique().tolist():
            in_block = blocks == number
            out[:, in_block] = self._block(number)[:, batch[in_block] % self.rows]
        return out


@dataclass(frozen=True)
class Draws:
    """The frozen randomness of `K` samples: white noise for the prior and for the data, of one seed.

    Sample `k` depends neither on the number of samples nor on the batch size. Streams of one seed are independent.
    These are the samples from number `first` on.
    """

    num_samples: int
    seed: int
    stream: int = 0
    first: int = 0

    def groups(self, rows: int) -> "list[Draws]":
        """Splits the draws into groups of at most `rows` samples."""
        starts = range(0, self.num_samples, rows)
        return [replace(self, num_samples=min(rows, self.num_samples - k), first=self.first + k) for k in starts]

    def prior(self, size: int) -> Float[Tensor, "K P"]:
        """Standard normal weights."""
        samples = range(self.first, self.first + self.num_samples)
        return torch.stack([_normal((size,), self.seed, 2 * self.stream, k) for k in samples])

    def noise(self, num_outputs: int) -> SeededNoise:
        """Standard normal noise of the data."""
        return SeededNoise(self.num_samples, num_outputs, self.seed, 2 * self.stream + 1, self.first)
