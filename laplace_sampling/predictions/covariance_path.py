"""`CovariancePath`: how certain the function is for every prior precision, from one decomposition of the curvature."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.preconditioners import Factored

__all__ = ["CovariancePath", "FactoredPath"]

# With more outputs than this, draws of the function come from samples of the weights: `C` rows of the Jacobian of a
# datum would cost more than its products with some samples.
_MOST_OUTPUTS = 32
# With more weights than this the samples are cheaper too: rows would have to be turned into the eigenvectors of the
# curvature. On 10,000 images a fit of LeNet (61,706 weights) took 17 s of processor time by rows, 5 by this number of
# samples and 7 by twice as many; α was 276, 233 and 225, for a CNN (26,874 weights) 1,106, 1,211 and 1,027.
_MOST_WEIGHTS, _SAMPLES = 10_000, 8


class CovariancePath(ABC):
    """The posterior covariance `φ(x) (M + αA₁)⁻¹ φ(x)ᵀ` of the function, for every prior precision `α`.

    The curvature `M` is the same for all `α`: it is taken at the network's outputs.

    Attributes:
        largest_eigenvalue: of `M` where `A₁` is one: for a larger `α` the prior decides.
        passes: Jacobian products that were spent on it, in units of all data and one vector.
        prior: with one precision.
    """

    largest_eigenvalue: float
    passes: float
    prior: GaussianPrior
    # What the method made for it, and uses again for the fit.
    work: Any = None

    @abstractmethod
    def covariances(self, features: Features, alphas: Float[Tensor, " A"]) -> Float[Tensor, "A N C C"]:
        """The covariance of the outputs of each datum."""

    @abstractmethod
    def effective_dimension(self, alpha: float) -> float:
        """`γ = Tr (M + αA₁)⁻¹M`."""

    def prior_variance(self, features: Features, draws: Draws) -> float:
        """An estimate of the mean variance of an output under the prior, at `α = 1`."""
        scale = self.prior.scale.to(features.device, features.dtype)
        return float(features.outputs(draws.prior(features.size).to(scale) * scale).double().square().mean())

    def products(self, features: Features, num_alphas: int, draws: Draws) -> float:
        """JVPs and VJPs that `deviations` takes, in units of one datum and one vector."""
        return float(features.num_data * features.num_outputs)

    def deviations(
        self, features: Features, alphas: Float[Tensor, " A"], draws: Draws
    ) -> Iterator[Float[Tensor, "K N C"]]:
        """Draws of `N(0, φ_i (M + αA₁)⁻¹ φ_iᵀ)` of each datum for one `α` after the other, of the same white noise."""
        # Outputs of one datum are drawn jointly, those of different data need not be.
        white = draws.noise(features.num_outputs)(torch.arange(features.num_data)).double().to(features.device)
        for covariance in self.covariances(features, alphas):
            values, vectors = torch.linalg.eigh(covariance)
            root = vectors * values.clamp_min(0).sqrt()[:, None]
            yield torch.einsum("ncd,knd->knc", root, white)


@dataclass(frozen=True)
class FactoredPath(CovariancePath):
    """The path of a curvature of which all functions are closed forms.

    Attributes:
        curvature: `M̂` in the scaled coordinates of the prior.
        prior: with one precision.
        block_bytes: memory for rows of the Jacobian.
        for_fit: whether a fit uses the curvature again; else it is freed once the precision is chosen.
    """

    curvature: Factored
    prior: GaussianPrior  # pyright: ignore[reportIncompatibleVariableOverride]
    block_bytes: float = BLOCK_BYTES
    for_fit: bool = True

    @property
    def largest_eigenvalue(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return float(self.curvature.eigenvalues().max())

    @property
    def passes(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.curvature.passes

    @property
    def work(self) -> Factored | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.curvature if self.for_fit else None

    def covariances(self, features: Features, alphas: Tensor) -> Tensor:
        most = max(1, int(self.block_bytes / (16 * features.num_outputs * features.size)))
        parts = []
        for batch in torch.arange(features.num_data).split(min(most, features.batch_size)):
            rows = features.rows(batch) * self.prior.scale.to(features.device, features.dtype)
            parts.append(self.curvature.covariances(rows, alphas))
        return torch.cat(parts, dim=1)

    def effective_dimension(self, alpha: float) -> float:
        return self.curvature.dimension(alpha)

    def products(self, features: Features, num_alphas: int, draws: Draws) -> float:
        if _by_rows(features):
            return super().products(features, num_alphas, draws)
        return float(features.num_data * num_alphas * min(_SAMPLES, draws.num_samples))

    def deviations(self, features: Features, alphas: Tensor, draws: Draws) -> Iterator[Tensor]:
        if _by_rows(features):
            yield from super().deviations(features, alphas, draws)
            return
        white = (
            replace(draws, num_samples=min(_SAMPLES, draws.num_samples))
            .prior(features.size)
            .to(features.device, features.dtype)
        )
        for alpha in alphas.tolist():
            samples = self.curvature.solve_root(white, alpha).to(white) * self.prior.scale.to(white)
            yield features.outputs(samples).double()


def _by_rows(features: Features) -> bool:
    """Whether rows of the Jacobian are cheaper than products with samples of the weights."""
    return features.num_outputs <= _MOST_OUTPUTS and features.size <= _MOST_WEIGHTS
