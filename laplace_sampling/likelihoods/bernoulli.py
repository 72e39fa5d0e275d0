"""Binary and multi-label targets."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.likelihood import Likelihood, check_target_shape, has_targets, masked


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""`y_c ~ sigmoid(f_c)`, each output by itself: binary (`C = 1`) or multi-label; `B = diag(p(1 − p))`.

    Targets are 0 or 1, or proportions of ones between: a target of 0.3 counts as a one with a weight of 0.3 and a zero
    with a weight of 0.7, and has the cross-entropy of `torch.nn.BCEWithLogitsLoss`. One of NaN is missing: its output
    counts nowhere.
    """

    name: str = field(default="binary", init=False)

    takes_missing = True

    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C 1"]:
        """Each output by itself."""
        return f[..., None]

    def flat(self, g: Float[Tensor, "*K C 1"]) -> Float[Tensor, "*K C"]:
        """The inverse of `positions`."""
        return g[..., 0]

    def given(self, y: Tensor) -> Bool[Tensor, "N C"]:
        """Marks the targets that are there."""
        return has_targets(y)

    def is_soft(self, y: Tensor) -> bool:
        """Whether some targets are proportions."""
        return y.is_floating_point() and bool(((y > 0) & (y < 1)).any())

    def weights_of_classes(self, y: Tensor) -> Float[Tensor, "N C 2"]:
        """How much each target counts as a zero and as a one; nothing where it is missing."""
        y = flattened(y).double()
        return torch.stack([1 - y, y], -1).nan_to_num()

    def losses(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N C"]:
        """`−log p` of each target, 0 where it is missing."""
        target = y.reshape(f.shape[-2:]).to(f)
        given = ~target.isnan()
        return F.binary_cross_entropy_with_logits(f, target.nan_to_num().expand(f.shape), reduction="none").where(
            given, 0
        )

    def mean_losses(self, f: Float[Tensor, "K N C"], y: Tensor) -> Float[Tensor, "N C"]:
        """`−log (1/K) Σ_k p` of each target by itself; of a proportion the mean over zeros and ones."""
        if not self.is_soft(y):
            return -_log_mean(-self.losses(f, y))
        logs = torch.stack([_log_mean(F.logsigmoid(-f)), _log_mean(F.logsigmoid(f))], -1)
        return -(self.weights_of_classes(y).to(logs) * logs).sum(-1)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.losses(f, y).sum(-1)

    def log_parts(self, f: Float[Tensor, "K N C"], y: Tensor) -> Float[Tensor, "K N j"]:
        if f.shape[-1] > 1 or not self.is_soft(y):
            return super().log_parts(f, y)
        return torch.cat([F.logsigmoid(-f), F.logsigmoid(f)], -1)

    def together(self, logs: Float[Tensor, "N j"], y: Tensor) -> Float[Tensor, " N"]:
        return logs[:, 0] if logs.shape[1] == 1 else (self.weights_of_classes(y)[:, 0].to(logs) * logs).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.sigmoid() - y.reshape(f.shape[-2:]).to(f)).where(has_targets(y), 0)

    # `σ(−f)` is `1 − σ(f)` without cancellation: the curvature of saturated outputs stays above zero.
    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return masked(f.sigmoid() * (-f).sigmoid(), y).to(u) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return masked((f.sigmoid() * (-f).sigmoid()).sqrt(), y).to(u) * u

    root_transpose = root

    def link(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C"]:
        """Probabilities."""
        return f.sigmoid()

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        check_target_shape("Binary", output_shape, y)
        if bool(((y < 0) | (y > 1)).any()):
            y = y[~y.isnan()]
            raise ValueError(
                f"Binary targets must be 0 or 1, or proportions between, but range from {float(y.min()):g} to "
                f"{float(y.max()):g}. Labels -1 and 1 become `(y + 1) / 2`."
            )


def _log_mean(logs: Float[Tensor, "K N C"]) -> Float[Tensor, "N C"]:
    return logs.logsumexp(0) - math.log(len(logs))
