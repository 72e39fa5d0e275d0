r"""The prior precision at which Laplace's approximation stops to agree with itself; no mode, no evidence is needed.

Laplace's approximation says by how much the training loss rises when the function is drawn from its posterior,
`z ~ N(0, V_i(α))`: to second order by `½ E zᵀB_i z`. The true rise is `E ℓ(y_i, f_i + z) − ℓ(y_i, f_i)`. Where the
network is certain of its training labels `B_i` all but vanishes, `V_i` is large, and the true rise is many times the
quadratic one: error bars then hurt. Where the loss grows less than its curvature says, the ratio falls. So `α` is
lowered, from where the prior decides everything and both rises agree, as long as their ratio stays within `[1/c, c]`.

Another bound keeps it from error bars that nothing asks for. Labels of the training data, predicted with error bars,
`−log E p(y_i | f_i + z)`, must not be less likely than by the network alone by more than a part `q` of its loss: a
network that is not sure enough gains nothing by error bars, whose rises agree for it all along.
"""

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.calibration import labelled
from laplace_sampling.predictions.loss_bound import LossBound, Used, cost_of_error_bars

__all__ = ["SelfConsistency"]

# The factor by which the two rises may differ, and the part of its training loss that error bars may cost a network.
# At the `α` of least test loss the factor was 1.03 to 1.15 on eight networks for Fashion-MNIST (10,000 and 60,000 data,
# a CNN and a LeNet, all weights and the last layer), and the part 0.015 to 0.27; docs/decisions.md
# has the tables. With 1.2 alone a LeNet became worse than the network, and with 0.2 an MLP that was stopped early lost
# twice as much; with 0.05 a CNN gained a third less, and with 1.05 a tenth.
_MOST_RATIO, _MOST_LOST = 1.1, 0.1
# A rise of the loss of a datum, in nats, of which nothing is left but rounding.
_NOTHING = 1e-12


@dataclass(frozen=True)
class SelfConsistency(LossBound):
    """The training loss rises as Laplace's approximation says, up to a factor.

    Args:
        most_ratio: `c`.
        most_lost: `q`.
    """

    name = "self_consistency"
    most_ratio: float = _MOST_RATIO
    most_lost: float = _MOST_LOST
    nowhere = "The training loss does not rise as Laplace's approximation says"

    def used(self, model: LinearModel, prior: GaussianPrior, seed: int, in_order: bool) -> Used:
        return partial(self._used, model)

    def _used(self, model: LinearModel, z: Tensor, some: Tensor) -> float:
        likelihood, y, f = model.likelihood, model.targets_of(some), model.network_outputs_of(some).double()
        rise = (likelihood.loss(f + z, y) + likelihood.loss(f - z, y)) / 2 - likelihood.loss(f, y)
        rise, quadratic = rise.mean(), 0.5 * (z * likelihood.curvature(f, z, y)).sum(-1).mean()
        # Rounding decides a ratio of two rises that are nearly zero.
        ratio = float(rise / quadratic) if float(quadratic) > _NOTHING else 1.0
        part = 0.0
        if labelled(likelihood) is not None:
            lost, alone = cost_of_error_bars(likelihood, y, f, z)
            part = lost / max(alone, 1e-300)
        return max(abs(math.log(max(ratio, 1e-300))) / math.log(self.most_ratio), part / self.most_lost)
