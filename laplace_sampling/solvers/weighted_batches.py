"""Mini-batches of data drawn by their sizes, with weights."""

import torch
from torch import Tensor

# Indices and weights of data.
Batch = tuple[Tensor, Tensor]


class WeightedBatches:
    """Mini-batches of data drawn with probabilities by their sizes, and weights that make sums over them unbiased.

    No probability is below a tenth of a uniform one, roughly, because sizes are estimates. Over a set of mini-batches
    the draw is systematic: each datum comes as often as its probability says, up to one time. With equal sizes it comes
    once an epoch.
    """

    def __init__(self, sizes: Tensor, generator: torch.Generator) -> None:
        self.sizes = sizes
        floored = sizes.clamp_min(0) + 0.1 * sizes.mean()
        equal = not bool(floored.sum() > 0) or not bool(floored.isfinite().all())
        floored = torch.ones_like(sizes) if equal else floored
        self.probabilities, self.generator = floored / floored.sum(), generator

    def batches(self, number: int, size: int) -> list[Batch]:
        # Points at equal distances on the cumulated probabilities of the data in random order.
        total, num_data = number * size, len(self.probabilities)
        order = torch.randperm(num_data, generator=self.generator)
        offset = torch.rand(1, generator=self.generator, dtype=torch.float64)
        points = (torch.arange(total, dtype=torch.float64) + offset) / total
        drawn = order[torch.searchsorted(self.probabilities[order].cumsum(0), points).clamp_max(num_data - 1)]
        weights = 1 / (size * self.probabilities)
        # Every `number`-th point to a mini-batch: a datum that comes twice comes in two of them.
        parts = [drawn[i::number] for i in torch.randperm(number, generator=self.generator).tolist()]
        return [(part, weights[part]) for part in parts]
