"""The pictures of predictions; matplotlib is imported only when one is drawn."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_sampling.arguments import as_numbers, check_whole
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.plots.drawing import (
    BLUE,
    RED,
    SEVERAL,
    Axes,
    Regression,
    as_array,
    axes_of,
    check_kind,
    key_above,
    label_ends,
    named,
    panels,
)
from laplace_sampling.predictions.prediction import ClassificationPrediction, Prediction

# Of a classification: what is claimed, and what is found.
_OF_CLASSES = ("probability of the predicted class", "share of right labels")


def plot_error_bars(
    pred: Regression,
    x: Any = None,
    y: Any = None,
    ax: Axes = None,
    *,
    level: float = 0.95,
    output: int | None = None,
    num_samples: int = 0,
) -> Axes:
    r"""The mean with two intervals: of the function, `f ± z √(var f)`, and of an observation, `pred.interval(level)`.

    `z` is the quantile of a normal distribution, 1.96 for a level of 0.95. With `x` they are bands over it; else bars,
    one for each datum, in the order of the mean.

    Args:
        pred: the prediction of a regression.
        x: the inputs of the prediction, if they are single numbers, `[N]` or `[N, 1]`, in any order.
        y: targets at these inputs, of the shape of `pred.mean`.
        ax: to draw on; a new figure by default.
        level: probability of the intervals.
        output: which of several (flattened) outputs.
        num_samples: joint samples of the function to draw; with `x` only.

    Returns:
        The axes. Training data are added by `ax.plot(x_train, y_train, "k.")`.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, inputs and targets that are not of these predictions, and
            options that are not known.
    """
    check_kind("plot_error_bars(pred)", pred, Regression, "the prediction of a regression, such as `pred[head]`")
    check_whole("`plot_error_bars(num_samples=...)`", num_samples, 0)
    column = _column(pred, output)
    low, high = (column(end) for end in pred.interval(level))
    mean, half = column(pred.mean), NormalDist().inv_cdf((1 + level) / 2) * column(pred.stddev)
    # The wider interval first: it lies beneath the other.
    share = f"{100 * level:.4g} %"
    intervals = {f"observation, {share}": (low, high), f"function, {share}": (mean - half, mean + half)}
    targets = None if y is None else pred._prepared(y, "plot_error_bars(pred, x, y)")[1].reshape(pred.mean.shape)
    # Ranks by mean stand in the place of inputs.
    place = np.argsort(np.argsort(mean, kind="stable")) if x is None else _places(x, len(mean))
    ax, order = axes_of("plot_error_bars", ax), np.argsort(place, kind="stable")
    shades = dict(zip(intervals, ((1, 0.15), (3, 0.35)), strict=True))
    for label, (low, high) in intervals.items():
        width, alpha = shades[label]
        if x is None:
            ax.vlines(place, low, high, color=BLUE, linewidth=width, alpha=0.5, label=label)
        else:
            ax.fill_between(place[order], low[order], high[order], color=BLUE, alpha=alpha, linewidth=0, label=label)
    samples = pred.samples[:num_samples] if x is not None else ()
    for sample in samples:
        ax.plot(place[order], column(sample)[order], color=RED, linewidth=0.8)
    ax.plot(place[order], mean[order], "." if x is None else "-", color=BLUE, label="mean")
    if targets is not None:
        ax.plot(place, column(targets), ".", color="black", label="targets")
    ax.set(xlabel="data, by mean" if x is None else "x", ylabel="y")
    if x is None:
        key_above(ax)
        return ax
    last = order[-1]
    ends = [(float(high[last]), label, BLUE) for label, (_, high) in intervals.items()]
    ends += [(float(column(sample)[last]), "joint sample", RED) for sample in samples[:1]]
    label_ends(ax, [*ends, (float(mean[last]), "mean", BLUE)])
    return ax


def _column(pred: Regression, output: int | None) -> Callable[[Tensor], np.ndarray]:
    """Takes one output of what has the shape of the mean."""
    num = pred.mean[0].numel()
    if (output is None and num > 1) or (output is not None and not 0 <= output < num):
        raise ValueError(
            f"`plot_error_bars(pred, output={output})`: there are {num} outputs for each datum; choose one, as "
            "`output=0` for the first."
        )
    return lambda values: as_array(values.reshape(len(values), -1)[:, output or 0])


def _places(x: Any, num: int) -> np.ndarray:
    place = as_numbers("`plot_error_bars(x=...)`", x)
    if place.shape not in ((num,), (num, 1)):
        raise ValueError(
            f"`plot_error_bars(x=...)` must have one number for each of the {num} predictions, but has shape "
            f"{list(place.shape)}. Without `x`, there is a bar for each datum."
        )
    return as_array(place.reshape(-1))


def plot_ood(
    inside: Prediction,
    outside: Prediction,
    score: str = "epistemic",
    ax: Axes = None,
    *,
    num_bins: int = 30,
) -> Axes:
    r"""Histograms of a score for inputs like the training data and for others, and the ROC curve of telling them apart.

    The curve is the share of inputs from outside whose score is above a threshold, against that of inputs from inside.
    The area under it, AUROC, is the probability that the score of an input from outside is larger than that of one from
    inside, with half of the ties: 1 is a perfect detector, 0.5 a coin. FPR95 is the share from inside above the largest
    threshold that 95 % from outside reach; a point marks it.

    Args:
        inside: prediction at inputs like the training data.
        outside: prediction at other inputs, by the same model.
        score: the score, an attribute of both predictions: `"epistemic"`; `"novelty"` after `calibrate_novelty`; for a
            classification also `"entropy"` or `"mutual_information"`. If there is a score for each position or output,
            each counts.
        ax: axes whose place the two panels take; a new figure by default.
        num_bins: number of bins, the same for both histograms. For positive scores they are even in the logarithm.

    Returns:
        The axes of the histograms; `ax.figure.axes` has those of the curve as well.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for other objects; for a score that the predictions do not have; for scores that are not
            finite.
    """
    check_whole("`plot_ood(num_bins=...)`", num_bins, 1)
    given = {"inside": inside, "outside": outside}
    scores = {name: _scores(name, pred, score) for name, pred in given.items()}
    ax, curve = panels(axes_of("plot_ood", ax, (8, 3.6)), 1, 2)
    values = np.concatenate([*scores.values()])
    log = score != "novelty" and bool((values > 0).all())  # which is between 0 and 1
    edges = np.histogram_bin_edges(np.log(values) if log else values, num_bins)
    edges = np.exp(edges) if log else edges
    edges[0], edges[-1] = min(edges[0], values.min()), max(edges[-1], values.max())  # not rounded past an end
    for (name, values), colour in zip(scores.items(), (BLUE, RED), strict=True):
        share = np.histogram(values, edges)[0] / len(values)
        ax.stairs(share, edges, fill=True, alpha=0.5, color=colour, label=f"{name}, {len(values)}")
    ax.set_xscale("log" if log else "linear")
    ax.set(xlabel=f"score: {score.replace('_', ' ')}", ylabel="share of inputs")
    key_above(ax)
    _draw_roc(curve, *scores.values())
    return ax


def _draw_roc(ax: Axes, low: np.ndarray, high: np.ndarray) -> None:
    thresholds = np.unique(np.concatenate([low, high]))[::-1]
    # Shares at or above each threshold, from the largest down; ties make sloping pieces, which halve them.
    false, true = (
        np.append(0, 1 - np.searchsorted(np.sort(part), thresholds, side="left") / len(part)) for part in (low, high)
    )
    area = float(((false[1:] - false[:-1]) * (true[1:] + true[:-1])).sum()) / 2
    first = int(np.argmax(true >= 0.95))
    ax.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1)
    ax.plot(false, true, color=BLUE)
    ax.plot(false[first], true[first], "o", color=BLUE, clip_on=False)
    ax.text(0.97, 0.05, f"AUROC {area:.3f}\nFPR95 {false[first]:.3f}", ha="right", transform=ax.transAxes)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="share of inside above", ylabel="share of outside above")


def _scores(name: str, pred: Prediction, score: str) -> np.ndarray:
    check_kind(f"plot_ood({name}=...)", pred, Prediction, "a prediction")
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


def plot_reliability(
    pred: ClassificationPrediction | Regression | dict[str, ClassificationPrediction | Regression],
    y: Any,
    ax: Axes = None,
    *,
    num_bins: int = 15,
) -> Axes:
    r"""How often predictions are right against how often they claim to be; on the diagonal both agree.

    For a classification, in bins of equal width: the share of right labels against the mean probability of the most
    probable class, with its 95 % confidence interval (Wilson 1927: of a share `p` of `n`, `(p + z²/2n ± z √(p(1 − p)/n
    + z²/4n²))/(1 + z²/n)`, `z = 1.96`). For labels of zero and one it is the share of ones against the mean probability
    of one. The key has the expected calibration error (Guo et al. 2017, eq. 5), `ECE = Σ_b (n_b/N) |acc_b − conf_b|`.

    For a regression: the share of targets inside `interval(q)` against the probability `q`, for `num_bins` values of it
    (Kuleshov et al. 2018). The key has the mean distance from the diagonal. Above it, error bars are too wide.

    Args:
        pred: a prediction; or several at the same inputs by name, such as those of the network and of this posterior.
        y: their targets, as `log_prob` takes them. Ignored labels do not count; each position and output counts.
        ax: axes to draw on; a new figure by default.
        num_bins: number of bins of probabilities. Of one prediction grey bars are the share of labels in each, and
            numbers how many they are.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, of several kinds together, and targets that are not of
            these predictions.
    """
    check_whole("`plot_reliability(num_bins=...)`", num_bins, 1)
    needed = "the prediction of a classification or a regression, such as `pred[head]`"
    several = named("plot_reliability(pred, y)", pred, ClassificationPrediction | Regression, needed)
    of_numbers = [isinstance(one, Regression) for one in several.values()]
    if any(of_numbers) and not all(of_numbers):
        raise TypeError(
            "`plot_reliability(pred, y)` has regressions and classifications together: draw each by itself."
        )
    if of_numbers[0]:
        found = {name: _coverage(one, y, num_bins) for name, one in several.items()}
        ax, labels = axes_of("plot_reliability", ax), ("probability of the interval", "share of targets inside")
    else:
        found = {name: _claims(one, y) for name, one in several.items()}
        one = isinstance(next(iter(several.values())).likelihood, Bernoulli)
        labels = ("predicted probability of label 1", "share of label 1") if one else _OF_CLASSES
        ax = axes_of("plot_reliability", ax)
    ax.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, zorder=1)
    for number, (name, drawn) in enumerate(found.items()):
        colour, marker = SEVERAL[number % len(SEVERAL)], "osD^v"[number % 5]
        if of_numbers[0]:
            levels, shares = drawn
            label = f"{name or 'intervals'}, mean distance {float(np.abs(shares - levels).mean()):.3f}"
            ax.plot(levels, shares, color=colour, marker=marker, clip_on=False, label=label)
        else:
            _draw_bins(ax, name, *drawn, num_bins, colour, marker, with_counts=len(found) == 1)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel=labels[0], ylabel=labels[1])
    key_above(ax)
    return ax


def _claims(pred: ClassificationPrediction, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """The probability that each label is claimed with, and how far it is as claimed; missing labels are left out."""
    likelihood, targets = pred._prepared(y, "plot_reliability(pred, y)")
    assert isinstance(likelihood, Categorical | Bernoulli)
    targets = targets.to(pred.outputs.device)
    probs, given = likelihood.positions(pred.probs.reshape(len(targets), -1)), likelihood.given(targets)
    if isinstance(likelihood, Bernoulli):
        claimed, right = probs[..., 1], targets.reshape(given.shape)
    else:
        claimed, predicted = probs.max(-1)
        if likelihood.is_soft(targets):
            right = likelihood.weights_of_classes(targets).gather(-1, predicted[..., None])[..., 0]
        else:
            right = predicted == targets.reshape(given.shape)
    return as_array(claimed[given]), as_array(right[given])


def _draw_bins(
    ax: Axes,
    name: str,
    claimed: np.ndarray,
    right: np.ndarray,
    num_bins: int,
    colour: str,
    marker: str,
    with_counts: bool,
) -> None:
    edges = np.linspace(0, 1, num_bins + 1)
    # A probability of 1 belongs to the last bin.
    numbers = np.minimum((claimed * num_bins).astype(int), num_bins - 1)
    counts, sums, rights = (np.bincount(numbers, w, num_bins) for w in (np.ones_like(claimed), claimed, right))
    filled = counts > 0
    confidence, accuracy, share = sums[filled] / counts[filled], rights[filled] / counts[filled], counts / counts.sum()
    error = float((share[filled] * np.abs(accuracy - confidence)).sum())
    if with_counts:
        ax.bar(edges[:-1], share, 1 / num_bins, align="edge", color="0.85", edgecolor="white", label="share of labels")
        for middle, height, count in zip((edges[:-1] + edges[1:]) / 2, share, counts, strict=True):
            if count:
                ax.annotate(
                    f"{count:.0f}", (middle, height), (0, 1), textcoords="offset points", ha="center", fontsize=6
                )
    low, high = wilson(accuracy, counts[filled])
    bars = np.abs([accuracy - low, high - accuracy])  # rounding may take an end past the share
    label = f"{name or 'predictions'}, ECE {error:.3f}"
    how = {"color": colour, "marker": marker, "elinewidth": 1, "capsize": 2, "clip_on": False, "zorder": 3}
    ax.errorbar(confidence, accuracy, bars, label=label, **how)


def wilson(share: np.ndarray, num: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % confidence interval of a binomial probability (Wilson 1927)."""
    z = NormalDist().inv_cdf(0.975)
    middle, half = share + z**2 / (2 * num), z * np.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return (middle - half) / (1 + z**2 / num), (middle + half) / (1 + z**2 / num)


def _coverage(pred: Regression, y: Any, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Levels, and the share of targets inside the interval of each."""
    targets = pred._prepared(y, "plot_reliability(pred, y)")[1].to(pred.mean).reshape(pred.mean.shape)
    levels = np.linspace(0, 1, num_bins + 2)[1:-1]
    intervals = [pred.interval(float(level)) for level in levels]
    inside = torch.stack([(targets >= low) & (targets <= high) for low, high in intervals])
    return levels, as_array(inside[:, ~targets.isnan()]).mean(1)
