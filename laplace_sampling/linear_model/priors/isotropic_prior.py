"""The prior of one variance for all weights."""

from dataclasses import dataclass

import torch

from laplace_sampling.linear_model.ggn import GGN, WhiteNoise
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Layers, Prior, ungrouped

__all__ = ["IsotropicPrior"]


@dataclass(frozen=True)
class IsotropicPrior(Prior):
    """`A = α I`. In networks with normalisation the error bars then depend on the arbitrary scale of the weights.

    Args:
        precision: starting value of `α`.
    """

    def build(self, ggn: GGN, layers: Layers, noise: WhiteNoise) -> GaussianPrior:
        return ungrouped(torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype), self.precision)
