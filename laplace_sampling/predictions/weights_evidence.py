r"""`WeightsEvidence`: the evidence of a regression with the trained weights in the place of the mode.

With `M = bM₁` and the residuals and weights of the network itself, `log p(y)` is largest where (MacKay 1992, eq. 4.9)

    α = γ/‖w̄‖²,   b = (N·C − γ)/Σ‖y − f‖²,   γ = Tr (M + α)⁻¹M,

in the scaled coordinates of the prior. `γ` is a function of the ratio `ρ = α/b` alone and falls with it, so that
`ρ = γ Σ‖y − f‖² / (‖w̄‖² (N·C − γ))` has exactly one solution. No mode of the linear model is searched for.
"""

import math
from dataclasses import dataclass

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.predictions.looks import Looks
from laplace_sampling.predictions.selection import Selected, Selection
from laplace_sampling.solvers.root import falling_root

__all__ = ["WeightsEvidence", "has_weights_evidence"]

# Of `log α`: predicted standard deviations go with its half.
_ACCURACY = 1e-3
# The part of the observations that stays free, so that the noise is never without a bound.
_FREE = 0.01


def has_weights_evidence(likelihood: Likelihood) -> bool:
    """Whether the noise is Gaussian, and that of the network's own residuals."""
    return isinstance(likelihood, Gaussian) and likelihood.noise_at == "network"


@dataclass(frozen=True)
class WeightsEvidence(Selection):
    """Prior and noise precision of largest evidence, with the trained weights in the place of the mode.

    Args:
        noise_bounds: within which the noise precision is kept.
    """

    noise_bounds: tuple[float, float]
    name = "weights_evidence"

    def looks(self, features: Features) -> Looks:
        return Looks(0, 0)

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Selected:
        likelihood = model.likelihood
        assert isinstance(likelihood, Gaussian)
        errors = (model.network_outputs - model.targets.reshape(model.network_outputs.shape)).double()
        squares, before = float(errors.square().sum()), float(likelihood.noise_precision)

        def noise(gamma: float) -> float:
            if not likelihood.learn:
                return before
            low, high = self.noise_bounds
            return min(max(max(errors.numel() - gamma, _FREE * errors.numel()) / max(squares, 1e-300), low), high)

        def excess(log_ratio: float) -> float:
            """`log γ/(b ‖w̄‖²) − log ρ`; the path is that of the noise before, for which `α = ρ b₀`."""
            gamma = path.effective_dimension(before * math.exp(log_ratio))
            return math.log(max(gamma, 1e-300) / max(noise(gamma) * weight_norm, 1e-300)) - log_ratio

        # The ratio lies within the bounds of `α`, whichever noise precision it belongs to.
        low, high = (math.log(bound) for bound in bounds)
        lows, highs = low - math.log(self.noise_bounds[1]), high - math.log(self.noise_bounds[0])
        start = min(max(-math.log(before), lows), highs)
        ratio = math.exp(falling_root(excess, start, (lows, highs), _ACCURACY)[0])
        gamma = path.effective_dimension(before * ratio)
        fitted = likelihood.with_precision(noise(gamma)) if likelihood.learn else likelihood
        alpha = min(max(ratio * noise(gamma), bounds[0]), bounds[1])
        # No product with the network is made.
        return Selected(alpha, fitted, Calibration(), gamma, passes=0.0)
