"""`Hyperparameters`: the precisions of prior and noise that a fit ends with, and how they were found, step by step.

They are kept within bounds, and `AtBounds` says what it means that one of them ended there.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from numbers import Real
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.predictions.calibration import Calibration

Bounds = tuple[float, float]


# A definition: ten and more decades on either side of any sensible value.
PRECISION_BOUNDS, NOISE_BOUNDS = (1e-8, 1e12), (1e-12, 1e12)


# A precision that is so near to a bound, relative to it, counts as at the bound, for grids, logarithms and float32 do
# not give a bound back to the last bit: a definition, less than what searches are accurate to.
_NEAR = 0.01


_MEANING_OF_PRECISION = {
    "upper": "the data show no effect of these weights, so that error bars from them vanish. Check that the targets "
    "belong to their inputs and that the network is trained",
    "lower": "the prior fades out. Check the data for extreme values",
}


_MEANING_OF_NOISE = {
    "upper": "the linear model fits the targets exactly. Check the units of the targets",
    "lower": "the linear model does not fit the targets at all. Check the units of the targets",
}


def check_bounds(precision_bounds: Bounds, noise_bounds: Bounds = NOISE_BOUNDS) -> None:
    """Raises if bounds are not positive and in order."""
    for name, bounds in (("precision_bounds", precision_bounds), ("noise_bounds", noise_bounds)):
        pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(isinstance(bound, Real) for bound in bounds)
        if not pair:
            raise TypeError(f"`{name}` must be two numbers, (low, high), but is {bounds!r:.80}.")
        if not 0 < bounds[0] < bounds[1]:
            raise ValueError(f"`{name}` must be positive and in order, but is {tuple(bounds)}.")
        if bounds[1] == math.inf:
            raise ValueError(f"`{name}` must be finite, but is {tuple(bounds)}: give 1e12, say, as its upper end.")


def clamped(value: float, bounds: Bounds) -> float:
    """The value, or the bound that it exceeds."""
    low, high = bounds
    return min(max(value, low), high)


def mackay_root(
    dimension: Callable[[float], float],
    energy: Callable[[float], float],
    start: float,
    bounds: Bounds,
    accuracy: float = 1e-10,
) -> tuple[float, bool]:
    """The root of `α‖θ‖² = γ(α)`, where MacKay's update leaves `α` as it is; also that of `b·s = n − γ(b)` in `b`.

    Doubled steps bracket it, Brent's method finds it.

    Args:
        dimension: `γ` as a function of `α`.
        energy: `α‖θ‖²` as a function of `α`.
        start: where the search begins.
        bounds: within which `α` is kept.
        accuracy: of `log α`.

    Returns:
        The root, and whether it is inside the bounds; else the bound that updates lead to.
    """
    from scipy.optimize import brentq  # slow to import

    @cache  # both ends of the bracket are known when Brent's method asks for them
    def excess(log_alpha: float) -> float:
        alpha = math.exp(log_alpha)
        return math.log(max(dimension(alpha), 1e-300)) - math.log(max(energy(alpha), 1e-300))

    low, high = (math.log(bound) for bound in bounds)
    u, stride = clamped(math.log(start), (low, high)), 1.0
    while True:
        rising = excess(u) > 0
        edge = high if rising else low
        if u == edge:
            return bounds[rising], False  # to the last bit
        proposal = clamped(u + stride if rising else u - stride, (low, high))
        if (excess(proposal) > 0) != rising:
            return math.exp(cast(float, brentq(excess, u, proposal, xtol=accuracy))), True
        u, stride = proposal, 2 * stride


def bound_reached(value: float, bounds: Bounds) -> str | None:
    """`"lower"` or `"upper"` where a value is within 1 % of that bound, or beyond; else `None`."""
    low, high = bounds
    if value <= low * (1 + _NEAR):
        return "lower"
    return "upper" if value >= high / (1 + _NEAR) else None


def is_at_bound(value: float, bounds: Bounds) -> bool:
    """Whether a value is within 1 % of one of its bounds, or beyond."""
    return bound_reached(value, bounds) is not None


@dataclass(frozen=True)
class AtBounds:
    """The precisions that were learnt and ended at a bound, where the evidence has no maximum.

    Attributes:
        names: groups of the prior, and `"noise"`.
        problems: what it means and what to do, a sentence or two for each bound.
    """

    names: tuple[str, ...]
    problems: list[str]

    @classmethod
    def of(
        cls, prior: GaussianPrior, likelihood: Likelihood, precision_bounds: Bounds, noise_bounds: Bounds
    ) -> "AtBounds":
        """The precisions of a prior and a likelihood that are at a bound."""
        groups = zip(prior.names, prior.precision.tolist(), strict=True)
        reached = {name: end for name, alpha in groups if (end := bound_reached(alpha, precision_bounds))}
        noise = likelihood.noise_precisions() if likelihood.learns_noise else None
        of_noise = {bound_reached(b, noise_bounds) for b in ([] if noise is None else noise.reshape(-1).tolist())}
        problems = []
        for end, meaning in _MEANING_OF_PRECISION.items():
            if names := [name for name in reached if reached[name] == end]:
                problems.append(
                    f"`fit_hyperparameters` ended at one of precision_bounds={precision_bounds} for the groups "
                    f"{names}, the {end} one: {meaning}, or give other bounds."
                )
        for end, meaning in _MEANING_OF_NOISE.items():
            if end in of_noise:
                problems.append(
                    f"`fit_hyperparameters` ended at one of noise_bounds={noise_bounds} for the noise precision, the "
                    f"{end} one: {meaning}, give other bounds, or fix the noise (`Gaussian(b, learn=False)`)."
                )
        return cls((*reached, *(["noise"] if of_noise - {None} else [])), problems)


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
