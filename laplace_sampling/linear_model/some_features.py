"""The features of some of the data."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace_sampling.linear_model.features import Curvature, DerivedFeatures, Features

if TYPE_CHECKING:
    from laplace_sampling.networks.layers import Outer

__all__ = ["SomeFeatures", "some_of"]


class SomeFeatures(DerivedFeatures):
    """The rows of `Φ` that belong to some data.

    Args:
        features: `Φ`.
        some: indices of the data.
    """

    def __init__(self, features: Features, some: Tensor) -> None:
        self.features, self.some = features, some
        self.num_data, self.num_outputs = len(some), features.num_outputs
        self.size, self.batch_size = features.size, features.batch_size

    def own(self, batch: Tensor) -> Tensor | slice:
        return self.features.own(self.some[batch])

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.features.jvp(v, self.some[batch])

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp(u, self.some[batch])

    def ggn(self, v: Tensor, batch: Tensor, curvature: Curvature) -> Tensor:
        return self.features.ggn(v, self.some[batch], curvature)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp_each(u, self.some[batch])

    def vjp_by_layers(self, u: Tensor, batch: Tensor) -> "list[Outer] | None":
        return self.features.vjp_by_layers(u, self.some[batch])

    def rows(self, batch: Tensor) -> Tensor:
        return self.features.rows(self.some[batch])


def some_of(features: Features, num: int, seed: int | None) -> Tensor:
    """Indices of a random part of the data, in order, or of the first ones."""
    if seed is None:
        return torch.arange(num)
    chosen = torch.randperm(features.num_data, generator=torch.Generator().manual_seed(seed))[:num]
    return chosen.sort().values
