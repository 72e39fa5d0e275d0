"""Gaussian priors `N(0, A⁻¹)` with diagonal `A`, kept as a scale and one precision a group of weights.

`A = diag(α_g(p) / s_p²)`. Algorithms work in the scaled coordinates `θ/s`, where `A` is `α_g`: isotropic within a
group, so that MacKay's update and step sizes take their simple form (thesis §6.2.2).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import GGN, WhiteNoise

__all__ = [
    "GPrior",
    "GaussianPrior",
    "IsotropicPrior",
    "LayerwisePrior",
    "Prior",
    "as_prior",
    "overall_precision",
    "unit_variance",
]


@dataclass(frozen=True)
class GaussianPrior:
    """A prior as algorithms use it.

    Attributes:
        precision: `α`, one a group, `[G]`, in units of the sum of losses over the data.
        groups: the group of each weight, `[P]`.
        scale: `s`, `[P]`; ones but for the g-prior.
        names: of the groups.
        num_floored: how many weights had so little curvature that the g-prior's scale was bounded.
    """

    precision: Float[Tensor, " G"]
    groups: Tensor
    scale: Float[Tensor, " P"]
    names: tuple[str, ...]
    num_floored: int = 0

    def spread(self) -> Float[Tensor, " P"]:
        """`α` of each weight: the diagonal of `A` in scaled coordinates."""
        return self.precision.to(self.scale)[self.groups]

    def diagonal(self) -> Float[Tensor, " P"]:
        """The diagonal of `A`."""
        return self.spread() / self.scale**2

    def grouped(self, values: Float[Tensor, "*K P"]) -> Float[Tensor, "*K G"]:
        """Sums over the weights of each group, in float64."""
        total = torch.zeros(*values.shape[:-1], len(self.names), dtype=torch.float64, device=values.device)
        return total.index_add_(-1, self.groups, values.double())

    def with_precision(self, precision: Float[Tensor, " G"]) -> "GaussianPrior":
        return replace(self, precision=precision.detach().double().cpu())

    def to(self, device: torch.device, dtype: torch.dtype) -> "GaussianPrior":
        return replace(self, groups=self.groups.to(device), scale=self.scale.to(device, dtype))

    def mackay_precision(
        self, effective_dimension: Float[Tensor, " G"], mode_norm: Float[Tensor, " G"], bounds: tuple[float, float]
    ) -> Float[Tensor, " G"]:
        r"""MacKay's update `α_g ← γ_g / ‖θ̄_g‖²` in scaled coordinates, within `bounds` (thesis eq. 6.4, 6.11)."""
        ratio = effective_dimension / mode_norm.clamp_min(torch.finfo(torch.float64).tiny)
        return ratio.double().cpu().clamp(*bounds)


def overall_precision(prior: GaussianPrior) -> float:
    """`α`, the geometric mean over the weights of a prior's precisions."""
    if len(prior.precision) == 1:  # without rounding
        return float(prior.precision)
    return float(prior.spread().double().log().mean().exp())


def unit_variance(prior: GaussianPrior) -> Float[Tensor, " P"]:
    """The diagonal of `A₁⁻¹`, where `A = α A₁` with the overall precision `α`."""
    if len(prior.precision) == 1:  # without rounding, so that it is the same for every `α`
        return prior.scale.double() ** 2
    return prior.scale.double() ** 2 * overall_precision(prior) / prior.spread().double()


class Prior(ABC):
    """A recipe: what a user names; `build` makes the `GaussianPrior` of a problem."""

    @abstractmethod
    def build(self, ggn: GGN, layers: tuple[list[str], Tensor], precision: float, noise: WhiteNoise) -> GaussianPrior:
        """The prior of a problem.

        Args:
            ggn: the GGN whose diagonal a g-prior takes.
            layers: names of layers, and the layer of each weight.
            precision: starting value of `α`.
            noise: probes, for a stochastic diagonal.
        """


@dataclass(frozen=True)
class IsotropicPrior(Prior):
    """`A = α I`. In networks with normalisation the error bars then depend on the arbitrary scale of weights."""

    def build(self, ggn: GGN, layers: tuple[list[str], Tensor], precision: float, noise: WhiteNoise) -> GaussianPrior:
        return _ungrouped(torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype), precision)


