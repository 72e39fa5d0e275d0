"""The prior of one variance for each layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from laplace_sampling.linear_model.ggn import GGN, WhiteNoise
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Layers, Prior
from laplace_sampling.solvers.checks import check_positive

__all__ = ["LayerwisePrior"]


@dataclass(frozen=True)
class LayerwisePrior(Prior):
    """`A = α_l I` within each layer `l` (the weights owned by one module): thesis §5.3, Rec. 2.

    Args:
        precision: starting value of all `α_l`.
        layers: those of single layers, by the names of their modules, as `train_by_evidence` finds them.

    Raises:
        TypeError, ValueError: for a precision that is not positive; in a fit, for names of no layer with random
            weights.
    """

    layers: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.layers, Mapping):
            raise TypeError(
                f"`LayerwisePrior(layers=...)` must be precisions by the names of layers, but is {self.layers!r:.80}."
            )
        for name, precision in self.layers.items():
            check_positive(f"`LayerwisePrior(layers={{{name!r}: ...}})`", precision)

    def build(self, ggn: GGN, layers: Layers, noise: WhiteNoise) -> GaussianPrior:
        names, groups = layers
        if unknown := [name for name in self.layers if name not in names]:
            raise ValueError(
                f"`LayerwisePrior(layers=...)` names {unknown}, which have no random weights; the layers that have "
                f"some are {names}."
            )
        scale = torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype)
        precisions = [float(self.layers.get(name, self.precision)) for name in names]
        return GaussianPrior(torch.tensor(precisions, dtype=torch.float64), groups.to(ggn.device), scale, tuple(names))
