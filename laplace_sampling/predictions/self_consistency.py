r"""The prior precision at which Laplace's approximation stops to agree with itself; no mode, no evidence is needed.

Laplace's approximation says by how much the training loss rises when the function is drawn from its posterior,
`z ~ N(0, V_i(α))`: to second order by `½ E zᵀB_i z`. The true rise is `E ℓ(y_i, f_i + z) − ℓ(y_i, f_i)`. Where the
network is certain of its training labels `B_i` all but vanishes, `V_i` is large, and the true rise is many times the
quadratic one: error bars then hurt. Where the loss grows less than its curvature says, the ratio falls. So `α` is
lowered, from where the prior decides everything and both rises agree, as long as their ratio stays within `[1/c, c]`.

Two more bounds keep it from error bars that nothing asks for. Labels of the training data, predicted with error bars,
`−log E p(y_i | f_i + z)`, must not be less likely than by the network alone by more than a part `q` of its loss: a
network that is not sure enough gains nothing by error bars, whose rises agree for it all along. And `α` is not below
that of largest evidence of the trained weights, `α ‖w̄‖² = γ(α)`: where no datum says anything against a small `α`, that
is no reason for error bars without end where there are no data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.some_features import SomeFeatures
from laplace_sampling.predictions.calibration import Calibration, label_losses, labelled
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.predictions.looks import Looks, decades
from laplace_sampling.predictions.selection import Selected, Selection, grid, nearest
from laplace_sampling.solvers.root import falling_root

__all__ = ["SelfConsistency", "most_data"]

# The factor by which the two rises may differ, and the part of its training loss that error bars may cost a network.
# At the `α` of least test loss the factor was 1.03 to 1.15 on eight networks for Fashion-MNIST (10,000 and 60,000 data,
# a CNN and a LeNet, all weights and the last layer), and the part 0.015 to 0.27; docs/decisions/choice-of-precision.md
# has the tables. With 1.2 alone a LeNet became worse than the network, and with 0.2 an MLP that was stopped early lost
# twice as much; with 0.05 a CNN gained a third less, and with 1.05 a tenth.
_MOST_RATIO, _MOST_LOST = 1.1, 0.1
# Draws of the function, each with its opposite, so that no term of first order is left.
_DRAWS, _STREAM = 32, 2**20 + 2
# Numbers of the draws in memory, where a datum has many outputs.
_NUMBERS = 2**24
# Of `log α` of the evidence: predicted standard deviations go with its half.
_ACCURACY = 1e-3
# A rise of the loss of a datum, in nats, of which nothing is left but rounding.
_NOTHING = 1e-12
# Training data that are looked at: so many at most, at least, and so many rows of the Jacobian for each of them that
# they are this part of a training epoch.
_MOST, _LEAST, _PART = 400, 100, 0.3


@dataclass(frozen=True)
class SelfConsistency(Selection):
    """The smallest prior precision at which the training loss rises as Laplace's approximation says, up to a factor.

    Args:
        most_ratio: `c`.
        most_lost: `q`.
        in_order: whether the first data are looked at in place of random ones.
        num_data: how many data are looked at; by default a few hundred, see `most_data`.
    """

    name = "self_consistency"
    most_ratio: float = _MOST_RATIO
    most_lost: float = _MOST_LOST
    in_order: bool = False
    num_data: int | None = None

    def looks(self, features: Features) -> Looks:
        return Looks(most_data(features) if self.num_data is None else self.num_data, _DRAWS)

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Selected:
        looks, draws = self.looks(model.features), Draws(_DRAWS, seed, _STREAM)
        some = _some(model.features, looks.num_data, None if self.in_order else seed)
        alphas = grid(path, SomeFeatures(model.features, some), bounds)
        products = 0.0
        if near is None:
            part, coarse = some[looks.part], decades(len(alphas))
            rough = path.deviations(SomeFeatures(model.features, part), alphas[coarse], draws, len(coarse))
            outside = (i for n, i in enumerate(coarse) if self._excess(model, part, rough[n]) > 1)
            # The first one of the whole grid that is outside lies up to a decade above.
            start = max(0, next(outside, len(alphas)) - 1)
            products = rough.products
        else:
            start = nearest(alphas, near)
        found = path.deviations(SomeFeatures(model.features, some), alphas, draws)
        excess = cache(lambda index: self._excess(model, some, found[index]))
        alpha, problems = _last_within(alphas, excess, _first_outside(excess, start, len(alphas)))
        alpha = max(alpha, _of_evidence(path, weight_norm, bounds))
        return Selected(
            alpha,
            model.likelihood,
            Calibration(),
            path.effective_dimension(alpha),
            passes=(products + found.products) / (2 * model.features.num_data),
            problems=problems,
        )

    def _excess(self, model: LinearModel, some: Tensor, z: Float[Tensor, "K n C"]) -> float:
        """How much of its bounds the draws of the function at one precision use; more than one is too much."""
        likelihood, y, f = model.likelihood, model.targets[some], model.network_outputs[some].double()
        rise = (likelihood.loss(f + z, y) + likelihood.loss(f - z, y)) / 2 - likelihood.loss(f, y)
        rise, quadratic = rise.mean(), 0.5 * (z * likelihood.curvature(f, z, y)).sum(-1).mean()
        # Rounding decides a ratio of two rises that are nearly zero.
        ratio = float(rise / quadratic) if float(quadratic) > _NOTHING else 1.0
        if labelled(likelihood) is None:
            lost = 0.0
        else:
            alone = label_losses(likelihood, y, f, torch.zeros_like(z[:1]), 0.0).sum()
            lost = float(label_losses(likelihood, y, f, z, 1.0).sum() - alone) / max(float(alone), 1e-300)
        return max(abs(math.log(max(ratio, 1e-300))) / math.log(self.most_ratio), lost / self.most_lost)


def _of_evidence(path: CovariancePath, weight_norm: float, bounds: tuple[float, float]) -> float:
    """MacKay's fixed point `α ‖w̄‖² = γ(α)` with the trained weights in the place of the mode."""

    def excess(log_alpha: float) -> float:
        alpha = math.exp(log_alpha)
        return math.log(max(path.effective_dimension(alpha), 1e-300)) - math.log(max(alpha * weight_norm, 1e-300))

    low, high = (math.log(bound) for bound in bounds)
    root, _ = falling_root(excess, min(max(0.0, low), high), (low, high), _ACCURACY)
    return math.exp(root)


