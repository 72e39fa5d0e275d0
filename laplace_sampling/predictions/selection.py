"""`Selection`: a rule that chooses the prior precision from a `CovariancePath`, without evidence and without a mode."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.some_features import SomeFeatures
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.covariance_path import CovariancePath

if TYPE_CHECKING:
    from laplace_sampling.predictions.looks import Looks

__all__ = ["Selected", "Selection", "grid", "nearest"]

# Precisions that are tried, so many a decade: from where the prior leaves a standard deviation of a tenth of a logit,
# or ten times the largest eigenvalue of the curvature, above which the prior decides, down to where the data decide.
_A_DECADE, _HIGHEST_VARIANCE, _LOWEST = 3, 0.01, 1e-8
# Data whose variance under the prior says where it starts, and random weights by which it is estimated.
_FEW, _PROBES = 16, 4


@dataclass(frozen=True)
class Selected:
    """What a rule chose.

    Attributes:
        alpha: the prior precision.
        likelihood: with its noise precision, if the rule chose that as well.
        calibration: of predictions.
        effective_dimension: `γ` there.
        passes: Jacobian products of the rule itself, in units of all training data and one vector.
        problems: what is wrong, in words.
    """

    alpha: float
    likelihood: Likelihood
    calibration: Calibration
    effective_dimension: float
    passes: float
    problems: tuple[str, ...] = ()


class Selection(ABC):
    """A rule for the prior precision."""

    name: str

    @abstractmethod
    def looks(self, features: Features) -> "Looks":
        """What it looks at, given the training data."""

    @abstractmethod
    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Selected:
        """The prior precision of a linear model whose posterior is known for all of them.

        Args:
            model: on the training data.
            path: the posterior for every prior precision.
            bounds: within which the precision is kept.
            seed: of draws of the function.
            weight_norm: `‖w̄‖²` in the scaled coordinates of the prior.
            near: a precision near the one that is looked for, where that is known: more than a decade away from it the
                whole grid is searched.
        """


def grid(path: CovariancePath, features: Features, bounds: tuple[float, float]) -> Float[Tensor, " A"]:
    """Prior precisions from large to small: from those where the prior decides to those where the data do.

    Args:
        path: the posterior for every prior precision.
        features: of the data that are looked at.
        bounds: within which the precision is kept.
    """
    few = SomeFeatures(features, torch.arange(0, features.num_data, math.ceil(features.num_data / _FEW)))
    unit = path.prior_variance(few, Draws(_PROBES, 0, Stream.RULE))
    high = max(10 * path.largest_eigenvalue, unit / _HIGHEST_VARIANCE, 1e-300)
    low = _LOWEST * max(path.largest_eigenvalue, 1e-6 * high)
    number = math.ceil(_A_DECADE * math.log10(high / low)) + 1
    exponents = torch.linspace(math.log10(high), math.log10(low), number, dtype=torch.float64)
    return (10**exponents).clamp(*bounds).unique().flip(0)


def nearest(alphas: Float[Tensor, " A"], alpha: float) -> int:
    """The index of the precision of a grid that is nearest to another one."""
    return int((alphas.log() - math.log(alpha)).abs().argmin())
