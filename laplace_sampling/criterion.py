"""What chooses the hyperparameters: the evidence, left-out labels, the self-consistency, or validation data."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from laplace_sampling.arguments import check_whole
from laplace_sampling.held_out import HeldOut
from laplace_sampling.hyperparameters import rules, validation
from laplace_sampling.hyperparameters.rules import LossBound, LossRise, SearchCost, Selection
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.linear_model.bounds import NOISE_BOUNDS, PRECISION_BOUNDS, Bounds, check_bounds
from laplace_sampling.methods.problem import Problem
from laplace_sampling.predictions.calibration import labelled

# The part of the budget that a rule may take.
_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Criterion(ABC):
    """What chooses the hyperparameters in `fit_hyperparameters`.

    To write one, subclass this in a file of its own, give `name` and `rule`, and add a line to `CRITERIA`.

    Args:
        precision_bounds: within which the prior precision `α` is kept.
    """

    name: ClassVar[str]
    precision_bounds: Bounds = PRECISION_BOUNDS

    def __post_init__(self) -> None:
        check_bounds(self.precision_bounds, getattr(self, "noise_bounds", NOISE_BOUNDS))

    @abstractmethod
    def rule(self, problem: Problem, held_out: HeldOut | None) -> Selection | None:
        """The rule for the prior precision; `None` if it is the evidence.

        Raises:
            ValueError: if the criterion does not go with the likelihood, or misses its data.
        """


@dataclass(frozen=True, kw_only=True)
class Evidence(Criterion):
    """The largest marginal likelihood `log p(y)` of the linear model.

    Args:
        precision_bounds: within which the prior precision `α` is kept.
        noise_bounds: within which the noise precision of a regression is kept.
        max_steps: steps at most; a `ConvergenceWarning` tells if they were not enough.
        num_samples: samples during EM, where a method needs it; `γ` has a relative error of about `√(2/(Kγ))`.
    """

    name = "evidence"
    noise_bounds: Bounds = NOISE_BOUNDS
    max_steps: int = 10
    num_samples: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("`Evidence(max_steps=...)`", self.max_steps, 1)
        check_whole("`Evidence(num_samples=...)`", self.num_samples, 1)

    def rule(self, problem: Problem, held_out: HeldOut | None) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class LeftOutLabels(Criterion):
    """The smallest precision at which error bars cost training labels no more than errors on left-out data warrant.

    It is for one label a datum, of at most 100 classes with ten data each (`hyperparameters.rules`).
    """

    name = "leave_one_out"

    def rule(self, problem: Problem, held_out: HeldOut | None) -> Selection:
        if not has_left_out_labels(problem):
            raise ValueError(
                '`criterion="leave_one_out"` is for classifications with one label for each datum, at least ten '
                'training data for each class and at most a hundred classes: use "self_consistency", "evidence", or '
                '"validation" with a `val_loader`.'
            )
        return _loss_rise(rules.LeftOutLabels(), problem)


@dataclass(frozen=True, kw_only=True)
class SelfConsistency(Criterion):
    """The smallest precision at which the training loss rises as Laplace's approximation says."""

    name = "self_consistency"

    def rule(self, problem: Problem, held_out: HeldOut | None) -> Selection:
        if problem.tangent.model.likelihood.quadratic:
            raise ValueError(
                '`criterion="self_consistency"` compares the loss with its curvature, which agree everywhere for a '
                'Gaussian likelihood: use "evidence", or "validation" with a `val_loader`.'
            )
        return _loss_rise(rules.SelfConsistency(), problem)


@dataclass(frozen=True, kw_only=True)
class Validation(Criterion):
    """The widest error bars that cost held-out data hardly anything, with a temperature or the noise.

    Args:
        precision_bounds: within which the prior precision `α` is kept.
        noise_bounds: within which the noise precision of a regression is kept.
        most_data: held-out data that are looked at, at most; fewer where they have many outputs.
    """

    name = "validation"
    noise_bounds: Bounds = NOISE_BOUNDS
    most_data: int = 1000

    def rule(self, problem: Problem, held_out: HeldOut | None) -> Selection:
        if held_out is None:
            raise ValueError(
                '`criterion="validation"` needs data that the network was not trained on: give `val_loader`.'
            )
        data = held_out.data
        most = max(1, min(data.num_data, self.most_data, 2**20 // held_out.layout.size))
        most = _affordable(most, validation.validation_cost(problem.features, most, held_out.likelihood), problem)
        some = torch.arange(most)
        if not data.in_order:
            some = some * data.num_data // most
        model = held_out.model(problem.tangent.network, held_out.with_targets(some))
        return validation.Validation(model, self.noise_bounds)


CRITERIA: dict[str, Callable[..., Criterion]] = {
    "evidence": Evidence,
    "leave_one_out": LeftOutLabels,
    "self_consistency": SelfConsistency,
    "validation": Validation,
}


def as_criterion(criterion: str | Criterion) -> Criterion | None:
    """The criterion that a user gives by name or as an object; `None` for `"auto"`.

    Raises:
        TypeError, ValueError: for one that is not known.
    """
    if isinstance(criterion, Criterion):
        return criterion
    names = ["auto", *CRITERIA]
    if not isinstance(criterion, str):
        raise TypeError(f"`criterion` must be one of {names} or a `Criterion`, but is {criterion!r:.80}.")
    if criterion not in names:
        raise ValueError(f"`criterion={criterion!r}` is not known; use one of {names}.")
    return None if criterion == "auto" else CRITERIA[criterion]()


def with_rule(criterion: Criterion | None, problem: Problem, held_out: HeldOut | None) -> Problem:
    """The problem with the rule of a criterion, which looks at no more data than a part of the budget pays for.

    Raises:
        ValueError: if the criterion does not go with the likelihood, or misses its data.
    """
    name = "auto" if criterion is None else criterion.name
    chosen = _default(problem, held_out) if criterion is None else criterion
    return replace(problem, criterion=name, selection=chosen.rule(problem, held_out))


def _default(problem: Problem, held_out: HeldOut | None) -> Criterion:
    """The criterion that is taken for `"auto"`."""
    likelihood = problem.tangent.model.likelihood.unweighted
    if held_out is not None:
        return Validation()
    if has_left_out_labels(problem):
        return LeftOutLabels()
    # Other losses have a curvature that is a mean over targets, or a Gaussian part: their rises differ from the start.
    return SelfConsistency() if labelled(likelihood) is not None or isinstance(likelihood, Poisson) else Evidence()


def has_left_out_labels(problem: Problem) -> bool:
    model = problem.tangent.model
    return rules.has_left_out_labels(model.likelihood, model.num_data, model.features.num_outputs)


def _loss_rise(bound: LossBound, problem: Problem) -> LossRise:
    rule = LossRise(bound, in_order=problem.tangent.in_order)
    return replace(rule, most=_affordable(rule.num_data(problem.features), rule.cost(problem.features), problem))


def _affordable(num_data: int, search: SearchCost, problem: Problem) -> int:
    """How many of these data a part of the budget pays for."""
    if problem.cost is None:
        return num_data
    return search.data_within(num_data, problem.cost, _SHARE * problem.budget.left)
