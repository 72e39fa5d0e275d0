"""`LossRise`: the smallest prior precision at which draws of the function raise the training loss within a bound."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.bounds import mackay_root
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.some_features import SomeFeatures, some_of
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.predictions.looks import DECADE, Looks, decades
from laplace_sampling.predictions.loss_bound import LossBound, Used
from laplace_sampling.predictions.selection import Selected, Selection, grid, nearest

__all__ = ["LossRise"]

# Draws of the function, each with its opposite, so that no term of first order is left.
_DRAWS = 32
# Numbers of the draws in memory, where a datum has many outputs.
_NUMBERS = 2**24
# Of `log α` of the evidence: predicted standard deviations go with its half.
_ACCURACY = 1e-3
# Training data that are looked at: so many at most, at least, and so many rows of the Jacobian for each of them that
# they are this part of a training epoch.
_MOST, _LEAST, _PART = 400, 100, 0.3


@dataclass(frozen=True)
class LossRise(Selection):
    """The smallest prior precision at which error bars keep to a bound on the training data.

    It is not below that of largest evidence of the trained weights, `α ‖w̄‖² = γ(α)`: where no datum says anything
    against a small `α`, that is no reason for error bars without end where there are no data.

    Args:
        bound: on what draws of the function add to the loss.
        in_order: whether the first data are looked at in place of random ones.
        num_data: how many data are looked at; by default a few hundred.
    """

    bound: LossBound
    in_order: bool = False
    num_data: int | None = None
    # What the bound has found out about a model and its prior, which a second search of the same fit uses again.
    _known: list[tuple[LinearModel, GaussianPrior, Used]] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.bound.name

    def looks(self, features: Features) -> Looks:
        num_data = most_data(features) if self.num_data is None else self.num_data
        return Looks(num_data, _DRAWS, num_vjps=self.bound.num_vjps(features))

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Selected:
        looks, draws = self.looks(model.features), Draws(_DRAWS, seed, Stream.LOSS_RISE)
        some = model.with_targets(some_of(model.features, looks.num_data, None if self.in_order else seed))
        looks = replace(looks, num_data=len(some))
        # MacKay's fixed point with the trained weights in the place of the mode.
        lowest, _ = mackay_root(path.effective_dimension, lambda alpha: alpha * weight_norm, 1.0, bounds, _ACCURACY)
        alphas = _down_to(lowest, grid(path, SomeFeatures(model.features, some), bounds))
        used, products = self._used(model, path.prior, seed)
        found = path.deviations(SomeFeatures(model.features, some), alphas, draws)
        excess = cache(lambda index: used(found[index], some))
        first = None if near is None else _first_nearby(excess, nearest(alphas, near), len(alphas))
        if first is None:
            part, coarse = some[looks.part], decades(len(alphas))
            rough = path.deviations(SomeFeatures(model.features, part), alphas[coarse], draws, len(coarse))
            outside = (i for n, i in enumerate(coarse) if used(rough[n], part) > 1)
            # The first one of the whole grid that is outside lies up to a decade above.
            start = max(0, next(outside, len(alphas)) - 1)
            products += rough.products
            first = _first_outside(excess, start, 0, len(alphas))
        alpha, kept = _last_within(alphas, excess, first)
        problems = () if kept else (_problem(self.bound, alpha),)
        alpha = max(alpha, lowest)
        return Selected(
            alpha,
            model.likelihood,
            Calibration(),
            path.effective_dimension(alpha),
            passes=(products + found.products) / (2 * model.features.num_data),
            problems=problems,
        )

    def _used(self, model: LinearModel, prior: GaussianPrior, seed: int) -> tuple[Used, float]:
        """What draws of the function use of the bound, and the VJPs that this took."""
        for known, of_prior, used in self._known:
            if known is model and of_prior is prior:
                return used, 0.0
        self._known[:] = [(model, prior, self.bound.used(model, prior, seed, self.in_order))]
        return self._known[0][-1], float(self.bound.num_vjps(model.features))


def _down_to(lowest: float, alphas: Float[Tensor, " A"]) -> Float[Tensor, " A"]:
    """The precisions above the lowest one that may be chosen, and the next below it."""
    return alphas[: int((alphas > lowest).sum()) + 1]


def _problem(bound: LossBound, alpha: float) -> str:
    return (
        f"{bound.nowhere} at any prior precision that was tried: the largest, {alpha:.3g}, is taken, and error bars "
        "are negligible. Pass `val_loader`, or look at the network's outputs on the training data."
    )


def most_data(features: Features) -> int:
    """How many data the rule looks at: those whose rows of the Jacobian cost less than a part of an epoch."""
    num = int(_PART * features.num_data / features.num_outputs)
    return min(features.num_data, max(_LEAST, min(_MOST, num)), max(1, _NUMBERS // (_DRAWS * features.num_outputs)))


def _first_outside(excess: Callable[[int], float], start: int, low: int, high: int) -> int:
    """The first precision at which a bound is not kept, between two limits and near another one."""
    first = start
    while first > low and excess(first) > 1:
        first -= 1
    while first < high and excess(first) <= 1:
        first += 1
    return first


def _first_nearby(excess: Callable[[int], float], start: int, number: int) -> int | None:
    """The same up to a decade away; `None` if it is further away."""
    low, high = max(0, start - DECADE), min(number, start + DECADE + 1)
    first = _first_outside(excess, start, low, high)
    return None if (first == low > 0) or (first == high < number) else first


def _last_within(alphas: Float[Tensor, " A"], excess: Callable[[int], float], first: int) -> tuple[float, bool]:
    """The smallest precision down to which the bound is kept, interpolated; and whether there is one."""
    if first == len(alphas):
        return float(alphas[-1]), True
    if first == 0:
        return float(alphas[0]), False
    below, above = excess(first - 1), excess(first)
    part = (1 - below) / (above - below) if math.isfinite(above) else 0.0
    logs = alphas.log()
    return float((logs[first - 1] + part * (logs[first] - logs[first - 1])).exp()), True