def _some(features: Features, num: int, seed: int | None) -> Tensor:
    """Indices of a random part of the data, in order, or of the first ones."""
    if seed is None:
        return torch.arange(num)
    chosen = torch.randperm(features.num_data, generator=torch.Generator().manual_seed(seed))[:num]
    return chosen.sort().values


def most_data(features: Features) -> int:
    """How many data the rule looks at: those whose rows of the Jacobian cost less than a part of an epoch."""
    num = int(_PART * features.num_data / features.num_outputs)
    return min(features.num_data, max(_LEAST, min(_MOST, num)), max(1, _NUMBERS // (_DRAWS * features.num_outputs)))


def _first_outside(excess: Callable[[int], float], start: int, number: int) -> int:
    """The first precision at which a bound is not kept, near another one; or the number of all."""
    first = start
    while first > 0 and excess(first) > 1:
        first -= 1
    while first < number and excess(first) <= 1:
        first += 1
    return first


def _last_within(
    alphas: Float[Tensor, " A"], excess: Callable[[int], float], first: int
) -> tuple[float, tuple[str, ...]]:
    """The smallest precision down to which all bounds are kept, interpolated."""
    if first == len(alphas):
        return float(alphas[-1]), ()
    if first == 0:
        return float(alphas[0]), (
            "The training loss does not rise as Laplace's approximation says at any prior precision that was tried: "
            f"the largest, {float(alphas[0]):.3g}, is taken. Look at the network's outputs on the training data.",
        )
    below, above = excess(first - 1), excess(first)
    part = (1 - below) / (above - below) if math.isfinite(above) else 0.0
    logs = alphas.log()
    return float((logs[first - 1] + part * (logs[first] - logs[first - 1])).exp()), ()
