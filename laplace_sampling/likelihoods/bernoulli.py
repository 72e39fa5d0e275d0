"""Binary and multi-label targets."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.labels import Labels
from laplace_sampling.likelihoods.likelihood import DiagonalLikelihood, check_target_shape, has_targets, residuals


@dataclass(frozen=True)
class Bernoulli(Labels, DiagonalLikelihood):
    r"""`y_c ~ sigmoid(f_c)`, each output by itself: binary (`C = 1`) or multi-label; `B = diag(p(1 − p))`.

    Targets are 0 or 1, or proportions between: a target of 0.3 counts as a one with a weight of 0.3 and a zero with a
    weight of 0.7, and has the cross-entropy of `torch.nn.BCEWithLogitsLoss`. A target of NaN is missing: its output
    does not count.
    """

    name: str = field(default="binary", init=False)

    # The softmax of `(0, f)` is `(1 − σ(f), σ(f))`.
    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C 2"]:
        return torch.stack([torch.zeros_like(f), f], -1)

    def flat(self, g: Float[Tensor, "*K C 2"]) -> Float[Tensor, "*K C"]:
        return g.select(-1, 1)

    def is_soft(self, y: Tensor) -> bool:
        return y.is_floating_point() and bool(((y > 0) & (y < 1)).any())

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return flattened(y).nan_to_num().long(), has_targets(y)

    def given(self, y: Tensor) -> Bool[Tensor, "N C"]:
        return has_targets(y)

    def weights_of_classes(self, y: Tensor) -> Float[Tensor, "N C 2"]:
        y = flattened(y).double()
        return torch.stack([1 - y, y], -1).nan_to_num()

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return residuals(f.sigmoid(), y)[0]

    # `σ(−f)` is `1 − σ(f)` without cancellation: the curvature of saturated outputs stays above zero.
    def diagonal(self, f: Tensor) -> Tensor:
        return f.sigmoid() * (-f).sigmoid()

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        check_target_shape("Binary", output_shape, y)
        if bool(((y < 0) | (y > 1)).any()):
            y = y[~y.isnan()]
            raise ValueError(
                f"Binary targets must be 0 or 1, or proportions between, but range from {float(y.min()):g} to "
                f"{float(y.max()):g}. Labels -1 and 1 become `(y + 1) / 2`."
            )
