"""The posterior covariance for every prior precision, from one decomposition of the Gram matrix."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.gram_posterior import GramPosterior
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.solvers.recorded import recorded

__all__ = ["GramPath"]


@dataclass(frozen=True)
class GramPath(CovariancePath):
    """The path of a posterior in observation space, whose own precision does not matter."""

    posterior: GramPosterior
    prior: GaussianPrior  # pyright: ignore[reportIncompatibleVariableOverride]
    num_outputs: int

    @property
    def largest_eigenvalue(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._noise * self.posterior.largest_eigenvalue

    @property
    def passes(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_outputs / 2

    @property
    def work(self) -> GramPosterior:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.posterior

    @property
    def _noise(self) -> float:
        """`b`, which the eigenvalues of the Gram matrix do not contain; one where they do."""
        return self.posterior.precisions[1]

    @recorded
    def covariances(self, features: Features, alphas: Float[Tensor, " A"]) -> Float[Tensor, "A N C C"]:
        prediction = self.posterior.predict(features.in_float64())
        return torch.stack([prediction.covariance(alpha, self._noise) for alpha in alphas.tolist()])

    def effective_dimension(self, alpha: float) -> float:
        eigenvalues = self._noise * self.posterior.eigenvalues
        return float((eigenvalues / (eigenvalues + alpha)).sum())
