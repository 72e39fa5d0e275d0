r"""Each training datum predicted from the others, from the posterior covariance of its outputs.

With `Σ_i` the covariance of the outputs of datum `i`, taking it out leaves, to first order (exactly for a Gaussian
likelihood),

    Σ_i^{-i} = Σ_i (I − B_i Σ_i)⁻¹,      h_i^{-i} = h_i + Σ_i^{-i} ∂ℓ/∂h_i.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.solvers.placement import normal

__all__ = ["LeaveOneOut", "leave_one_out"]

# Samples of all data that are in memory together: a definition; the draws do not depend on it.
_SAMPLES = 16


@dataclass(frozen=True)
class LeaveOneOut:
    """Predictions of each datum from the others by the linear model; its features have still seen the datum.

    Attributes:
        mean: predicted targets, `[N, C]`; predicted outputs where the likelihood is not Gaussian.
        covariance: of these, `[N, C, C]`; it includes the noise for a Gaussian likelihood.
        log_prob: log density of each datum, joint over those of its outputs that have a target, `[N]`.
    """

    mean: Float[Tensor, "N C"]
    covariance: Float[Tensor, "N C C"]
    log_prob: Float[Tensor, " N"]

    @classmethod
    def gaussian(
        cls, mean: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"], targets: Float[Tensor, "N C"]
    ) -> "LeaveOneOut":
        """Predictions of Gaussian targets, with their log density; the covariance includes the noise."""
        return cls(mean, covariance, log_density(targets - mean, covariance))

    def scaled(self, unit: Float[Tensor, "N C"], given: Bool[Tensor, "N C"]) -> "LeaveOneOut":
        """The predictions of targets that are multiplied by `unit`; `given` says which there are."""
        covariance = self.covariance * unit[:, :, None] * unit[:, None]
        return LeaveOneOut(self.mean * unit, covariance, self.log_prob - unit.log().where(given, 0).sum(1))


def leave_one_out(
    likelihood: Likelihood,
    targets: Tensor,
    mode_outputs: Float[Tensor, "N C"],
    curvature_outputs: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C C"],
    num_samples: int = 512,
    seed: int = 0,
) -> LeaveOneOut:
    r"""Predictions of each datum from the others.

    Args:
        likelihood: of the targets.
        targets: `y`.
        mode_outputs: `h(θ̄, x_i)`.
        curvature_outputs: where `B` is taken.
        covariance: `Σ_i`, without noise.
        num_samples: over which the likelihood is averaged, if it is not Gaussian.
        seed: of these.
    """
    N, C = mode_outputs.shape
    eye = torch.eye(C).to(covariance)
    B = likelihood.curvature(curvature_outputs, eye[:, None].expand(C, N, C), targets).permute(1, 0, 2)
    # The data's precision `Σ_i⁻¹ − B_i` would do, but `Σ_i` may be singular: the inverse is of `I − BΣ` instead.
    left_out = covariance @ torch.linalg.inv(eye - B @ covariance)
    # Rounding leaves two different triangles, which a normal distribution refuses.
    left_out = (left_out + left_out.mT) / 2
    gradient = likelihood.gradient(mode_outputs, targets)
    mean = mode_outputs + (left_out @ gradient[..., None])[..., 0]
    if isinstance(likelihood, Gaussian):
        noise = torch.diag_embed((1 / likelihood.precision(mean)).expand(N, C))
        return LeaveOneOut.gaussian(mean, left_out + noise, targets.reshape(N, C).to(mean))
    values, vectors = torch.linalg.eigh(left_out)
    # The symmetric root: another sign of an eigenvector would be another draw.
    root = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    # The log density is that of one observation: a weight says how often a datum counts, not how likely it is.
    unweighted, targets = likelihood.unweighted, likelihood.unweighted_targets(targets)
    generator, logs = torch.Generator().manual_seed(seed), []
    for part in torch.arange(num_samples).split(_SAMPLES):
        white = normal(len(part), N, C, seed=generator, dtype=root.dtype, device=root.device, drawn_in=torch.float64)
        drawn = mean + torch.einsum("ncd,knd->knc", root, white)
        logs.append(unweighted.log_parts(drawn, targets).logsumexp(0))
    log_prob = unweighted.together(torch.stack(logs).logsumexp(0) - math.log(num_samples), targets)
    return LeaveOneOut(mean, left_out, log_prob)
