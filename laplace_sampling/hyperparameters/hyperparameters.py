"""`Hyperparameters`: the precisions of prior and noise that a fit ends with, and how they were found, step by step."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import AtBounds, Bounds
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.predictions.calibration import Calibration


class StopFit(Exception):
    """An exception for a `callback` of `fit_hyperparameters` to raise: it ends the fit without an error.

    The posterior that was there before is kept, and `history_` has the steps that were made. Any other exception ends
    the fit as well, and reaches the caller.
    """


@dataclass(frozen=True)
class Step:
    """A step of `fit_hyperparameters`. Vectors have one entry for each group of the prior; losses are sums over data.

    A field is `None` if the likelihood or the method has no such quantity.

    Attributes:
        step: counted from 1.
        prior_precision: `α` to which all other values of the step belong: the one from which a step of EM starts, or
            the one that a step finds on a curve along `α`.
        new_prior_precision: `α` of the next step.
        noise_precision: `b` of a Gaussian likelihood to which the other values belong.
        effective_dimension: `γ` at this `α` and `b`.
        effective_dimension_se: the standard error of `γ`, for methods that estimate it.
        mode_norm: `‖θ̄‖²` in the scaled coordinates of the prior.
        loss: `Σ_i ℓ(y_i, h(θ̄, x_i))`, or that of the network if no mode is needed.
        network_loss: this sum for the network itself.
        mode_residual: norm of the gradient at `θ̄`, relative to that at zero, if iterations find the mode.
        sample_residual: largest residual of a sample, for methods that sample in each step.
        passes: Jacobian products, in units of all data and one vector.
        seconds: wall time of the step.
    """

    step: int
    prior_precision: list[float]
    new_prior_precision: list[float]
    effective_dimension: list[float]
    mode_norm: list[float] | None
    loss: float
    network_loss: float
    passes: float
    seconds: float
    noise_precision: list[float] | None = None
    effective_dimension_se: list[float] | None = None
    mode_residual: float | None = None
    sample_residual: float | None = None

    def to_dict(self) -> dict[str, float]:
        """Numbers by name, as loggers take them; numbers of several groups have `/0`, `/1`, … behind the name.

        Fields that are `None` are left out.
        """
        flat: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, list) and len(value) > 1:
                flat |= {f"{name}/{group}": number for group, number in enumerate(value)}
            elif value is not None:
                flat[name] = value[0] if isinstance(value, list) else value
        return flat

    def shifted(self, loss: float) -> "Step":
        """Returns the step with a constant added to the losses."""
        return replace(self, loss=self.loss + loss, network_loss=self.network_loss + loss)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The precisions of prior and noise, and how they were found.

    Attributes:
        prior: with its precisions.
        likelihood: with its noise precision, if it has one.
        history: a record of each step; none if the hyperparameters were given.
        converged: `None` if they were given.
        at_bounds: groups, or `"noise"`, whose precision ended at a bound.
        problems: what went wrong, in words.
        mode: where the search for the mode may start, `[P]`, unscaled.
        work: what the method made and needs again for the fit: a solver with its preconditioner, or a decomposition.
        criterion: the name of what chose them, such as `"evidence"`; `""` if they were given.
        calibration: of predictions, if it was chosen together with them.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    history: list[Step] = field(default_factory=list)
    converged: bool | None = None
    at_bounds: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    mode: Float[Tensor, " P"] | None = None
    work: Any = None
    criterion: str = ""
    calibration: Calibration | None = None

    @property
    def alpha(self) -> float:
        """`α`, the geometric mean over the weights."""
        return overall_precision(self.prior)

    def within(self, precision_bounds: Bounds, noise_bounds: Bounds) -> "Hyperparameters":
        """Returns hyperparameters that have not converged, and say so, if some are at these bounds."""
        at_bounds = AtBounds.of(self.prior, self.likelihood, precision_bounds, noise_bounds)
        return replace(
            self,
            converged=self.converged and not at_bounds.names,
            at_bounds=at_bounds.names,
            problems=[*self.problems, *at_bounds.problems],
        )

    def told(self, callback: Callable[[Step], object] | None, started: float, passes: float) -> "Hyperparameters":
        """Returns those of a search of one step with its seconds and passes, of which a callback hears.

        Args:
            callback: called with the step.
            started: when the search began, by `time.perf_counter`.
            passes: Jacobian products besides those of the step.
        """
        (step,) = self.history
        step = replace(step, passes=step.passes + passes, seconds=time.perf_counter() - started)
        if callback is not None:
            callback(step)
        return replace(self, history=[step])


def in_one_step(
    model: LinearModel,
    prior: GaussianPrior,
    alpha: float,
    likelihood: Likelihood,
    *,
    effective_dimension: float,
    passes: float,
    effective_dimension_se: float | None = None,
    mode_norm: float | None = None,
    loss: float | None = None,
    mode_residual: float | None = None,
    converged: bool = True,
    **others: Any,
) -> Hyperparameters:
    """Hyperparameters that were found in one step, and its record.

    Args:
        model: the linear model, with any noise precision.
        prior: with any precision.
        alpha: the prior precision.
        likelihood: with its noise precision.
        effective_dimension: an attribute of a `Step`, and so are `passes`, `effective_dimension_se`, `mode_norm`,
            `loss` (by default that of the network) and `mode_residual`.
        passes: see `Step`.
        effective_dimension_se: see `Step`.
        mode_norm: see `Step`.
        loss: see `Step`.
        mode_residual: see `Step`.
        converged: whether there is a maximum.
        others: other attributes of `Hyperparameters`. Where there are `problems`, the search has not converged.
    """
    model, noise = model.with_likelihood(likelihood), likelihood.noise_precisions()
    prior = prior.with_precision(torch.tensor([alpha], dtype=torch.float64))
    network_loss = model.total_loss(model.network_outputs)
    step = Step(
        step=1,
        prior_precision=prior.precision.tolist(),
        new_prior_precision=prior.precision.tolist(),
        noise_precision=None if noise is None else noise.reshape(-1).tolist(),
        effective_dimension=[effective_dimension],
        effective_dimension_se=None if effective_dimension_se is None else [effective_dimension_se],
        mode_norm=None if mode_norm is None else [mode_norm],
        loss=network_loss if loss is None else loss,
        network_loss=network_loss,
        mode_residual=mode_residual,
        passes=passes,
        seconds=0.0,
    )
    converged = converged and not others.get("problems")
    return Hyperparameters(prior=prior, likelihood=likelihood, history=[step], converged=converged, **others)
