"""`plot_ood`: whether a score tells inputs like the training data from others."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from laplace_sampling.plots.axes import as_array, axes_of
from laplace_sampling.predictions.prediction import Prediction
from laplace_sampling.solvers.checks import check_flag, check_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_ood"]


def plot_ood(
    inside: Prediction,
    outside: Prediction,
    score: str = "epistemic",
    ax: "Axes | None" = None,
    *,
    num_bins: int = 30,
    log: bool = True,
) -> "Axes":
    r"""Histograms of a score for inputs like the training data and for others, and how well it tells them apart.

    The legend has the area under the ROC curve, the probability that the score of an input from outside is larger than
    that of one from inside, with half of the ties: 1 is a perfect detector, 0.5 a coin.

    Args:
        inside: prediction at inputs like the training data.
        outside: prediction at other inputs, by the same model.
        score: what to compare, an attribute of both predictions: `"epistemic"`, of a classification also `"entropy"` or
            `"mutual_information"`. A score for each position or output counts each.
        ax: to draw on; a new figure by default.
        num_bins: of the histograms, the same for both.
        log: a logarithmic axis of scores, with scores of 0 in the first bin.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for other objects; for a score that the predictions do not have; for scores that are not
            finite.
    """
    check_whole("`plot_ood(num_bins=...)`", num_bins, 1)
    check_flag("`plot_ood(log=...)`", log)
    named = {"inside": inside, "outside": outside}
    scores = {name: _scores(name, pred, score) for name, pred in named.items()}
    ax = axes_of("plot_ood", ax)
    # scipy.stats takes a second to import.
    from scipy.stats import mannwhitneyu

    low, high = scores.values()
    auroc = mannwhitneyu(high, low).statistic / (len(high) * len(low))
    edges, scores = _bins(scores, num_bins, log)
    for name, values in scores.items():
        share = np.histogram(values, edges)[0] / len(values)
        ax.stairs(share, edges, fill=True, alpha=0.5, label=f"{name}, {len(values)}")
    if edges[0] > 0 and log:
        ax.set_xscale("log")
    ax.set(xlabel=f"score: {score.replace('_', ' ')}", ylabel="share of inputs")
    ax.legend(title=f"AUROC {auroc:.3f}")
    return ax


def _scores(name: str, pred: Prediction, score: str) -> np.ndarray:
    if not isinstance(pred, Prediction):
        raise TypeError(f"`plot_ood({name}=...)` needs a prediction, but got a {type(pred).__name__}.")
    values = getattr(pred, score, None) if isinstance(score, str) else None
    if not isinstance(values, Tensor) or values.shape[:1] != pred.outputs.shape[:1]:
        raise ValueError(
            f"`plot_ood(score={score!r})`: a {type(pred).__name__} has no such score of each input; use "
            '"epistemic" or, of a classification, "entropy" or "mutual_information".'
        )
    array = as_array(values).reshape(-1)
    if not np.isfinite(array).all():
        raise ValueError(f"`plot_ood(score={score!r})`: scores of {name} contain NaN or infinity.")
    return array


def _bins(scores: dict[str, np.ndarray], num_bins: int, log: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Edges for both, and the scores moved to where the first bin begins."""
    values = np.concatenate(list(scores.values()))
    positive = values[values > 0]
    if not log or len(positive) == 0 or (values < 0).any():
        return np.histogram_bin_edges(values, num_bins), scores
    # A tenth of a decade wider than a single value.
    least = min(positive.min(), positive.max() / 1.25)
    edges = np.geomspace(least, positive.max(), num_bins + 1)
    return edges, {name: v.clip(edges[0], edges[-1]) for name, v in scores.items()}
