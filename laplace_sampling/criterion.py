"""What chooses the hyperparameters: the evidence, the self-consistency of the approximation, or validation data."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from laplace_sampling.held_out import HeldOut
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.linear_model.bounds import NOISE_BOUNDS, Bounds
from laplace_sampling.methods.problem import Problem
from laplace_sampling.predictions.calibration import labelled
from laplace_sampling.predictions.left_out_labels import LeftOutLabels, has_left_out_labels
from laplace_sampling.predictions.loss_rise import LossRise, SelfConsistency
from laplace_sampling.predictions.selection import SearchCost
from laplace_sampling.predictions.validation import Validation, validation_cost

if TYPE_CHECKING:
    from laplace_sampling.settings import Settings

CRITERIA = ("auto", "evidence", "leave_one_out", "self_consistency", "validation")
# Held-out data that are looked at, at most, and numbers of their outputs; and the part of the budget that a rule may
# take. All are round numbers that bound the cost, and are not tuned.
_MOST, _NUMBERS, _SHARE = 1000, 2**20, 0.25


def with_selection(
    criterion: str,
    settings: "Settings",
    problem: Problem,
    held_out: HeldOut | None,
    noise_bounds: Bounds = NOISE_BOUNDS,
) -> Problem:
    """The problem with the rule of a criterion, which looks at no more data than a part of the budget pays for.

    Raises:
        ValueError: for one that is not known, that does not go with the likelihood, or that misses its data.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"`criterion={criterion!r}` is not known; use one of {list(CRITERIA)}.")
    problem, quadratic = replace(problem, criterion=criterion), settings.likelihood.quadratic
    if criterion == "self_consistency" and quadratic:
        raise ValueError(
            '`criterion="self_consistency"` compares the loss with its curvature, which agree everywhere for a '
            'Gaussian likelihood: use "evidence", or "validation" with a `val_loader`.'
        )
    if criterion == "validation" and held_out is None:
        raise ValueError('`criterion="validation"` needs data that the network was not trained on: give `val_loader`.')
    features = problem.features
    model = problem.tangent.model
    left_out = has_left_out_labels(model.likelihood, model.num_data, features.num_outputs)
    if criterion == "leave_one_out" and not left_out:
        raise ValueError(
            '`criterion="leave_one_out"` is for classifications with one label for each datum, at least ten training '
            'data for each class and at most a hundred classes: use "self_consistency", "evidence", or "validation" '
            "with a `val_loader`."
        )
    if criterion == "evidence":
        return problem
    # Other losses have a curvature that is a mean over targets, or a Gaussian part: their rises differ from the start.
    of_labels = labelled(settings.likelihood) is not None or isinstance(settings.likelihood, Poisson)
    if criterion == "validation" or (criterion == "auto" and held_out is not None):
        assert held_out is not None
        return replace(problem, selection=_validation(problem, held_out, noise_bounds))
    if not (of_labels or criterion in ("leave_one_out", "self_consistency")):
        return problem
    bound = LeftOutLabels() if left_out and criterion != "self_consistency" else SelfConsistency()
    rule = LossRise(bound, in_order=problem.tangent.in_order)
    most = _paid_for(rule.num_data(features), rule.cost(features), problem)
    return replace(problem, selection=replace(rule, most=most))


def _paid_for(num_data: int, search: SearchCost, problem: Problem) -> int:
    """How many of these data a part of the budget pays for."""
    if problem.cost is None:
        return num_data
    return search.data_within(num_data, problem.cost, _SHARE * problem.budget.left)


def _validation(problem: Problem, held_out: HeldOut, noise_bounds: Bounds) -> Validation:
    """The rule on a part of the held-out data."""
    data, network = held_out.data, problem.tangent.network
    most = max(1, min(data.num_data, _MOST, _NUMBERS // held_out.layout.size))
    most = _paid_for(most, validation_cost(problem.features, most, held_out.likelihood), problem)
    some = torch.arange(most)
    if not data.in_order:
        some = some * data.num_data // most
    some = held_out.with_targets(some)
    return Validation(held_out.model(network, some), noise_bounds)
