"""What chooses the hyperparameters: the evidence, left-out labels, the self-consistency, or validation data."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.hyperparameters import rules, validation
from laplace_sampling.hyperparameters.hyperparameters import NOISE_BOUNDS, PRECISION_BOUNDS, Bounds, check_bounds
from laplace_sampling.hyperparameters.rules import LossRise, SearchCost, Selection
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.linear_model.held_out import HeldOut
from laplace_sampling.linear_model.linear_model import TangentModel
from laplace_sampling.predictions.calibration import labelled

# How many of some data a part of the budget pays for, at such a cost.
Affordable = Callable[[int, SearchCost], int]


@dataclass(frozen=True, kw_only=True)
class Criterion(ABC):
    """What chooses the hyperparameters in `fit_hyperparameters`.

    To write one, subclass this in a file of its own, give `name` and `rule`, and add a line to the table in
    `as_criterion.py`.

    Args:
        precision_bounds: bounds of the prior precision `α`.
        noise_bounds: bounds of the noise precision of a regression.
    """

    name: ClassVar[str]
    precision_bounds: Bounds = PRECISION_BOUNDS
    noise_bounds: Bounds = NOISE_BOUNDS

    def __post_init__(self) -> None:
        check_bounds(self.precision_bounds, self.noise_bounds)

    @property
    def evidence(self) -> "Evidence":
        """The evidence within these bounds, for priors of several precisions and for methods without a rule."""
        return Evidence(precision_bounds=self.precision_bounds, noise_bounds=self.noise_bounds)

    @abstractmethod
    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> Selection | None:
        """The rule for the prior precision; `None` if it is the evidence.

        Args:
            tangent: the linear model on the training data.
            held_out: data that the network was not trained on, if there are any.
            affordable: a function of a number of data and the cost of a search: how many of these data the budget pays
                for.

        Raises:
            ValueError: if the criterion does not go with the likelihood, or needs data that are not there.
        """


@dataclass(frozen=True, kw_only=True)
class Evidence(Criterion):
    """The largest marginal likelihood `log p(y)` of the linear model.

    Args:
        precision_bounds: bounds of the prior precision `α`.
        noise_bounds: bounds of the noise precision of a regression.
        max_steps: the largest number of steps. A `ConvergenceWarning` says if they were not enough.
        num_samples: the number `K` of samples in EM, for methods that search by EM. The effective dimension `γ` then
            has a relative error of about `√(2/(Kγ))`.
    """

    name = "evidence"
    max_steps: int = 10
    num_samples: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("`Evidence(max_steps=...)`", self.max_steps, 1)
        check_whole("`Evidence(num_samples=...)`", self.num_samples, 1)

    @property
    def evidence(self) -> "Evidence":
        return self

    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class LeftOutLabels(Criterion):
    """The widest error bars that cost the training labels no more than errors on left-out labels warrant.

    It takes the smallest prior precision of this kind. It is for one label for each datum, at most 100 classes, and at
    least ten data a class on average (`hyperparameters.rules`).

    Args:
        precision_bounds: bounds of the prior precision `α`.
        noise_bounds: bounds of the noise precision of a regression.
    """

    name = "leave_one_out"

    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> LossRise:
        if not _has_left_out_labels(tangent):
            raise ValueError(
                '`criterion="leave_one_out"` is for classifications with one label for each datum, on average at '
                'least ten training data a class, and at most a hundred classes: use "self_consistency", "evidence", '
                'or "validation" with a `val_loader`.'
            )
        return _within_budget(rules.LeftOutLabels(in_order=tangent.in_order), tangent, affordable)


@dataclass(frozen=True, kw_only=True)
class SelfConsistency(Criterion):
    """The smallest prior precision at which the training loss rises as Laplace's approximation says.

    Args:
        precision_bounds: bounds of the prior precision `α`.
        noise_bounds: bounds of the noise precision of a regression.
    """

    name = "self_consistency"

    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> LossRise:
        if tangent.model.likelihood.quadratic:
            raise ValueError(
                '`criterion="self_consistency"` compares the loss with its curvature, which agree everywhere for a '
                'Gaussian likelihood: use "evidence", or "validation" with a `val_loader`.'
            )
        return _within_budget(rules.SelfConsistency(in_order=tangent.in_order), tangent, affordable)


@dataclass(frozen=True, kw_only=True)
class Validation(Criterion):
    """The widest error bars that hardly make held-out data less likely, together with a temperature or the noise.

    Args:
        precision_bounds: bounds of the prior precision `α`.
        noise_bounds: bounds of the noise precision of a regression.
        most_data: the largest number of held-out data that are used; fewer if they have many outputs. Error bars are
            computed at as many of them as the budget pays for; of labels, the network's outputs at all of them.
    """

    name = "validation"
    most_data: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("`Validation(most_data=...)`", self.most_data, 1)

    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> Selection:
        if held_out is None:
            raise ValueError(
                '`criterion="validation"` needs data that the network was not trained on: give `val_loader`.'
            )
        data = held_out.data
        most = max(1, min(data.num_data, self.most_data, 2**20 // held_out.layout.size))
        few = affordable(most, validation.validation_cost(tangent.model.features, most, held_out.likelihood))
        some, drawn = torch.arange(most), torch.arange(few)
        if not data.in_order:
            some, drawn = some * data.num_data // most, drawn * most // few
        chosen = torch.zeros(most, dtype=torch.bool).index_fill(0, drawn, True)
        of_drawn, others = (held_out.with_targets(some[which]) for which in (chosen, ~chosen))
        model, rest = held_out.model(tangent.network, of_drawn), None
        if len(others) and not isinstance(held_out.likelihood, Gaussian):
            alone = held_out.model(tangent.network, others)
            rest = alone.targets, alone.network_outputs
        return validation.Validation(model, self.noise_bounds, rest=rest)


@dataclass(frozen=True, kw_only=True)
class Accuracy(Criterion):
    """A temperature by the accuracy on new data, and then the rule that data without held-out ones have.

    It is for classifications and binary likelihoods, and for priors of one precision. The temperature divides the
    outputs. It is the one under which training labels are likeliest where outputs have so much noise that they are
    predicted rightly as often as new ones; below one it is the root of that, since too small a temperature costs more
    than one that is too large (`hyperparameters.known_accuracy`). It takes no product with the network.

    Args:
        value: the part of new labels that the network predicts rightly, as on a test set. It may be off by some
            hundredths.
        precision_bounds: bounds of the prior precision `α`.
        noise_bounds: bounds of the noise precision of a regression.
    """

    name = "accuracy"
    value: float = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("`accuracy`", self.value, 1, ", a part of one")

    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> Selection:
        labels, num_outputs = labelled(tangent.model.likelihood), tangent.model.features.num_outputs
        if labels is None:
            raise ValueError(
                "`accuracy` is that of labels, of a classification or a binary likelihood, but the likelihood is "
                f"{tangent.model.likelihood.name!r}: leave it out."
            )
        if held_out is not None:
            raise ValueError("`accuracy` is for fits without held-out data: give it or `val_loader`, which says more.")
        classes = labels.positions(torch.empty(1, num_outputs)).shape[-1]
        if self.value <= 1 / classes:
            raise ValueError(
                f"`accuracy` must be above chance, 1/{classes} of {classes} classes, but is {self.value:g}."
            )
        usual = LeftOutLabels() if _has_left_out_labels(tangent) else SelfConsistency()
        rule = usual.rule(tangent, held_out, affordable)
        return replace(rule, accuracy=float(self.value))


@dataclass(frozen=True, kw_only=True)
class Default(Criterion):
    """The criterion that the data and the likelihood suggest, `"auto"`."""

    name = "auto"

    def rule(self, tangent: TangentModel, held_out: HeldOut | None, affordable: Affordable) -> Selection | None:
        likelihood = tangent.model.likelihood.unweighted
        if held_out is not None:
            chosen = Validation()
        elif _has_left_out_labels(tangent):
            chosen = LeftOutLabels()
        # Other losses have a curvature that is a mean over targets, or a Gaussian part: their rises differ from the
        # start.
        elif labelled(likelihood) is not None or isinstance(likelihood, Poisson):
            chosen = SelfConsistency()
        else:
            chosen = Evidence()
        return chosen.rule(tangent, held_out, affordable)


def _has_left_out_labels(tangent: TangentModel) -> bool:
    model = tangent.model
    return rules.has_left_out_labels(model.likelihood, model.num_data, model.features.num_outputs)


def _within_budget(rule: LossRise, tangent: TangentModel, affordable: Affordable) -> LossRise:
    features = tangent.model.features
    return replace(rule, most=affordable(rule.num_data(features), rule.cost(features)))
