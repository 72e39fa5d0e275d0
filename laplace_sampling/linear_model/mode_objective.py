"""The mode of the posterior of a linear model."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import Minimum, Objective, Solver

__all__ = ["Mode", "ModeObjective", "linear_model_mode"]


@dataclass(frozen=True)
class Mode:
    """The mode of a linear model.

    Attributes:
        weights: `θ̄`, `[P]`, unscaled.
        outputs: `h(θ̄, x_i)`, `[N, C]`.
        minimum: of the objective.
    """

    weights: Float[Tensor, " P"]
    outputs: Float[Tensor, "N C"]
    minimum: Minimum


class ModeObjective(Objective):
    """`Σ_i ℓ(y_i, h(θ, x_i)) + ½‖θ‖²_A` in the scaled coordinates of a prior."""

    def __init__(self, model: LinearModel, prior: GaussianPrior) -> None:
        self.model = replace(model, features=ScaledFeatures(model.features, prior.scale))
        self.num_data = model.features.num_data
        self.precision = prior.spread()

    def _outputs(self, theta: Tensor, batch: Tensor) -> Tensor:
        return self.model.offset[batch] + self.model.features.jvp(theta, batch)

    @recorded
    def value(self, theta: Tensor) -> float:
        fit = torch.zeros((), dtype=torch.float64, device=theta.device)
        with self.model.features.summing(fit):
            for batch in self.model.features.own_chunks():
                losses = self.model.likelihood.loss(self._outputs(theta, batch), self.model.targets[batch])
                fit += losses.double().sum()
        return float(fit) + 0.5 * float((self.precision * theta.double() ** 2).sum())

    def gradient(self, theta: Tensor, batch: Tensor | None) -> Tensor:
        return self._full_gradient(theta) if batch is None else self._gradient(theta, batch)

    @recorded
    def _full_gradient(self, theta: Tensor) -> Tensor:
        return self._gradient(theta, None)

    def _gradient(self, theta: Tensor, batch: Tensor | None) -> Tensor:
        total = torch.zeros_like(theta)
        with self.model.features.summing(total):
            for chunk in self.model.features.own_chunks(batch):
                slope = self.model.likelihood.gradient(self._outputs(theta, chunk), self.model.targets[chunk])
                total += self.model.features.vjp(slope, chunk)
        # The loss of a mini-batch stands for that of all data, so that its gradient is unbiased.
        weight = 1.0 if batch is None else self.num_data / len(batch)
        return weight * total + self.precision * theta

    def curvature(self, theta: Tensor) -> GGN:
        return self.model.ggn(self.model.outputs(theta)[0])


def linear_model_mode(
    model: LinearModel,
    prior: GaussianPrior,
    solver: Solver,
    init: Float[Tensor, "1 P"] | None = None,
    *,
    description: str | None = None,
) -> Minimum:
    r"""`θ̄ = argmin_θ Σ_i ℓ(y_i, h(θ, x_i)) + ½‖θ‖²_A`, with `½` (erratum E1 of the thesis; eq. 2.7).

    `init` and the result's `value`, `[1, P]`, are in the scaled coordinates `θ/s` of the prior.
    """
    if init is None:
        # Zero, not the trained weights: iterates then stay in the range of `A⁻¹Φᵀ`, where the mode is.
        init = torch.zeros(1, model.features.size, device=model.features.device, dtype=model.features.dtype)
    return solver.minimise(ModeObjective(model, prior), init, description=description)
