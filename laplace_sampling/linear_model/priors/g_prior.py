"""The g-prior, whose variances follow the curvature of the data."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.ggn import GGN, WhiteNoise
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Layers, Prior, ungrouped
from laplace_sampling.solvers.checks import check_positive, check_whole
from laplace_sampling.solvers.recorded import recorded

__all__ = ["GPrior"]


@dataclass(frozen=True)
class GPrior(Prior):
    r"""Diagonal g-prior `A = α diag(M)`, `s = diag(M)^{-1/2}`: invariant to the scale of normalised layers.

    Thesis Prop. 8 and eq. 6.12–6.13. The diagonal is exact where that takes at most `exact_limit` numbers (`N·C·P`)
    and no more products for each datum than the probes would; else it is `(1/k) Σ_j (ΦᵀB^{1/2}z_j)²`, with `k` probes.

    Args:
        precision: starting value of `α`.
        num_probes: `k`; the relative standard error of each entry of a stochastic diagonal is `√(2/k)`.
        floor: entries below `floor` times the mean of their layer are raised to it, so that weights without
            curvature (dead units) do not get an infinite prior variance; `num_floored` reports how many.
        exact_limit: largest `N·C·P` for which the exact diagonal is computed.
    """

    num_probes: int = 64
    floor: float = 1e-3
    exact_limit: float = 1e9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("`GPrior(num_probes=...)`", self.num_probes, 1)
        check_positive("`GPrior(floor=...)`", self.floor)
        if not (isinstance(self.exact_limit, float | int) and self.exact_limit >= 0):
            raise ValueError(f"`GPrior(exact_limit=...)` must be a number of at least 0, but is {self.exact_limit!r}.")

    def _is_exact(self, ggn: GGN) -> bool:
        outputs = ggn.features.num_outputs
        products = min(outputs, ggn.size)
        return products <= self.num_probes and ggn.num_data * outputs * ggn.size <= self.exact_limit

    def diagonal(self, ggn: GGN, noise: WhiteNoise) -> Float[Tensor, " P"]:
        """`diag(M)`, exactly or from the probes."""
        return ggn.diagonal() if self._is_exact(ggn) else _stochastic_diagonal(ggn, noise)

    def build(self, ggn: GGN, layers: Layers, noise: WhiteNoise) -> GaussianPrior:
        return self.from_diagonal(self.diagonal(ggn, noise), layers)

    def from_diagonal(self, diagonal: Float[Tensor, " P"], layers: Layers) -> GaussianPrior:
        """The prior for a diagonal of `M`."""
        if not bool(diagonal.max() > 0):
            raise ValueError(
                "The g-prior needs curvature, but diag(M) is zero for all weights: the outputs do not depend on them, "
                'or the loss is flat there. Use prior="isotropic".'
            )
        # The mean of a layer, not of all weights: rescaling a layer must not move the floor of the others.
        names, groups = layers
        groups = groups.to(diagonal.device)
        totals = torch.zeros(len(names), dtype=diagonal.dtype, device=diagonal.device)
        layer_means = totals.index_add(0, groups, diagonal) / groups.bincount(minlength=len(names))
        # A layer that is dead as a whole takes the mean of all weights.
        mean = torch.where(layer_means > 0, layer_means, diagonal.mean())[groups]
        is_low = diagonal < self.floor * mean
        scale = torch.maximum(diagonal, self.floor * mean).rsqrt()
        return ungrouped(scale, self.precision, int(is_low.sum()))


@recorded
def _stochastic_diagonal(ggn: GGN, noise: WhiteNoise, rows: int = 8) -> Float[Tensor, " P"]:
    """`(1/k) Σ_j (ΦᵀB^{1/2}z_j)²`, with few probes in memory at a time."""
    total = torch.zeros(ggn.size, device=ggn.device, dtype=ggn.dtype)
    for part in noise.parts(rows):
        total += (ggn.root_matmul(part) ** 2).sum(0)
    return total / noise.num_samples
