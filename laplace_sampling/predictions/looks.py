"""`Looks`: what a rule for the prior precision looks at, and what that costs; plan and rule share it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.features import Features
from laplace_sampling.predictions.covariance_path import by_rows, num_samples

__all__ = ["DECADE", "Looks", "decades"]

# Of the data one in so many is looked at first, but for these few, at one precision in so many of the grid: a decade.
_PART, _FEW, DECADE = 3, 32, 3
# Precisions at which it looks at a part of the data, typically: 3 to 5 for an MLP on 1,200 digits, 4 for a CNN on 1,000
# images.
_ROUGH = 6
# Data that are looked at, at least: with fewer the choice is chance.
_LEAST = 50


@dataclass(frozen=True)
class Looks:
    """Part of the data at precisions a decade apart says where to look; all of them decide, at a few precisions there.

    Attributes:
        num_data: how many data in all.
        num_draws: of the function at a datum, each with its opposite.
        rows: whether it takes rows of the Jacobian, however many weights there are.
        near: at how many precisions it looks at all data, typically.
        num_vjps: VJPs of a datum that it makes besides.
    """

    num_data: int
    num_draws: int
    rows: bool = False
    near: int = 3
    num_vjps: int = 0

    @property
    def part(self) -> Tensor:
        """Indices of the part."""
        return torch.arange(0, self.num_data, min(_PART, max(1, self.num_data // _FEW)))

    def products(self, features: Features, *, rough: bool = True) -> float:
        """JVPs or VJPs that a search is predicted to take, in units of one datum and one vector.

        Args:
            features: of data of the same kind.
            rough: whether it looks at the part; else it is known where to look.
        """
        num_rough = len(self.part) if rough else 0
        if self._by_rows(features):
            return float(features.num_outputs * (num_rough + self.num_data))
        return float(num_samples(self.num_draws) * (num_rough * _ROUGH + self.num_data * self.near))

    def vectors(self, features: Features, *, rough: bool = True) -> float:
        """Products of the curvature's eigenvectors with a vector of weights, likewise."""
        if self._by_rows(features):
            return self.products(features, rough=rough)
        # A root of the covariance goes to the eigenvectors and back.
        return 2.0 * num_samples(self.num_draws) * (self.near + (_ROUGH if rough else 0))

    def operations(self, features: Features, cost: Cost, *, rough: bool = True) -> float:
        """The same in floating-point operations."""
        each = cost.vjp if self._by_rows(features) else cost.jvp
        return self.products(features, rough=rough) * each + self.num_vjps * cost.vjp

    def within(self, features: Features, cost: Cost, operations: float) -> "Looks":
        """The same with as many data as so many operations pay for, and with a few at least."""
        others = self.num_vjps * cost.vjp
        part = max(0.0, operations - others) / (self.operations(features, cost) - others)
        return self if part >= 1 else replace(self, num_data=max(min(_LEAST, self.num_data), int(part * self.num_data)))

    def _by_rows(self, features: Features) -> bool:
        return self.rows or by_rows(features)


def decades(number: int) -> list[int]:
    """Indices of a grid of precisions that are a decade apart, and the last one."""
    found = list(range(0, number, DECADE))
    return found if found[-1] == number - 1 else [*found, number - 1]
