"""The linear model of a network on its training data, and the mode of its posterior."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN, HeldCurvature, first_of
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.placement import chosen
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import Minimum, Objective, Solver


@dataclass(frozen=True)
class LinearModel:
    r"""The tangent model on the training data, `h(θ, x_i) = o_i + φ_i θ`.

    Attributes:
        features: `Φ`.
        offset: `o`, `[N, C]`: `f(w̄, x) − φ(x) w̄` ("affine") or zero ("homogeneous").
        network_outputs: `f(w̄, x_i)`, `[N, C]`.
        targets: `y`.
        likelihood: likelihood of the targets given the outputs.
        held: keeps `M` in full, for dense algebra on few weights.
    """

    features: Features
    # Network and data decide them, so that recorders need not look at them.
    offset: Float[Tensor, "N C"] = field(compare=False)
    network_outputs: Float[Tensor, "N C"] = field(compare=False)
    targets: Tensor = field(compare=False)
    likelihood: Likelihood
    held: HeldCurvature | None = field(default=None, compare=False)

    def outputs(self, theta: Float[Tensor, "K P"]) -> Float[Tensor, "K N C"]:
        """`h(θ_k, x_i)` for all data."""
        return self.offset + self.features.outputs(theta)

    def total_loss(self, outputs: Float[Tensor, "N C"]) -> float:
        """`Σ_i ℓ(y_i, h_i)` at some outputs."""
        return float(_total("loss", first_of(outputs), lambda: self.losses(outputs).double().sum().cpu()))

    def residuals(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """`y_i − h_i` of a regression in float64, zero where there is no target."""
        targets = self.targets.reshape(outputs.shape)
        return (targets - outputs).double().where(~targets.isnan(), 0)

    def squared_errors(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
        """`Σ_i (y_i − h_i)²` of each output of a regression, in float64."""
        return _total("squares", first_of(outputs), lambda: self.residuals(outputs).square().sum(0).cpu())

    def observed(self, targets: Tensor | None = None) -> Bool[Tensor, "n C"]:
        """Which outputs have a target, by default of all data."""
        return self.likelihood.observed(self.targets if targets is None else targets, self.features.num_outputs)

    def num_targets(self) -> Float[Tensor, " C"]:
        """How many data have a target at each output."""
        return self.observed().double().sum(0).cpu()

    @property
    def num_observations(self) -> int:
        """`N·C`, without the outputs that have no target."""
        return int(self.num_targets().sum())

    @property
    def num_data(self) -> int:
        """How many data have a target."""
        return int(self.observed().any(1).sum())

    def with_targets(self, some: Tensor) -> Tensor:
        """The indices of those data that have a target at any output."""
        return chosen(some, self.observed(self.targets[some]).any(1))

    def losses(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
        """`ℓ(y_i, h_i)`, a few data at a time, for a loss makes numbers of the size of the outputs."""
        if not len(outputs):
            return outputs.new_zeros(0)
        rows = max(1, BLOCK_BYTES // (8 * max(1, outputs.shape[1])))
        parts = zip(outputs.split(rows), self.targets.split(rows), strict=True)
        return torch.cat([self.likelihood.loss(h, y) for h, y in parts])

    def with_likelihood(self, likelihood: Likelihood) -> "LinearModel":
        return replace(self, likelihood=likelihood)

    def ggn(self, outputs: Float[Tensor, "N C"]) -> GGN:
        """The GGN with curvature taken at the given outputs."""
        return GGN(self.features, self.likelihood, outputs, self.targets, self.held)


@recorded
def _total(what: str, first: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """A sum over data, which other quantities follow from to the last bit."""
    return compute()


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
