"""Gaussian priors `N(0, A⁻¹)` with diagonal `A`: what a user asks for, and what algorithms use.

`A = diag(α_g(p) / s_p²)` has one precision `α` for each group of weights and a scale `s`. Algorithms work in the scaled
coordinates `θ/s`, where `A` is `α_g`: isotropic within a group, so that MacKay's update and step sizes take their
simple form (thesis §6.2.2).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.linear_model.draws import SeededNoise
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.recorded import recorded

# Names of layers, and the number of the layer of each weight.
Layers = tuple[list[str], Tensor]


@dataclass(frozen=True)
class GaussianPrior:
    """A prior as algorithms use it.

    Attributes:
        precision: `α`, one for each group, `[G]`, in units of the sum of losses over the data.
        groups: group of each weight, `[P]`.
        scale: `s`, `[P]`; ones except for the g-prior.
        names: names of the groups.
        num_floored: number of weights with so little curvature that the g-prior's scale was bounded.
        blocks: of a filter-wise prior the variance at `α = 1` and the lengthscale of each block.
    """

    precision: Float[Tensor, " G"]
    groups: Tensor
    scale: Float[Tensor, " P"]
    names: tuple[str, ...]
    num_floored: int = 0
    blocks: dict[str, tuple[float, float]] = field(default_factory=dict)

    def key(self) -> tuple[Tensor, Tensor]:
        """Tells a recorder calls with this prior from those with others (`solvers.recorded`)."""
        return self.precision, self.scale

    def spread(self) -> Float[Tensor, " P"]:
        """`α` of each weight: the diagonal of `A` in scaled coordinates."""
        precision = self.precision.to(self.scale)
        # Of one group without a copy, which each prediction would wait for.
        return precision.expand(len(self.groups)) if len(precision) == 1 else precision[self.groups]

    @cached_property
    def is_even(self) -> bool:
        """Whether all weights have one precision and one scale; kept, as each prediction asks."""
        spread = self.precision if len(self.precision) == 1 else self.spread()
        return all(bool((values == values[0]).all()) for values in (spread, self.scale))

    def diagonal(self) -> Float[Tensor, " P"]:
        """The diagonal of `A`."""
        return self.spread() / self.scale**2

    def grouped(self, values: Float[Tensor, "*K P"]) -> Float[Tensor, "*K G"]:
        """Sums over the weights of each group, in float64."""
        total = torch.zeros(*values.shape[:-1], len(self.names), dtype=torch.float64, device=values.device)
        return total.index_add_(-1, self.groups, values.double())

    def with_precision(self, precision: Float[Tensor, " G"]) -> "GaussianPrior":
        """Returns the prior with another `α`, kept in float64 on the CPU, where hyperparameters are tuned."""
        return replace(self, precision=precision.detach().double().cpu())

    def to(self, device: torch.device, dtype: torch.dtype) -> "GaussianPrior":
        """Returns the prior with its tensors over the weights on a device and in a dtype."""
        return replace(self, groups=self.groups.to(device), scale=self.scale.to(device, dtype))

    def mackay_precision(
        self, effective_dimension: Float[Tensor, " G"], mode_norm: Float[Tensor, " G"], bounds: tuple[float, float]
    ) -> Float[Tensor, " G"]:
        r"""MacKay's update `α_g ← γ_g / ‖θ̄_g‖²` in scaled coordinates, within `bounds` (thesis eq. 6.4, 6.11)."""
        # A mode of exactly zero gives the upper bound, not a division by zero.
        ratio = effective_dimension / mode_norm.clamp_min(torch.finfo(torch.float64).tiny)
        return ratio.double().cpu().clamp(*bounds)


def overall_precision(prior: GaussianPrior) -> float:
    """`α`, the geometric mean of a prior's precisions over the weights."""
    if len(prior.precision) == 1:  # logarithm and exponential would round
        return float(prior.precision)
    return float(prior.spread().double().log().mean().exp())


