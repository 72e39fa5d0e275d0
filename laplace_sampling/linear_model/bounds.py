"""Bounds within which prior and noise precisions are kept, and what it means that one of them ended there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import cast

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.priors.prior import GaussianPrior

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
