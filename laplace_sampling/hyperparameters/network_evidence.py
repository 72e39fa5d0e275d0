r"""The evidence at the network's own weights, by which networks of any architecture are compared.

Laplace's approximation where the network is, with the curvature at its outputs:

    log p(y) = −Σ_i ℓ(y_i, f(w̄, x_i)) − ½ w̄ᵀAw̄ − ½ log|I + A⁻¹M|.

The evidence at the mode of the linear model is that of another predictor, which fits the training data better than the
network does: it says how good the features are, and not how good the network is.

The prior precision at the maximum has `α ‖w̄‖² = γ(α)`, a single root. A noise precision that is learnt is at its
maximum for each ratio `ρ = α/b`, `b = N·C / (Σ(y − f)² + ρ‖w̄‖²)`, so that the maximum over both is a single root as
well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.hyperparameters.covariance_path import CovariancePath, FactoredPath
from laplace_sampling.hyperparameters.curves import MarginalLikelihood, Traces
from laplace_sampling.hyperparameters.hyperparameters import Hyperparameters, clamped, in_one_step, mackay_root
from laplace_sampling.hyperparameters.rules import SearchCost, Selection
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.predictions.calibration import Calibration

# Far beyond any precision, and an accuracy of `log α` at which the evidence, flat at its maximum, is exact.
_BOUNDS, _ACCURACY = (1e-12, 1e15), 1e-6


# How far from the precision of a fit traces are asked for, in decades, and how often they are made nearer to the best.
DECADES, _RUNS = 1.0, 4


@dataclass(frozen=True)
class NetworkEvidence:
    """The evidence of a network as a function of the prior precision, and of a factor of the noise precision.

    Attributes:
        traces: of the curvature at the network's outputs.
        loss: `Σ_i ℓ(y_i, f_i)` of the network.
        weight_norm: `‖w̄‖²` in coordinates in which the prior has one precision.
        num_outputs: `N·C`.
        constant: the part of the loss of a Gaussian likelihood that is not `½ b Σ(y − f)²`; `None` where no noise
            precision is learnt.
    """

    traces: Traces
    loss: float
    weight_norm: float
    num_outputs: int
    constant: float | None

    @classmethod
    def of(
        cls, model: LinearModel, prior: GaussianPrior, weights: Float[Tensor, " P"], traces: Traces
    ) -> "NetworkEvidence":
        """The evidence of the network of a linear model, for a prior of the weights `w̄`."""
        weights, noise, num = weights.double(), model.likelihood.noise_precisions(), model.num_observations
        norm = float((prior.diagonal().to(weights) * weights**2).sum()) / overall_precision(prior)
        learnt = model.likelihood.learns_noise and noise is not None and noise.dim() == 0
        constant = 0.5 * num * math.log(2 * math.pi / float(noise)) if learnt and noise is not None else None
        return cls(traces, model.total_loss(model.network_outputs.double()), norm, num, constant)

    def at(self, alpha: float, factor: float = 1.0) -> MarginalLikelihood:
        """The evidence at a prior precision, and at a noise precision that is larger by a factor."""
        loss = self.loss
        if factor != 1:
            assert self.constant is not None
            loss = factor * (loss - self.constant) + self.constant - 0.5 * self.num_outputs * math.log(factor)
        # `M` is proportional to the noise precision.
        return MarginalLikelihood.of(self.traces, alpha / factor, loss, alpha * self.weight_norm, "network")

    def best(self) -> tuple[float, float]:
        """The prior precision of largest evidence, and the factor of the noise precision."""

        def energy(ratio: float) -> float:
            return ratio * self.weight_norm * self._factor(ratio)

        def dimension(ratio: float) -> float:
            return float(self.traces.effective_dimension(torch.tensor([ratio], dtype=torch.float64))[0])

        ratio, _ = mackay_root(dimension, energy, self.traces.at, _BOUNDS, _ACCURACY)
        return ratio * self._factor(ratio), self._factor(ratio)

    def _factor(self, ratio: float) -> float:
        """By which the noise precision grows to its maximum, for a ratio of both precisions."""
        if self.constant is None:
            return 1.0
        return self.num_outputs / max(2 * (self.loss - self.constant) + ratio * self.weight_norm, 1e-300)


def best_network_evidence(
    model: LinearModel,
    prior: GaussianPrior,
    weights: Float[Tensor, " P"],
    traces_of: Callable[[GaussianPrior], Traces],
) -> tuple[float, MarginalLikelihood]:
    """Finds the prior precision at which the evidence of the network is largest; returns it and the evidence there.

    A noise precision that is learnt, if it is a single one, is set to its best value for each prior precision; others
    keep their values. Several prior precisions keep their ratios, and the returned number is their geometric mean over
    the weights. Where traces are not exact and the maximum is more than `DECADES` from the precision that they were
    made at, they are made again nearer to it, up to `_RUNS` times in all.

    Args:
        model: the linear model on the training data.
        prior: the prior of the weights, near whose precisions the traces are made first.
        weights: the trained weights `w̄`.
        traces_of: makes traces that are accurate within `DECADES` of the precision of the prior that it is given.
    """
    runs = 1
    while True:
        evidence = NetworkEvidence.of(model, prior, weights, traces_of(prior))
        alpha, factor = evidence.best()
        away = alpha / factor / evidence.traces.at
        if evidence.traces.exact or runs == _RUNS or abs(math.log10(away)) <= DECADES:
            return alpha, evidence.at(alpha, factor)
        prior, runs = prior.with_precision(prior.precision * away), runs + 1


@dataclass(frozen=True)
class ByNetworkEvidence(Selection):
    """Chooses precisions of prior and noise of largest evidence at the network's own weights, for a regression.

    The maximum is a root along the spectrum of Kronecker factors, where that of the evidence of the linear model takes
    a search for the mode on all data at each precision that is tried.

    Args:
        weights: `w̄`.
        noise_bounds: within which the noise precision is kept.
    """

    weights: Float[Tensor, " P"]
    noise_bounds: tuple[float, float]
    name = "network_evidence"

    def cost(self, features: Features, *, rough: bool = True) -> SearchCost:
        return SearchCost()

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Hyperparameters:
        likelihood = model.likelihood
        assert isinstance(likelihood, Gaussian)
        assert isinstance(path, FactoredPath)
        traces = Traces.of_eigenvalues(path.curvature.eigenvalues(), overall_precision(path.prior))
        alpha, factor = NetworkEvidence.of(model, path.prior, self.weights, traces).best()
        alpha, before = clamped(alpha, bounds), float(likelihood.noise_precisions())
        if likelihood.learn:
            likelihood = likelihood.with_precision(clamped(before * factor, self.noise_bounds))
        # The path is that of the noise before. No product with the network is made.
        gamma = path.effective_dimension(alpha * before / float(likelihood.noise_precisions()))
        return in_one_step(
            model,
            path.prior,
            alpha,
            likelihood,
            effective_dimension=gamma,
            passes=0.0,
            criterion=self.name,
            calibration=Calibration(),
        )
