"""`plot_reliability`: whether predictions are right as often as they claim to be."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.plots.axes import as_array, axes_of
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.predictions.regression_prediction import HeteroscedasticPrediction, RegressionPrediction
from laplace_sampling.solvers.checks import check_flag, check_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_reliability"]

_CALL = "plot_reliability(pred, y)"


def plot_reliability(
    pred: ClassificationPrediction | RegressionPrediction | HeteroscedasticPrediction,
    y: Any,
    ax: "Axes | None" = None,
    *,
    num_bins: int = 15,
    histogram: bool = True,
) -> "Axes":
    r"""How often predictions are right against how often they claim to be; on the diagonal both agree.

    Of a classification, in bins of equal width: the share of right labels against the mean probability of the most
    probable class; for labels of zero and one, the share of ones against the mean probability of one. The legend has
    the expected calibration error (Guo et al. 2017, eq. 5), `ECE = Σ_b (n_b/N) |acc_b − conf_b|`.

    Of a regression: the share of targets inside `interval(q)` against the probability `q`, for `num_bins` values
    of it (Kuleshov et al. 2018). The legend has the mean distance from the diagonal. Above it, error bars are too wide.

    Args:
        pred: a prediction.
        y: its targets, as `log_prob` takes them. Labels to ignore are left out; positions and outputs count each.
        ax: to draw on; a new figure by default.
        num_bins: of probabilities.
        histogram: of a classification, the share of all labels in each bin as grey bars.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, and targets that are not of these predictions.
    """
    check_whole("`plot_reliability(num_bins=...)`", num_bins, 1)
    check_flag("`plot_reliability(histogram=...)`", histogram)
    if isinstance(pred, RegressionPrediction | HeteroscedasticPrediction):
        targets = pred._prepared(y, _CALL)[1].to(pred.mean).reshape(pred.mean.shape)
        ax = axes_of("plot_reliability", ax)
        _draw_coverage(ax, pred, targets, num_bins)
    elif isinstance(pred, ClassificationPrediction):
        claimed, right = _claims(pred, y)
        ax = axes_of("plot_reliability", ax)
        _draw_bins(ax, claimed, right, num_bins, histogram)
        one = isinstance(pred.likelihood, Bernoulli)
        ax.set_xlabel("predicted probability of label 1" if one else "probability of the predicted class")
        ax.set_ylabel("share of label 1" if one else "share of right labels")
    else:
        raise TypeError(
            f"`{_CALL}` needs the prediction of a classification or a regression, but got a {type(pred).__name__}; "
            "of a network with several heads, give `pred[head]`."
        )
    ax.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, zorder=1)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(loc="upper left")
    return ax


def _claims(pred: ClassificationPrediction, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """The probability that each label is claimed with, and how far it is as claimed; missing labels are left out."""
    likelihood, targets = pred._prepared(y, _CALL)
    assert isinstance(likelihood, Categorical | Bernoulli)
    targets = targets.to(pred.outputs.device)
    probs, given = likelihood.positions(pred.probs.reshape(len(targets), -1)), likelihood.given(targets)
    if isinstance(likelihood, Bernoulli):
        claimed, right = probs[..., 0], targets.reshape(given.shape)
    else:
        claimed, predicted = probs.max(-1)
        if likelihood.is_soft(targets):
            right = likelihood.weights_of_classes(targets).gather(-1, predicted[..., None])[..., 0]
        else:
            right = predicted == targets.reshape(given.shape)
    return as_array(claimed[given]), as_array(right[given])


def _draw_bins(ax: "Axes", claimed: np.ndarray, right: np.ndarray, num_bins: int, histogram: bool) -> None:
    edges = np.linspace(0, 1, num_bins + 1)
    # A probability of 1 belongs to the last bin.
    numbers = np.minimum((claimed * num_bins).astype(int), num_bins - 1)
    counts, sums, rights = (np.bincount(numbers, w, num_bins) for w in (np.ones_like(claimed), claimed, right))
    filled = counts > 0
    confidence, accuracy, share = sums[filled] / counts[filled], rights[filled] / counts[filled], counts / counts.sum()
    error = float((share[filled] * np.abs(accuracy - confidence)).sum())
    if histogram:
        ax.bar(edges[:-1], share, 1 / num_bins, align="edge", color="0.85", edgecolor="white", label="share of labels")
    ax.plot(confidence, accuracy, marker="o", clip_on=False, label=f"predictions, ECE {error:.3f}")


def _draw_coverage(
    ax: "Axes", pred: RegressionPrediction | HeteroscedasticPrediction, targets: Tensor, num_bins: int
) -> None:
    levels = np.linspace(0, 1, num_bins + 2)[1:-1]
    shares = [_coverage(targets, *pred.interval(float(level))) for level in levels]
    error = float(np.abs(shares - levels).mean())
    ax.plot(levels, shares, marker="o", clip_on=False, label=f"intervals, mean distance {error:.3f}")
    ax.set(xlabel="probability of the interval", ylabel="share of targets inside")


def _coverage(targets: Tensor, low: Tensor, high: Tensor) -> float:
    inside = (targets >= low) & (targets <= high)
    return float(inside[~targets.isnan()].to(torch.float64).mean())
