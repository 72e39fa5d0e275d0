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
from dataclasses import dataclass, replace

import torch

from laplace_sampling.evidence.curves import EvidencePath, MarginalLikelihood
from laplace_sampling.solvers.root import falling_root

__all__ = ["NetworkEvidence"]

# Of `log α`: the evidence is flat at its maximum.
_ACCURACY = 1e-6
_LOG_BOUNDS = math.log(1e-12), math.log(1e15)


@dataclass(frozen=True)
class NetworkEvidence:
    """The evidence of a network as a function of the prior precision, and of the noise precision.

    Attributes:
        path: traces of the curvature at the network's outputs; its data fit and its mode are not looked at.
        loss: `Σ_i ℓ(y_i, f_i)` of the network.
        weight_norm: `‖w̄‖²` in the scaled coordinates of the prior.
    """

    path: EvidencePath
    loss: float
    weight_norm: float

    @property
    def _constant(self) -> float:
        """The part of the loss of a Gaussian likelihood that is not `½ b Σ(y − f)²`."""
        assert self.path.noise_precision is not None
        return 0.5 * self.path.num_outputs * math.log(2 * math.pi / self.path.noise_precision)

    def at(self, alpha: float) -> MarginalLikelihood:
        """At a prior precision."""
        a = torch.tensor([alpha], dtype=torch.float64)
        determinant, error = (float(v) for v in self.path.log_determinant(a))
        energy = alpha * self.weight_norm
        balance = None
        if self.path.noise_precision is not None:
            balance = (2 * (self.loss - self._constant) + energy) / self.path.num_outputs
        return MarginalLikelihood(
            value=-self.loss - 0.5 * energy - 0.5 * determinant,
            standard_error=0.0 if self.path.exact else 0.5 * error,
            lower_bound=-self.loss - 0.5 * energy - 0.5 * float(self.path.log_determinant_bound(a)),
            data_fit=self.loss,
            complexity=0.5 * energy + 0.5 * determinant,
            balance=balance,
            exact=self.path.exact,
            at="network",
        )

    def best(self, learn_noise: bool) -> tuple[float, float, "NetworkEvidence"]:
        """Where the evidence is largest: `α` at the present noise precision and at the best, and the evidence at that.

        They are the same where no noise precision is learnt.
        """

        def excess(log_alpha: float) -> float:
            alpha = torch.tensor([log_alpha], dtype=torch.float64).exp()
            gamma, energy = float(self.path.effective_dimension(alpha)[0]), float(alpha) * self.weight_norm
            return math.log(max(gamma, 1e-300)) - math.log(max(energy * self._factor(energy, learn_noise), 1e-300))

        log_ratio, _ = falling_root(excess, math.log(self.path.at), _LOG_BOUNDS, _ACCURACY)
        ratio = math.exp(log_ratio)
        if not learn_noise:
            return ratio, ratio, self
        # `ratio` is the prior precision before both it and the noise precision grow by a factor.
        factor = self._factor(ratio * self.weight_norm, learn_noise)
        noise_precision = factor * (self.path.noise_precision or 1.0)
        constant = 0.5 * self.path.num_outputs * math.log(2 * math.pi / noise_precision)
        loss = factor * (self.loss - self._constant) + constant
        return ratio, ratio * factor, replace(self, path=self.path.rescaled(factor), loss=loss)

    def _factor(self, energy: float, learn_noise: bool) -> float:
        """By which the noise precision grows to its maximum, for a ratio of both precisions."""
        if not learn_noise:
            return 1.0
        return self.path.num_outputs / max(2 * (self.loss - self._constant) + energy, 1e-300)
