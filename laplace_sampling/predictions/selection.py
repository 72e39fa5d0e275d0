"""`Selection`: a rule that chooses the prior precision from a `CovariancePath`, without evidence and without a mode."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features, SomeFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.covariance_path import CovariancePath, by_rows, num_samples

# Precisions of the grid in each decade: predicted standard deviations of two neighbours differ by less than a half.
PER_DECADE = 3


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


@dataclass(frozen=True)
class SearchCost:
    """What a search for the prior precision is predicted to take.

    Attributes:
        jvps: of one datum and one vector.
        vjps: of one datum and one vector.
        vectors: products of the curvature's eigenvectors with a vector of weights.
        fixed_vjps: VJPs that do not depend on how many data are looked at.
    """

    jvps: float = 0.0
    vjps: float = 0.0
    vectors: float = 0.0
    fixed_vjps: float = 0.0

    def operations(self, cost: Cost) -> float:
        """Floating-point operations."""
        return self.jvps * cost.jvp + (self.vjps + self.fixed_vjps) * cost.vjp

    def data_within(self, num_data: int, cost: Cost, operations: float, least: int = 50) -> int:
        """How many of the data so many operations pay for, and a few at least: with fewer the choice is chance."""
        fixed = self.fixed_vjps * cost.vjp
        part = max(0.0, operations - fixed) / (self.operations(cost) - fixed)
        return num_data if part >= 1 else max(min(least, num_data), int(part * num_data))


def search_cost(
    features: Features, num_data: float, num_draws: int, tried: int, *, rows: bool = False, fixed_vjps: int = 0
) -> SearchCost:
    """The cost of draws of the function.

    Args:
        features: of data of the same kind.
        num_data: how many data are looked at.
        num_draws: of the function at a datum.
        tried: at how many precisions.
        rows: whether rows of the Jacobian are taken, however many weights there are.
        fixed_vjps: VJPs besides.
    """
    if rows or by_rows(features):  # for all precisions
        num_rows = float(features.num_outputs * num_data)
        return SearchCost(vjps=num_rows, vectors=num_rows, fixed_vjps=fixed_vjps)
    samples = num_samples(num_draws)
    # A root of the covariance goes to the eigenvectors and back.
    return SearchCost(float(samples * num_data * tried), vectors=2.0 * samples * tried, fixed_vjps=fixed_vjps)


class Selection(ABC):
    """A rule for the prior precision."""

    name: str

    @abstractmethod
    def cost(self, features: Features, *, rough: bool = True) -> SearchCost:
        """What a search is predicted to take, given the training data; not `rough` where it is known where to look."""

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
            near: a precision at which the search begins.
        """


def grid(path: CovariancePath, features: Features, bounds: tuple[float, float]) -> Float[Tensor, " A"]:
    """Prior precisions from large to small: from those where the prior decides to those where the data do.

    At the largest one the prior leaves a standard deviation of a tenth of a logit, or it is ten times the largest
    eigenvalue of the curvature; the smallest one is 1e-8 of that eigenvalue.

    Args:
        path: the posterior for every prior precision.
        features: of the data that are looked at.
        bounds: within which the precision is kept.
    """
    few = SomeFeatures(features, torch.arange(0, features.num_data, math.ceil(features.num_data / 16)))
    unit = path.prior_variance(few, Draws(4, 0, Stream.RULE))
    high = max(10 * path.largest_eigenvalue, unit / 0.1**2, 1e-300)
    low = 1e-8 * max(path.largest_eigenvalue, 1e-6 * high)
    number = math.ceil(PER_DECADE * math.log10(high / low)) + 1
    exponents = torch.linspace(math.log10(high), math.log10(low), number, dtype=torch.float64)
    return (10**exponents).clamp(*bounds).unique().flip(0)


def nearest(alphas: Float[Tensor, " A"], alpha: float) -> int:
    """The index of the precision of a grid that is nearest to another one."""
    return int((alphas.log() - math.log(alpha)).abs().argmin())


def smallest_allowed(number: int, allowed: Callable[[int], bool], start: int | None = None) -> int:
    """How many of the precisions of a grid are allowed, which are the first ones: by doubling steps, and bisection.

    Args:
        number: of precisions, from large to small.
        allowed: whether one is, by its index.
        start: where the search begins; by default in the middle.
    """
    low, high, step = -1, number, 1  # the last that is known to be allowed, and the first that is known not to be
    at = number // 2 if start is None else start
    while high - low > 1:
        if allowed(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        if start is None or (low >= 0 and high < number):
            at = (low + high) // 2
        at, step = min(max(at, low + 1), high - 1), 2 * step
    return high