def unit_variance(prior: GaussianPrior) -> Float[Tensor, " P"]:
    """The diagonal of `A₁⁻¹`, where `A = α A₁` with the overall precision `α`."""
    if len(prior.precision) == 1:  # without rounding, so that it is the same for every `α`
        return prior.scale.double() ** 2
    return prior.scale.double() ** 2 * overall_precision(prior) / prior.spread().double()


def ungrouped(scale: Float[Tensor, " P"], precision: float, num_floored: int = 0) -> GaussianPrior:
    """The prior of one precision for all weights."""
    groups = torch.zeros(len(scale), dtype=torch.long, device=scale.device)
    return GaussianPrior(torch.tensor([float(precision)], dtype=torch.float64), groups, scale, ("all",), num_floored)


@dataclass(frozen=True)
class Prior(ABC):
    """The prior that a user asks for; `build` makes the `GaussianPrior` of a problem.

    Args:
        precision: starting value of `α`, in units of the sum of losses over the data.

    Raises:
        ValueError: if the precision is not positive and finite.
    """

    precision: float = 1.0

    def __post_init__(self) -> None:
        check_positive(f"`{type(self).__name__}(precision=...)`", self.precision)

    def linearised(self, network: Linearisation) -> Linearisation:
        """The network, in coordinates of the prior if it has some."""
        return network

    def place(self, network: Linearisation) -> None:  # noqa: B027
        """Bring a network that is `linearised` into the coordinates in which `build` describes the prior."""

    @abstractmethod
    def build(self, ggn: GGN, layers: Layers, noise: SeededNoise) -> GaussianPrior:
        """The prior of a problem.

        Args:
            ggn: the GGN `M`, whose diagonal a g-prior takes.
            layers: names of layers, and the layer of each weight.
            noise: probes for a stochastic diagonal.
        """


@dataclass(frozen=True)
class IsotropicPrior(Prior):
    """`A = α I`. In networks with normalisation the error bars then depend on the arbitrary scale of the weights.

    Args:
        precision: starting value of `α`.
    """

    def build(self, ggn: GGN, layers: Layers, noise: SeededNoise) -> GaussianPrior:
        return ungrouped(torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype), self.precision)


@dataclass(frozen=True)
class LayerwisePrior(Prior):
    """`A = α_l I` within each layer `l` (the weights owned by one module): thesis §5.3, Rec. 2.

    Args:
        precision: starting value of all `α_l`.
        layers: starting values of single layers, by the names of their modules, such as `train_by_evidence` finds them.

    Raises:
        TypeError, ValueError: for a precision that is not positive; in a fit, for names of layers without random
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

    def build(self, ggn: GGN, layers: Layers, noise: SeededNoise) -> GaussianPrior:
        names, groups = layers
        if unknown := [name for name in self.layers if name not in names]:
            raise ValueError(
                f"`LayerwisePrior(layers=...)` names {unknown}, which have no random weights; the layers that have "
                f"some are {names}."
            )
        scale = torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype)
        precisions = [float(self.layers.get(name, self.precision)) for name in names]
        return GaussianPrior(torch.tensor(precisions, dtype=torch.float64), groups.to(ggn.device), scale, tuple(names))


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

    def diagonal(self, ggn: GGN, noise: SeededNoise) -> Float[Tensor, " P"]:
        """`diag(M)`, exactly or from the probes."""
        return ggn.diagonal() if self._is_exact(ggn) else _stochastic_diagonal(ggn, noise)

    def build(self, ggn: GGN, layers: Layers, noise: SeededNoise) -> GaussianPrior:
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
def _stochastic_diagonal(ggn: GGN, noise: SeededNoise, rows: int = 8) -> Float[Tensor, " P"]:
    """`(1/k) Σ_j (ΦᵀB^{1/2}z_j)²`, with few probes in memory at a time."""
    total = torch.zeros(ggn.size, device=ggn.device, dtype=ggn.dtype)
    for part in noise.parts(rows):
        total += (ggn.root_matmul(part) ** 2).sum(0)
    return total / noise.num_samples
