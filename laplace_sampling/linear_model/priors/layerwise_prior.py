"""The prior of one variance for each layer."""

from dataclasses import dataclass

import torch

from laplace_sampling.linear_model.ggn import GGN, WhiteNoise
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Layers, Prior

__all__ = ["LayerwisePrior"]


@dataclass(frozen=True)
class LayerwisePrior(Prior):
    """`A = α_l I` within each layer `l` (the weights owned by one module): thesis §5.3, Rec. 2.

    Args:
        precision: starting value of all `α_l`.
    """

    def build(self, ggn: GGN, layers: Layers, noise: WhiteNoise) -> GaussianPrior:
        names, groups = layers
        scale = torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype)
        precisions = torch.full((len(names),), float(self.precision), dtype=torch.float64)
        return GaussianPrior(precisions, groups.to(ggn.device), scale, tuple(names))
