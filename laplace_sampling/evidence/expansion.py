r"""The sum of losses to second order around a point of the linear model."""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.solvers.line_search import halve_until_accepted
from laplace_sampling.solvers.quadrature import Quadrature
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import whitening

__all__ = ["Expansion", "Point", "expand"]


@dataclass(frozen=True)
class Point:
    """Weights in scaled coordinates `[1, P]`, the outputs of the linear model there, and the sum of losses."""

    theta: Float[Tensor, "1 P"]
    outputs: Float[Tensor, "N C"] = field(compare=False)
    loss: float = field(compare=False)

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior, theta: Float[Tensor, "1 P"]) -> "Point":
        if not bool(theta.any()):  # saves a product
            return cls._with_loss(model, theta, model.offset)
        return cls._with_loss(model, theta, model.outputs(theta * prior.scale)[0])

    @classmethod
    def _with_loss(cls, model: LinearModel, theta: Tensor, outputs: Tensor) -> "Point":
        return cls(theta, outputs, model.total_loss(outputs))

    def objective(self, alpha: float) -> float:
        return self.loss + 0.5 * alpha * float(self.theta.double().square().sum())

    def toward(self, model: LinearModel, other: "Point", alpha: float) -> "Point":
        """`other`, or the first of the points between, at half the distance each, that does not raise the objective."""
        highest = self.objective(alpha) * (1 + 1e-12)

        def attempt(length: float) -> Point | None:
            point = self._between(model, other, length)
            return point if point.objective(alpha) <= highest else None

        # Outputs are linear in the weights, so that the search makes no product. If all points are refused, the last
        # one is hardly a step.
        return halve_until_accepted(attempt, 1e-6) or self._between(model, other, 2.0**-20)

    def _between(self, model: LinearModel, other: "Point", share: float) -> "Point":
        if share == 1:
            return other
        theta, outputs = (
            torch.lerp(start, end, share) for start, end in ((self.theta, other.theta), (self.outputs, other.outputs))
        )
        return self._with_loss(model, theta, outputs)

    def distance(self, model: LinearModel, other: "Point", alpha: float) -> float:
        """Length of the step to `other` in the norm of the Hessian, relative to that of `other` in the prior's."""

        def own() -> Tensor:
            change = (other.outputs - self.outputs).double()
            return (change * model.likelihood.curvature(other.outputs, change, model.targets)).sum()

        squared = float(model.features.total("curved step", other.outputs - self.outputs, own))
        squared += alpha * float((other.theta - self.theta).double().square().sum())
        norm = alpha * float(other.theta.double().square().sum())
        return math.sqrt(squared / norm) if norm > 0 else math.inf


@dataclass(frozen=True)
class Expansion:
    """The loss around a point, `loss − bᵀθ + ½‖θ‖²_M`, in coordinates in which the prior is isotropic.

    Attributes:
        at_mode: `M` of the expansion.
        operator: `M` of the traces, the same object if `B` is taken at the point as well.
        theta: the point.
        gradient: of the loss, at the point.
        white: takes these coordinates to the scaled ones of the prior.
        path: all of `EvidencePath` that is known without a spectrum.
    """

    at_mode: GGN
    operator: GGN
    theta: Float[Tensor, "1 P"]
    gradient: Float[Tensor, "1 P"]
    white: Float[Tensor, " P"]
    path: EvidencePath

    def complete(self, product: Float[Tensor, "1 P"]) -> tuple[Float[Tensor, "1 P"], EvidencePath]:
        """`b = Mθ − ∇ℓ` from `Mθ`, and the expansion of the loss at zero."""
        theta, rest = self.theta.double(), 0.5 * product.double() - self.gradient.double()
        loss = self.path.loss + float((rest * theta).sum())
        return product - self.gradient, replace(self.path, loss=loss)


def expand(model: LinearModel, prior: GaussianPrior, point: Point) -> Expansion:
    """The expansion around a point."""
    alpha, white = whitening(prior.spread(), overall_precision(prior))
    whitened = replace(model, features=ScaledFeatures(model.features, prior.scale * white))
    at_mode = whitened.ggn(point.outputs)
    # B of a Gaussian likelihood is the same everywhere.
    same = isinstance(model.likelihood, Gaussian)
    operator = at_mode if same else whitened.ggn(model.network_outputs)
    path = _path_without_spectrum(model, point, alpha)
    return Expansion(at_mode, operator, point.theta / white, _gradient(whitened, point), white, path)


@recorded
def _gradient(model: LinearModel, point: Point) -> Float[Tensor, "1 P"]:
    """The gradient of the loss in the coordinates of a model's features."""
    total = torch.zeros_like(point.theta)
    with model.features.summing(total):
        for chunk in model.features.own_chunks():
            slope = model.likelihood.gradient(model.features.pick(point.outputs, chunk)[None], model.targets_of(chunk))
            total += model.features.vjp(slope.to(total), chunk)
    return total


def _path_without_spectrum(model: LinearModel, point: Point, alpha: float) -> EvidencePath:
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    unknown = Quadrature(nothing[0], nothing, nothing)
    return EvidencePath(
        traces=unknown,
        fit=unknown,
        loss=point.loss,
        num_outputs=model.num_observations,
        size=point.theta.shape[1],
        noise_precision=_one_noise(model.likelihood),
        at=alpha,
        exact=False,
        passes=1.0,  # of the outputs and the gradient
        network_errors=_network_errors(model),
    )


def _one_noise(likelihood: Likelihood) -> float | None:
    """The noise precision of a Gaussian likelihood with one for all outputs; else `None`."""
    if not isinstance(likelihood, Gaussian):
        return None
    precision = torch.as_tensor(likelihood.noise_precision)
    return float(precision) if precision.dim() == 0 else None


def _network_errors(model: LinearModel) -> float | None:
    """`b Σ(y − f)²` of the network, if one noise precision is learnt from it."""
    likelihood, f = model.likelihood, model.network_outputs
    b = _one_noise(likelihood)
    if b is None or not (isinstance(likelihood, Gaussian) and likelihood.learn and likelihood.noise_at == "network"):
        return None
    return b * float(model.squared_errors(f).sum())
