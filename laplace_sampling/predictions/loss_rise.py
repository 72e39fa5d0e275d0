r"""`LossRise`: the smallest prior precision at which draws of the function raise the training loss within a bound.

`SelfConsistency` is such a bound: the precision at which Laplace's approximation stops to agree with itself; no mode,
no evidence is needed. Laplace's approximation says by how much the training loss rises when the function is drawn from
its posterior, `z ~ N(0, V_i(α))`: to second order by `½ E zᵀB_i z`. The true rise is `E ℓ(y_i, f_i + z) − ℓ(y_i, f_i)`.
Where the network is certain of its training labels `B_i` all but vanishes, `V_i` is large, and the true rise is many
times the quadratic one: error bars then hurt. Where the loss grows less than its curvature says, the ratio falls. So
`α` is lowered, from where the prior decides everything and both rises agree, as long as their ratio stays within
`[1/c, c]`.

Another part of the bound keeps it from error bars that nothing asks for. Labels of the training data, predicted with
error bars, `−log E p(y_i | f_i + z)`, must not be less likely than by the network alone by more than a part `q` of its
loss: a network that is not sure enough gains nothing by error bars, whose rises agree for it all along.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from jaxtyping import Float
from torch import Tensor, zeros_like

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import mackay_root
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features, SomeFeatures, some_of
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.calibration import Calibration, label_losses, labelled
from laplace_sampling.predictions.covariance_path import CovariancePath, function_draws
from laplace_sampling.predictions.selection import (
    SearchCost,
    Selected,
    Selection,
    grid,
    nearest,
    search_cost,
    smallest_allowed,
)
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

# The share of a bound that draws of the function at some data use, `[K, n, C]` and indices of the data.
ShareUsed = Callable[[Tensor, Tensor], float]


class LossBound(ABC):
    """How much draws of the function may raise the training loss."""

    name: str
    # What is wrong where no precision keeps to it.
    nowhere: str

    def num_vjps(self, features: Features) -> int:
        """VJPs of a datum that `share_used` makes."""
        return 0

    @abstractmethod
    def share_used(self, model: LinearModel, prior: GaussianPrior, seed: int, in_order: bool) -> ShareUsed:
        """The share of the bound that draws of the function use; more than one is too much.

        Args:
            model: on the training data.
            prior: with its scale.
            seed: of what is random.
            in_order: whether it looks at the first data in place of random ones.
        """


@dataclass(frozen=True)
class SelfConsistency(LossBound):
    """The training loss rises as Laplace's approximation says, up to a factor.

    `docs/decisions.md` has the trials of both numbers.

    Args:
        most_ratio: `c`, the factor by which the two rises may differ.
        most_lost: `q`, the part of its training loss that error bars may cost a network.
    """

    name = "self_consistency"
    most_ratio: float = 1.1
    most_lost: float = 0.1
    nowhere = "The training loss does not rise as Laplace's approximation says"

    def share_used(self, model: LinearModel, prior: GaussianPrior, seed: int, in_order: bool) -> ShareUsed:
        return partial(self._share_used, model)

    def _share_used(self, model: LinearModel, z: Tensor, some: Tensor) -> float:
        likelihood, y, f = model.likelihood, model.targets[some], model.network_outputs[some].double()
        rise = (likelihood.loss(f + z, y) + likelihood.loss(f - z, y)) / 2 - likelihood.loss(f, y)
        rise, quadratic = rise.mean(), 0.5 * (z * likelihood.curvature(f, z, y)).sum(-1).mean()
        # Rounding decides a ratio of two rises that are nearly zero, in nats.
        ratio = float(rise / quadratic) if float(quadratic) > 1e-12 else 1.0
        part = 0.0
        if labelled(likelihood) is not None:
            lost, alone = cost_of_error_bars(likelihood, y, f, z)
            part = lost / max(alone, 1e-300)
        return max(abs(math.log(max(ratio, 1e-300))) / math.log(self.most_ratio), part / self.most_lost)


def cost_of_error_bars(
    likelihood: Likelihood, y: Tensor, f: Float[Tensor, "n C"], z: Float[Tensor, "K n C"]
) -> tuple[float, float]:
    """By how much labels lose log-likelihood when they are predicted with error bars, and the loss by the network."""
    alone = label_losses(likelihood, y, f, zeros_like(z[:1]), 0.0).sum()
    return float(label_losses(likelihood, y, f, z, 1.0).sum() - alone), float(alone)


@dataclass(frozen=True)
class LossRise(Selection):
    """The smallest prior precision at which error bars keep to a bound on the training data.

    It is not below that of largest evidence of the trained weights, `α ‖w̄‖² = γ(α)`: where no datum says anything
    against a small `α`, that is no reason for error bars without end where there are no data.

    Args:
        bound: on what draws of the function add to the loss.
        in_order: whether the first data are looked at in place of random ones.
        most: how many data are looked at; by default a few hundred.
    """

    # Draws of the function, each with its opposite, so that no term of first order is left.
    _DRAWS = 32

    bound: LossBound
    in_order: bool = False
    most: int | None = None
    # What the bound has found out about a model and its prior, which a second search of the same fit uses again.
    _known: list[tuple[LinearModel, GaussianPrior, ShareUsed]] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.bound.name

    def num_data(self, features: Features) -> int:
        """How many data are looked at: 100 to 400, whose rows of the Jacobian cost less than 0.3 of an epoch."""
        if self.most is not None:
            return self.most
        num = int(0.3 * features.num_data / features.num_outputs)
        return min(
            features.num_data,
            max(100, min(400, num)),
            max(1, 4 * NUMBERS_TOGETHER // (self._DRAWS * features.num_outputs)),
        )

    def cost(self, features: Features, *, rough: bool = True) -> SearchCost:
        tried = 6 if rough else 3  # by bisection of a grid of 40, and near a known precision
        fixed = self.bound.num_vjps(features)
        return search_cost(features, self.num_data(features), self._DRAWS, tried, fixed_vjps=fixed)

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Selected:
        num_data = self.num_data(model.features)
        some = model.with_targets(some_of(model.features, num_data, None if self.in_order else seed))
        features = SomeFeatures(model.features, some)
        # MacKay's fixed point with the trained weights in the place of the mode; standard deviations go with its root.
        lowest, _ = mackay_root(path.effective_dimension, lambda alpha: alpha * weight_norm, 1.0, bounds, 1e-3)
        alphas = grid(path, features, bounds)
        alphas = alphas[: int((alphas > lowest).sum()) + 1]  # those that may be chosen, and the next below
        share_used, vjps = self._share_used(model, path.prior, seed)
        draws = function_draws(path, features, alphas, Draws(self._DRAWS, seed, Stream.LOSS_RISE))
        share = cache(lambda index: share_used(draws(index), some))
        start = None if near is None else nearest(alphas, near)
        number = smallest_allowed(len(alphas), lambda index: share(index) <= 1, start)
        alpha = max(_interpolated(alphas, share, number), lowest)
        problem = (
            f"{self.bound.nowhere} at any prior precision that was tried: the largest, {float(alphas[0]):.3g}, is "
            "taken, and error bars are negligible. Pass `val_loader`, or look at the network's outputs on the training "
            "data."
        )
        spent = search_cost(features, len(some), self._DRAWS, share.cache_info().currsize, fixed_vjps=vjps)
        return Selected(
            alpha,
            model.likelihood,
            Calibration(),
            path.effective_dimension(alpha),
            passes=(spent.jvps + spent.vjps + spent.fixed_vjps) / (2 * model.features.num_data),
            problems=() if number else (problem,),
        )

    def _share_used(self, model: LinearModel, prior: GaussianPrior, seed: int) -> tuple[ShareUsed, int]:
        """The share of the bound as a function of draws, and the VJPs that this took."""
        for known, of_prior, used in self._known:
            if known is model and of_prior is prior:
                return used, 0
        self._known[:] = [(model, prior, self.bound.share_used(model, prior, seed, self.in_order))]
        return self._known[0][-1], self.bound.num_vjps(model.features)


def _interpolated(alphas: Float[Tensor, " A"], share: Callable[[int], float], number: int) -> float:
    """The precision at which the share is one, where the first so many of the grid are allowed; at its ends the end."""
    if number in (0, len(alphas)):
        return float(alphas[max(number - 1, 0)])
    below, above = share(number - 1), share(number)
    part = (1 - below) / (above - below) if math.isfinite(above) else 0.0
    logs = alphas.log()
    return float((logs[number - 1] + part * (logs[number] - logs[number - 1])).exp())
