"""Binary and multi-label targets."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.likelihood import Likelihood, check_target_shape

__all__ = ["Bernoulli"]


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""`y_c ~ sigmoid(f_c)`, each output by itself: binary (`C = 1`) or multi-label; `B = diag(p(1 − p))`."""

    name: str = field(default="binary", init=False)

    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C 1"]:
        """Each output by itself."""
        return f[..., None]

    def flat(self, g: Float[Tensor, "*K C 1"]) -> Float[Tensor, "*K C"]:
        """The inverse of `positions`."""
        return g[..., 0]

    def given(self, y: Tensor) -> Bool[Tensor, "N C"]:
        """Marks the targets that are not ignored, here all of them."""
        return torch.ones_like(flattened(y), dtype=torch.bool)

    def losses(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N C"]:
        """`−log p` of each target."""
        target = y.reshape(f.shape[-2:]).to(f).expand(f.shape)
        return F.binary_cross_entropy_with_logits(f, target, reduction="none")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.losses(f, y).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sigmoid() - y.reshape(f.shape[-2:]).to(f)

    # `σ(−f)` is `1 − σ(f)` without cancellation: the curvature of saturated outputs stays above zero.
    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return (f.sigmoid() * (-f).sigmoid()).to(u) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return (f.sigmoid() * (-f).sigmoid()).sqrt().to(u) * u

    root_transpose = root

    def link(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C"]:
        """Probabilities."""
        return f.sigmoid()

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        check_target_shape("Binary", output_shape, y)
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(
                f"Binary targets must be 0 or 1, but range from {float(y.min()):g} to {float(y.max()):g}. "
                "Labels -1 and 1 become `(y + 1) / 2`."
            )
