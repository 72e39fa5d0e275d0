"""Gaussian priors `N(0, A⁻¹)` with diagonal `A`: what a user asks for, and what algorithms use.

`A = diag(α_g(p) / s_p²)` has one precision `α` for each group of weights and a scale `s`. Algorithms work in the scaled
coordinates `θ/s`, where `A` is `α_g`: isotropic within a group, so that MacKay's update and step sizes take their
simple form (thesis §6.2.2).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.checks import check_positive

if TYPE_CHECKING:
    from laplace_sampling.linear_model.ggn import GGN, WhiteNoise

__all__ = ["GaussianPrior", "Layers", "Prior", "overall_precision", "ungrouped", "unit_variance"]

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
    """

    precision: Float[Tensor, " G"]
    groups: Tensor
    scale: Float[Tensor, " P"]
    names: tuple[str, ...]
    num_floored: int = 0

    def key(self) -> tuple[Tensor, Tensor]:
        """Tells a recorder calls with this prior from those with others (`solvers.recorded`)."""
        return self.precision, self.scale

    def spread(self) -> Float[Tensor, " P"]:
        """`α` of each weight: the diagonal of `A` in scaled coordinates."""
        precision = self.precision.to(self.scale)
        # Of one group without a copy, which each prediction would wait for.
        return precision.expand(len(self.groups)) if len(precision) == 1 else precision[self.groups]

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

    @abstractmethod
    def build(self, ggn: "GGN", layers: Layers, noise: "WhiteNoise") -> GaussianPrior:
        """The prior of a problem.

        Args:
            ggn: the GGN `M`, whose diagonal a g-prior takes.
            layers: names of layers, and the layer of each weight.
            noise: probes for a stochastic diagonal.
        """