@dataclass(frozen=True)
class LayerwisePrior(Prior):
    """`A = α_l I` within each layer `l` (the weights owned by one module): thesis §5.3, Rec. 2."""

    def build(self, ggn: GGN, layers: tuple[list[str], Tensor], precision: float, noise: WhiteNoise) -> GaussianPrior:
        names, groups = layers
        scale = torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype)
        start = torch.full((len(names),), float(precision), dtype=torch.float64)
        return GaussianPrior(start, groups.to(ggn.device), scale, tuple(names))


@dataclass(frozen=True)
class GPrior(Prior):
    r"""Diagonal g-prior `A = α diag(M)`, `s = diag(M)^{-1/2}`: invariant to the scale of normalised layers.

    Thesis Prop. 8 and eq. 6.12–6.13. The diagonal is exact where that takes at most `exact_limit` numbers (`N·C·P`)
    and no more products a datum than the probes; else it is `(1/k) Σ_j (ΦᵀB^{1/2}z_j)²`, with `k` probes of its own.

    Args:
        num_probes: `k`; the relative standard error of each entry of a stochastic diagonal is `√(2/k)`.
        floor: entries below `floor` times the mean of their layer are raised to it, so that weights without
            curvature (dead units) do not get an infinite prior variance; how many is reported as `num_floored`.
        exact_limit: largest `N·C·P` for which the exact diagonal is computed.
    """

    num_probes: int = 64
    floor: float = 1e-3
    exact_limit: float = 1e9

    def __post_init__(self) -> None:
        if self.num_probes < 1 or self.floor <= 0:
            raise ValueError(
                f"`GPrior` needs num_probes of at least 1 and a positive floor, got {self.num_probes}, {self.floor}."
            )

    def _is_exact(self, ggn: GGN) -> bool:
        outputs = ggn.features.num_outputs
        products = min(outputs, ggn.size)
        return products <= self.num_probes and ggn.num_data * outputs * ggn.size <= self.exact_limit

    def diagonal(self, ggn: GGN, noise: WhiteNoise) -> Float[Tensor, " P"]:
        """`diag(M)`, exactly or from the probes."""
        return ggn.diagonal() if self._is_exact(ggn) else _stochastic_diagonal(ggn, noise)

    def build(self, ggn: GGN, layers: tuple[list[str], Tensor], precision: float, noise: WhiteNoise) -> GaussianPrior:
        return self.of(self.diagonal(ggn, noise), layers, precision)

    def of(self, diagonal: Float[Tensor, " P"], layers: tuple[list[str], Tensor], precision: float) -> GaussianPrior:
        """The prior for a diagonal of `M`."""
        if not bool(diagonal.max() > 0):
            raise ValueError(
                "The g-prior needs curvature, but diag(M) is zero for all weights: the outputs do not depend on them, "
                'or the loss is flat there. Use prior="isotropic", or hessian_at="mode".'
            )
        # The mean of a layer, not of all weights: rescaling a layer must not move the floor of the others.
        names, groups = layers
        groups = groups.to(diagonal.device)
        totals = torch.zeros(len(names), dtype=diagonal.dtype, device=diagonal.device)
        mean = totals.index_add(0, groups, diagonal) / groups.bincount(minlength=len(names))
        mean = torch.where(mean > 0, mean, diagonal.mean())[groups]
        low = diagonal < self.floor * mean
        return _ungrouped(torch.maximum(diagonal, self.floor * mean).rsqrt(), precision, int(low.sum()))


def _stochastic_diagonal(ggn: GGN, noise: WhiteNoise, rows: int = 8) -> Float[Tensor, " P"]:
    """`(1/k) Σ_j (ΦᵀB^{1/2}z_j)²`, few probes in memory at a time."""
    total = torch.zeros(ggn.size, device=ggn.device, dtype=ggn.dtype)
    for part in noise.parts(rows):
        total += (ggn.root_matmul(part) ** 2).sum(0)
    return total / noise.num_samples


def as_prior(prior: str | Prior) -> Prior:
    """The prior of a name: `"g-prior"`, `"isotropic"` or `"layerwise"`; a `Prior` is returned as it is."""
    if isinstance(prior, Prior):
        return prior
    named = {"g-prior": GPrior, "isotropic": IsotropicPrior, "layerwise": LayerwisePrior}
    if prior not in named:
        raise ValueError(f"`prior={prior!r}` is not known; use one of {list(named)} or a Prior.")
    return named[prior]()


def _ungrouped(scale: Tensor, precision: float, num_floored: int = 0) -> GaussianPrior:
    groups = torch.zeros(len(scale), dtype=torch.long, device=scale.device)
    return GaussianPrior(torch.tensor([float(precision)], dtype=torch.float64), groups, scale, ("all",), num_floored)
