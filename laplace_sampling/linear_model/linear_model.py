"""The linear model of a network on its training data."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.ggn import GGN, first_of
from laplace_sampling.solvers.placement import chosen
from laplace_sampling.solvers.recorded import recorded

__all__ = ["LinearModel"]

# Outputs whose losses are computed together; no effect on the values.
_LOSS_NUMBERS = 2**22


@dataclass(frozen=True)
class LinearModel:
    r"""The tangent model on the training data, `h(θ, x_i) = o_i + φ_i θ`.

    Attributes:
        features: `Φ`.
        offset: `o`, `[N, C]`: `f(w̄, x) − φ(x) w̄` ("affine") or zero ("homogeneous").
        network_outputs: `f(w̄, x_i)`, `[N, C]`.
        targets: `y`.
        likelihood: likelihood of the targets given the outputs.
    """

    features: Features
    # Network and data decide them, so that recorders need not look at them.
    offset: Float[Tensor, "N C"] = field(compare=False)
    network_outputs: Float[Tensor, "N C"] = field(compare=False)
    targets: Tensor = field(compare=False)
    likelihood: Likelihood

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
        rows = max(1, _LOSS_NUMBERS // max(1, outputs.shape[1]))
        parts = zip(outputs.split(rows), self.targets.split(rows), strict=True)
        return torch.cat([self.likelihood.loss(h, y) for h, y in parts])

    def with_all_inputs(self) -> "LinearModel":
        """Returns the model with the inputs of all data in each process, for dense algebra in observation space."""
        return replace(self, features=self.features.with_all_inputs())

    def with_likelihood(self, likelihood: Likelihood) -> "LinearModel":
        return replace(self, likelihood=likelihood)

    def ggn(self, outputs: Float[Tensor, "N C"]) -> GGN:
        """The GGN with curvature taken at the given outputs."""
        return GGN(self.features, self.likelihood, outputs, self.targets)


@recorded
def _total(what: str, first: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """A sum over data, which other quantities follow from to the last bit."""
    return compute()
