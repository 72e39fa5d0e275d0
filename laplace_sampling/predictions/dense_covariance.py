"""The covariance of the function in weight space, `φ(x) H⁻¹ φ(x)ᵀ`, by a factor of `H`: for small problems."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.solvers.dense import Factor
from laplace_sampling.solvers.operator import Operator


class Solves(Protocol):
    """An object that computes `H⁻¹v` of rows."""

    def solve(self, rhs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DenseCovariance(FunctionCovariance):
    """The covariance at some inputs.

    Attributes:
        features: `φ(x)`.
        prior: `A`.
        factor: solves with `H` in the scaled coordinates of the prior.
        precise: whether rows are computed in float64 where the network allows, once they are asked for.
    """

    features: Features
    prior: GaussianPrior
    factor: Solves
    precise: bool = False

    @cached_property
    def _rows_of(self) -> Features:
        return self.features.in_float64() if self.precise else self.features

    @staticmethod
    def tensors(operator: Operator, prior: GaussianPrior) -> dict[str, Tensor]:
        """A factor of `H` as tensors, to be kept.

        Args:
            operator: `M` in scaled coordinates.
            prior: `A`.
        """
        factor = Factor.of(operator, prior.spread())
        return {"factor": factor.factor} if factor.root is None else {"factor": factor.factor, "root": factor.root}

    @classmethod
    def of(cls, features: Features, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "DenseCovariance":
        """The covariance at some inputs, from what `tensors` gave.

        In float64 where the network allows: where the data decide much, it is a difference of much larger numbers.
        """
        factor = Factor(prior.spread().double(), tensors["factor"], tensors.get("root"))
        return cls(features, prior, factor, precise=True)

    def _parts(self) -> list[Float[Tensor, "n C C"]]:
        features = self.features
        most = max(1, int(BLOCK_BYTES / (16 * features.num_outputs * features.size)))
        batches = torch.arange(features.num_data).split(min(most, features.batch_size))
        blocks = []
        for batch in batches:
            rows = self._rows_of.rows(batch).double() * self.prior.scale.double()
            solved = self.factor.solve(rows.flatten(0, 1)).reshape(rows.shape)
            block = rows @ solved.mT
            blocks.append((block + block.mT) / 2)
        return blocks

    def blocks(self) -> Float[Tensor, "N C C"]:
        return torch.cat(self._parts())

    def variance(self) -> Float[Tensor, "N C"]:
        return torch.cat([block.diagonal(dim1=1, dim2=2) for block in self._parts()]).clamp_min(0)

    def joint(self) -> Float[Tensor, "NC NC"]:
        rows = torch.cat([self._rows_of.rows(batch).double() for batch in self.features.chunks()]).flatten(0, 1)
        rows = rows * self.prior.scale.double()
        covariance = rows @ self.factor.solve(rows).T
        return (covariance + covariance.T) / 2
