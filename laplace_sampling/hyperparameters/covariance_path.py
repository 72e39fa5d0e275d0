r"""`CovariancePath`: the posterior covariance of the function for every prior precision, and draws from it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.head import head_covariances, head_inputs
from laplace_sampling.curvature.low_rank import Sketch
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.recorded import recorded

# With more outputs than this, draws of the function come from samples of the weights: `C` rows of the Jacobian of a
# datum would cost more than its products with some samples.
_MOST_OUTPUTS = 32


# With more weights than this the samples are cheaper too, as rows would have to be turned into the eigenvectors of the
# curvature: on 10,000 images a fit of LeNet (61,706 weights) took 17 s of processor time by rows, and 5 by 8 samples.
_MOST_WEIGHTS, _SAMPLES = 2000, 8


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
        """The covariance of the outputs of each datum at each precision."""

    @abstractmethod
    def effective_dimension(self, alpha: float) -> float:
        """`γ = Tr (M + αA₁)⁻¹M`."""

    def prior_variance(self, features: Features, draws: Draws) -> float:
        """An estimate of the mean variance of an output under the prior, at `α = 1`."""
        scale = self.prior.scale.to(features.device, features.dtype)
        return float(features.outputs(draws.prior(features.size).to(scale) * scale).double().square().mean())


@dataclass(frozen=True)
class FactoredPath(CovariancePath):
    """The path of a curvature of which all functions are closed forms.

    Attributes:
        curvature: `M̂` in the scaled coordinates of the prior.
        prior: with one precision.
        block_bytes: memory for rows of the Jacobian.
        for_fit: whether a fit uses the curvature again; else it is freed once the precision is chosen.
    """

    curvature: Curvature | Sketch
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
    def work(self) -> Curvature | Sketch | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.curvature if self.for_fit else None

    @recorded
    def covariances(self, features: Features, alphas: Tensor) -> Tensor:
        most = max(1, int(self.block_bytes / (16 * features.num_outputs * features.size)))
        parts = []
        for batch in torch.arange(features.num_data).split(min(most, features.batch_size)):
            rows = features.rows(batch) * self.prior.scale.to(features.device, features.dtype)
            parts.append(self.curvature.covariances(rows, alphas))
        return torch.cat(parts, dim=1)

    def effective_dimension(self, alpha: float) -> float:
        return self.curvature.dimension(alpha)

    def draws(self, features: Features, alpha: float, draws: Draws) -> Float[Tensor, "K N C"]:
        """Draws of the function at one precision, by samples of the weights."""
        scale = self.prior.scale.to(features.device, features.dtype)
        # White noise, samples and what they are made of.
        together = max(1, int(self.block_bytes / (8 * scale.element_size() * features.size)))

        def outputs(group: Draws) -> Tensor:
            white = group.prior(features.size).to(scale)
            return features.outputs(self.curvature.solve_root(white, alpha).to(scale) * scale).double()

        return torch.cat([outputs(group) for group in draws.groups(together)])


@dataclass(frozen=True)
class HeadPath(FactoredPath):
    """The path of a linear layer: its inputs take the place of rows."""

    def covariances(self, features: Features, alphas: Float[Tensor, " A"]) -> Float[Tensor, "A N C C"]:
        parts = []
        for batch in features.chunks():
            found = head_inputs(features, batch)
            if found is None:  # validation data of a network whose layer was not found
                return super().covariances(features, alphas)
            assert isinstance(self.curvature, Curvature)
            parts.append(head_covariances(self.curvature, *found, alphas, self.prior.scale))
        return torch.cat(parts, dim=1)


def function_draws(
    path: CovariancePath, features: Features, alphas: Float[Tensor, " A"], draws: Draws
) -> Callable[[int], Float[Tensor, "K N C"]]:
    """Draws of `N(0, φ_i (M + αA₁)⁻¹ φ_iᵀ)` of each datum, by the index of a precision; all are of one white noise.

    Args:
        path: the posterior for every prior precision.
        features: `φ`.
        alphas: the precisions.
        draws: how many, and of which noise.
    """
    if isinstance(path, FactoredPath) and not by_rows(features):
        few = replace(draws, num_samples=num_samples(draws.num_samples))
        return lambda index: path.draws(features, float(alphas[index]), few)
    # Outputs of one datum are drawn jointly, those of different data need not be.
    white = draws.noise(features.num_outputs)(torch.arange(features.num_data)).double().to(features.device)
    covariances = path.covariances(features, alphas)

    def draw(index: int) -> Float[Tensor, "K N C"]:
        values, vectors = torch.linalg.eigh(covariances[index])
        # The symmetric root: another sign of an eigenvector, as on another device, would be another draw.
        root = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT
        return torch.einsum("ncd,knd->knc", root, white)

    return draw


def by_rows(features: Features) -> bool:
    """Whether rows of the Jacobian are cheaper than products with samples of the weights."""
    return features.num_outputs <= _MOST_OUTPUTS and features.size <= _MOST_WEIGHTS


def num_samples(num_draws: int) -> int:
    """Samples of the weights that give draws of the function."""
    return min(_SAMPLES, num_draws)
