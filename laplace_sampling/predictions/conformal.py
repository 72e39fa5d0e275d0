r"""Intervals and sets that contain a share of the targets, whatever is wrong with the network and its error bars.

`SplitConformal` (Papadopoulos et al. 2002; Lei et al. 2018): a score says how unlike the prediction a target is,
`|y − f|/√(var f + σ²)` of a regression and `−log p(y)` of labels. With scores `s₁ ≤ … ≤ s_n` of data that nothing was
fitted to, the score of another datum of the same distribution is at most `s_k`, `k = ⌈(n + 1) q⌉`, with a probability
of at least `q`, and of at most `q + 1/(n + 1)` where no scores are equal. Good error bars make sets small; the
guarantee holds with any.

`FullConformal` (Vovk et al. 2005) needs no such data: a target `y` is in the interval if its residual is not among the
largest after the model was trained with it as well. For a linear model that adds `c_i t` to the predictions of the
training data and leaves a residual `t/(1 + b v)`, with `t = y − f`, `v = var f`, `c_i = b cov(f_i, f)/(1 + b v)` and
the noise precision `b`; for a network that is the influence of a datum by its linearisation (Tailor et al. 2025, arXiv
2507.20272). The guarantee is exact for a linear model of one output that is trained to its optimum, with covariances in
closed form: noise of samples makes intervals wider, and of several outputs training residuals know more than a new one.
For a network it is approximate, and a network that knows its training data by heart has intervals that are too narrow.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.checks import check_positive

__all__ = ["Conformal", "FullConformal", "SplitConformal", "check_level", "conformal_of"]

# Numbers in memory: of new data and training data, by pairs.
_NUMBERS = 2**22


class Conformal(ABC):
    """Scores of data, and what they say of new targets."""

    num_samples: int

    @property
    @abstractmethod
    def num_targets(self) -> int:
        """Of each datum that was seen."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """For files; `conformal_of` is the way back."""

    @abstractmethod
    def errors(
        self,
        level: float,
        deviations: Float[Tensor, "K N C"],
        variance: Float[Tensor, "N C"],
        noise_variance: Float[Tensor, "N C"],
    ) -> tuple[Float[Tensor, "N C"], Float[Tensor, "N C"]]:
        """The least and the largest `y − f` of a regression, of targets that contain the new one at this level.

        Args:
            level: the probability.
            deviations: of the function at new inputs.
            variance: of the function there.
            noise_variance: of the targets.
        """


@dataclass(frozen=True)
class SplitConformal(Conformal):
    """Scores of held-out data.

    Attributes:
        scores: from small to large, a column for each target of a datum; infinite where a datum has none.
        num_data: in each column, `n`.
        num_samples: of the predictions that they are of.
    """

    scores: Float[Tensor, "n S"]
    num_data: Tensor
    num_samples: int

    @classmethod
    def of(cls, scores: Float[Tensor, "n S"], num_samples: int) -> "SplitConformal":
        """Of scores in any order; NaN where a target is not given."""
        given = ~scores.isnan()
        return cls(scores.where(given, torch.inf).sort(0).values, given.sum(0), num_samples)

    @property
    def num_targets(self) -> int:
        return self.scores.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {"scores": self.scores, "num_data": self.num_data, "num_samples": torch.tensor(self.num_samples)}

    def largest(self, level: float) -> Float[Tensor, " S"]:
        """The score that a new target exceeds with a probability of at most `1 − level`; infinite of too few data."""
        ranks = _rank(level, self.num_data)
        found = self.scores.gather(0, (ranks - 1).clamp(0, len(self.scores) - 1)[None])[0]
        return found.where(ranks <= self.num_data, torch.inf)

    def errors(
        self, level: float, deviations: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        half = self.largest(level).to(variance) * (variance + noise_variance).sqrt()
        return -half, half


@dataclass(frozen=True)
class FullConformal(Conformal):
    """Residuals of the training data, and how the linear model moves them.

    Attributes:
        residuals: `y_i − f_i`.
        deviations: `φ(x_i) ζ_k`.
    """

    residuals: Float[Tensor, "n C"]
    deviations: Float[Tensor, "K n C"]

    @property
    def num_samples(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.deviations)

    @property
    def num_targets(self) -> int:
        return self.residuals.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {"residuals": self.residuals, "deviations": self.deviations}

    def errors(
        self, level: float, deviations: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The residual of `y` stays `a t`; that of a training datum becomes `e_i − c_i t`. It is the larger one for `t`
        # from `−|e|/(a − c sgn e)` to `|e|/(a + c sgn e)`, without an end where a denominator is not positive.
        e, known = self.residuals.to(deviations), self.deviations.to(deviations)
        rank = max(int(_rank(level, torch.tensor(len(e)))), 1)
        if rank > len(e):
            return torch.full_like(variance, -torch.inf), torch.full_like(variance, torch.inf)
        total = noise_variance + variance
        left, ends = noise_variance / total, []
        for some in torch.arange(len(total), device=total.device).split(max(1, _NUMBERS // e.numel())):
            covariance = torch.einsum("kic,knc->nic", known, deviations[:, some]) / len(known)
            moved = covariance / total[some, None] * e.sign()
            sides = (left[some, None] + side for side in (-moved, moved))
            ends.append([(e.abs() / a).where(a > 0, torch.inf).kthvalue(rank, 1).values for a in sides])
        below, above = (torch.cat(end) for end in zip(*ends, strict=True))
        return -below, above


def conformal_of(tensors: dict[str, Tensor]) -> Conformal | None:
    """What `tensors` gave; None for no tensors."""
    if not tensors:
        return None
    if "residuals" in tensors:
        return FullConformal(**tensors)
    return SplitConformal(**{**tensors, "num_samples": int(tensors["num_samples"])})


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
