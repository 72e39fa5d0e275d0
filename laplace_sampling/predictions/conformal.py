r"""Intervals and sets that contain a share of the targets, whatever is wrong with the network and its error bars.

Split conformal prediction (Papadopoulos et al. 2002; Lei et al. 2018): a score says how unlike the prediction a target
is, `|y − f|/√(var f + σ²)` of a regression and `−log p(y)` of labels. With scores `s₁ ≤ … ≤ s_n` of data that nothing
was fitted to, the score of another datum of the same distribution is at most `s_k`, `k = ⌈(n + 1) q⌉`, with a
probability of at least `q`, and of at most `q + 1/(n + 1)` where no scores are equal. Good error bars make sets small;
the guarantee holds with any.

Sets by `−log p(y)` are the smallest ones on average (Sadinle et al. 2019), and have few classes, or none, where the
network is unsure. Adaptive sets (APS: Romano, Sesia and Candès 2020) have the most probable classes up to a sum of
probabilities: the score is `Σ_{c: p_c ≥ p_y} p_c`, without their random part, which makes sets larger than need be.
A penalty `λ` for each class before the label, `λ (rank(y) − 1)`, keeps sets of many classes short (RAPS: Angelopoulos
et al. 2021, with `k_reg = 1`).

Where data are equal their scores are, too, but a network computes them with other rounding beside other data. So scores
are raised by a bound of that (`rounding`), which keeps the guarantee: larger scores contain more.
"""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.arguments import check_positive

# Units of rounding by which outputs may change between batches, relative to the largest of them. Networks of 1 to 8
# layers of 10 to 2,000 units changed by 1 to 31; four times as many widen intervals by 3e-5 of that output in float32.
_UNITS = 64


@dataclass(frozen=True)
class SplitConformal:
    """Scores of held-out data, and what they say of new targets.

    Attributes:
        scores: from small to large, a column for each target of a datum; infinite where a datum has none.
        num_data: in each column, `n`.
        num_samples: of the predictions that they are of.
        penalty: of the scores of adaptive sets; `None` for scores `−log p(y)` and of regressions.
    """

    scores: Float[Tensor, "n S"]
    num_data: Tensor
    num_samples: int
    penalty: float | None = None

    @classmethod
    def of(cls, scores: Float[Tensor, "n S"], num_samples: int, penalty: float | None = None) -> "SplitConformal":
        """Takes scores in any order, NaN where a target is not given."""
        given = ~scores.isnan()
        return cls(scores.where(given, torch.inf).sort(0).values, given.sum(0), num_samples, penalty)

    @property
    def num_targets(self) -> int:
        """The number of targets of each datum."""
        return self.scores.shape[1]

    def largest(self, level: float) -> Float[Tensor, " S"]:
        """The score that a new target exceeds with a probability of at most `1 − level`; infinite of too few data."""
        ranks = _rank(level, self.num_data)
        found = self.scores.gather(0, (ranks - 1).clamp(0, len(self.scores) - 1)[None])[0]
        return found.where(ranks <= self.num_data, torch.inf)


def rounding(outputs: Tensor) -> tuple[float, float]:
    """Bounds how much predictions may change by rounding from one batch to another.

    Returns the largest absolute change of an output, 64 units of rounding of the largest output, and the largest
    relative change of a standard deviation, `√ε`. The latter is larger than `ε` since the rows of the Jacobian are
    rounded relative to the prior, whose standard deviation may be up to `1/√ε` times that of the posterior.
    """
    unit = torch.finfo(outputs.dtype).eps
    return _UNITS * unit * float(outputs.abs().max()), math.sqrt(unit)


def _rank(level: float, num_data: Tensor) -> Tensor:
    """`⌈(n + 1) q⌉`; `(n + 1) q` may be a whole number, up to rounding."""
    return ((num_data + 1).double() * level - 1e-9).ceil().long()


def check_level(call: str, level: float) -> None:
    """Raise unless it is a probability between zero and one."""
    if not isinstance(level, Real):
        raise TypeError(f"`{call}` must be a number, such as 0.95, but is a {type(level).__name__}.")
    check_positive(f"`{call}`", level)
    if level >= 1:
        raise ValueError(f"`{call}` must be a probability below 1, such as 0.95, but is {level:g}.")
