"""The scores that papers report, of labels and of numbers; those that torchmetrics has are by torchmetrics.

`metrics` is `torchmetrics.functional`, which may not be installed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.labels import Labels
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.predictions.prediction import (
    ClassificationPrediction,
    HeteroscedasticPrediction,
    RegressionPrediction,
)

_BINS = 15  # of the calibration error, as in Guo et al. 2017
_LEVEL = 0.9
# What each score is, in the order of tables, and whether a larger one is better; of a coverage neither is.
SCORES: dict[str, tuple[str, bool | None]] = {
    "log_loss": ("log loss, nats", False),
    "brier": ("Brier score", False),
    "calibration_error": ("calibration error", False),
    "accuracy": ("accuracy", True),
    "rejection": ("mean accuracy under rejection", True),
    "error_auroc": ("AUROC of errors", True),
    "rmse": ("RMSE", False),
    "crps": ("CRPS", False),
    "coverage_90": ("coverage of 90 % intervals", None),
    "width_90": ("width of 90 % intervals", False),
    "other_auroc": ("AUROC of other data", True),
    "other_fpr95": ("FPR95 of other data", False),
}


class _Joined:
    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Joins the labels or numbers of several batches."""
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class ClassScores(_Joined):
    """Log probabilities of the classes of each label that is given."""

    log_probs: Float[Tensor, "M c"]
    labels: Int[Tensor, " M"]

    @classmethod
    def of(cls, pred: ClassificationPrediction, likelihood: Likelihood, targets: Tensor) -> Self:
        """Takes targets as the likelihood has prepared them."""
        assert isinstance(likelihood, Labels)
        if likelihood.is_soft(targets):
            raise ValueError(
                "`evaluate(test_loader)` needs labels, but these targets are probabilities: give the most probable "
                "class of each, or draw one, as by `torch.distributions.Categorical(probs).sample()`."
            )
        labels, given = likelihood.labels(targets.cpu())
        return cls(pred._class_log_probs.cpu()[given], labels[given])

    def scores(self, metrics: ModuleType) -> dict[str, float]:
        """Means over labels."""
        of_classes, labels = metrics.classification, self.labels
        if not len(labels):
            raise ValueError("`evaluate(test_loader)`: no test datum has a label.")
        probs = self.log_probs.exp()
        num, classes = probs.shape
        top, predicted = probs.max(1)
        right = predicted == labels
        most_sure = right[top.argsort(descending=True, stable=True)].double()
        shares = most_sure.cumsum(0) / torch.arange(1, num + 1)
        both = bool(right.any()) and not bool(right.all())
        return {
            "log_loss": -float(self.log_probs.gather(1, labels[:, None]).mean()),
            "brier": float(((probs - F.one_hot(labels, classes)) ** 2).sum(1).mean()),
            "calibration_error": float(of_classes.multiclass_calibration_error(probs, labels, classes, n_bins=_BINS)),
            "accuracy": float(of_classes.multiclass_accuracy(predicted, labels, classes, average="micro")),
            "rejection": float(shares.mean()),
            "error_auroc": float(of_classes.binary_auroc(1 - top, (~right).long())) if both else math.nan,
        }


class BinaryScores(ClassScores):
    """Labels of zero and one, scored in the conventions for the probability of one."""

    def scores(self, metrics: ModuleType) -> dict[str, float]:
        found, one = super().scores(metrics), self.log_probs[:, 1].exp()
        error = metrics.classification.binary_calibration_error(one, self.labels, n_bins=_BINS)
        return found | {"brier": found["brier"] / 2, "calibration_error": float(error)}


@dataclass(frozen=True)
class NumberScores(_Joined):
    """Numbers of each target that is given, and log densities of each datum that has one."""

    log_probs: Float[Tensor, " n"]
    mean: Float[Tensor, " M"]
    variance: Float[Tensor, " M"]
    low: Float[Tensor, " M"]
    high: Float[Tensor, " M"]
    targets: Float[Tensor, " M"]

    @classmethod
    def of(
        cls, pred: RegressionPrediction | HeteroscedasticPrediction, likelihood: Likelihood, targets: Tensor
    ) -> Self:
        """Takes targets as the likelihood has prepared them."""
        y = targets.to(pred.mean).reshape(pred.mean.shape)
        given = ~y.isnan()
        log_probs = pred.log_prob(y)[flattened(given).any(1)]
        numbers = (pred.mean, pred.observation_variance, *pred.interval(_LEVEL), y)
        return cls(log_probs.double().cpu(), *(n.expand_as(y)[given].double().cpu() for n in numbers))

    def scores(self, metrics: ModuleType) -> dict[str, float]:
        """Means over targets, and of the log loss over data."""
        y, stddev = self.targets, self.variance.sqrt()
        if not len(y):
            raise ValueError("`evaluate(test_loader)`: no test datum has a target.")
        z = (y - self.mean) / stddev
        density = (-0.5 * z**2).exp() / math.sqrt(2 * math.pi)
        crps = stddev * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
        return {
            "log_loss": -float(self.log_probs.mean()),
            "rmse": float(metrics.mean_squared_error(self.mean, y, squared=False)),
            "crps": float(crps.mean()),
            "coverage_90": float(((self.low <= y) & (y <= self.high)).double().mean()),
            "width_90": float((self.high - self.low).mean()),
        }


def scores_of_kind(likelihood: Likelihood) -> type[ClassScores] | type[NumberScores] | None:
    """What has the scores of predictions of a likelihood; `None` if there are none."""
    if isinstance(likelihood, Labels):
        return BinaryScores if isinstance(likelihood, Bernoulli) else ClassScores
    measured = getattr(likelihood, "observe", None) is not None
    return NumberScores if likelihood.name in ("regression", "heteroscedastic") and not measured else None


def told_apart(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"], metrics: ModuleType) -> dict[str, float]:
    """How well a score, the larger the stranger, tells other data from those inside; NaN of scores that are NaN."""
    scores = torch.cat([inside, outside])
    if bool(scores.isnan().any()):
        return {"other_auroc": math.nan, "other_fpr95": math.nan}
    is_other = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    # Ranks between zero and one: torchmetrics takes other numbers for logits, whose sigmoids may be equal.
    ranks = scores.unique(return_inverse=True)[1].double()
    ranks = ranks / ranks.max().clamp_min(1)
    specificity, _ = metrics.classification.binary_specificity_at_sensitivity(ranks, is_other, min_sensitivity=0.95)
    auroc = metrics.classification.binary_auroc(ranks, is_other)
    return {"other_auroc": float(auroc), "other_fpr95": 1 - float(specificity)}
