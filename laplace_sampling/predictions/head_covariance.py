"""The covariance of the outputs of a linear last layer, from its inputs: no row of the Jacobian is formed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.head_covariances import has_head_covariances, head_covariances, head_variances
from laplace_sampling.linear_model.head_curvature import head_inputs, head_of
from laplace_sampling.linear_model.kronecker import Inverse
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.covariance_path import FactoredPath
from laplace_sampling.predictions.dense_covariance import DenseCovariance
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.solvers.preconditioners import Factored


@dataclass(frozen=True)
class HeadCovariance(FunctionCovariance):
    """`φ(x) (M̂ + A)⁻¹ φ(x)ᵀ` for `φ = I ⊗ hᵀ`.

    Attributes:
        features: `φ(x)`, of a linear layer.
        prior: `A`, with one precision.
        curvature: `M̂` in the scaled coordinates of the prior.
    """

    features: Features
    prior: GaussianPrior
    curvature: Factored

    def blocks(self) -> Float[Tensor, "N C C"]:
        found = head_inputs(self.features, torch.arange(self.features.num_data))
        assert found is not None
        return head_covariances(self.curvature, *found, self.prior.precision, self.prior.scale)[0]

    def variance(self) -> Float[Tensor, "N C"]:
        found = head_inputs(self.features, torch.arange(self.features.num_data))
        assert found is not None
        return head_variances(self.curvature, *found, self.prior.precision[0], self.prior.scale)

    def joint(self) -> Float[Tensor, "NC NC"]:
        return DenseCovariance(self.features, self.prior, Inverse(self.curvature, self.prior.spread())).joint()


@dataclass(frozen=True)
class HeadPath(FactoredPath):
    """The path of a linear layer: its inputs take the place of rows."""

    def covariances(self, features: Features, alphas: Float[Tensor, " A"]) -> Float[Tensor, "A N C C"]:
        parts = []
        for batch in features.chunks():
            found = head_inputs(features, batch)
            if found is None:  # validation data of a network whose layer was not found
                return super().covariances(features, alphas)
            assert isinstance(self.curvature, Factored)
            parts.append(head_covariances(self.curvature, *found, alphas, self.prior.scale))
        return torch.cat(parts, dim=1)


def factored_covariance(features: Features, prior: GaussianPrior, curvature: Factored) -> FunctionCovariance:
    """The covariance of a factored posterior at some inputs, from those of a linear layer if features are of one."""
    if head_of(features) is not None and len(prior.precision) == 1 and has_head_covariances(curvature):
        return HeadCovariance(features, prior, curvature)
    return DenseCovariance(features, prior, Inverse(curvature, prior.spread()))
