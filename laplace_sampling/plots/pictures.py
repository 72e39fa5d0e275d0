"""The pictures of predictions and of fits; matplotlib is imported only when one is drawn."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_sampling.arguments import as_numbers, check_whole
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.plots.drawing import BLUE, GREY, ORANGE, Axes, as_array, axes_of, check_kind, panels
from laplace_sampling.predictions.prediction import (
    ClassificationPrediction,
    HeteroscedasticPrediction,
    Prediction,
    RegressionPrediction,
)
from laplace_sampling.predictions.scores import SCORES

Regression = RegressionPrediction | HeteroscedasticPrediction
Intervals = dict[str, tuple[np.ndarray, np.ndarray]]

# Label of each curve that `plot_evidence` draws.
_CURVES = {
    "log_marginal_likelihood": "log marginal likelihood, nats",
    "effective_dimension": "effective dimension γ",
    "mode_norm": "‖θ̄‖² of the mode, in units of the prior",
}


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
    for (label, (low, high)), width, alpha in zip(intervals.items(), (1, 3), (0.15, 0.3), strict=True):
        if x is None:
            ax.vlines(place, low, high, color="C0", linewidth=width, alpha=0.5, label=label)
        else:
            ax.fill_between(place[order], low[order], high[order], color="C0", alpha=alpha, linewidth=0, label=label)
    for number, sample in enumerate(pred.samples[:num_samples] if x is not None else ()):
        label = "joint samples of the function" if number == 0 else None
        ax.plot(place[order], column(sample)[order], color="C1", linewidth=0.8, label=label)
    ax.plot(place[order], mean[order], "." if x is None else "-", color="C0", label="mean")
    if targets is not None:
        ax.plot(place, column(targets), ".", color="black", label="targets")
    ax.set(xlabel="data, by mean" if x is None else "x", ylabel="y")
    ax.legend()
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


def plot_evidence(
    la: Any,
    ax: Axes = None,
    *,
    curve: str = "log_marginal_likelihood",
    decades: float = 3.0,
    num: int = 121,
) -> Axes:
    r"""The log marginal likelihood `log p(y | α)` of the linear model against the prior precision `α`.

    The curve is that of `evidence_path`. The band is two standard errors (the exact method has none), and a vertical
    line marks the fitted `α`. That is where the curve is largest only if the evidence has chosen it:
    `criterion="leave_one_out"` and validation data choose others.

    Args:
        la: a fitted `LinearisedLaplace` that has its training data.
        ax: to draw on; a new figure by default.
        curve: `"log_marginal_likelihood"`, in nats, a sum over the data; `"effective_dimension"`, `γ(α)`; or
            `"mode_norm"`, `‖θ̄(α)‖²` in the scaled coordinates of the prior.
        decades: range of `α` to both sides of the fitted one.
        num: points of the curve.

    Returns:
        The axes.

    Raises:
        NotFittedError: before a fit, and for a posterior that was loaded without its data.
        ImportError, TypeError, ValueError: without matplotlib; for other objects; for a curve that is not known.
    """
    if curve not in _CURVES:
        raise ValueError(f"`plot_evidence(curve={curve!r})` is not known; use one of {list(_CURVES)}.")
    ax = axes_of("plot_evidence", ax)
    curves = la.evidence_path(decades, num)
    alpha, values = curves.prior_precision, getattr(curves, curve)
    (line,) = ax.plot(alpha, values)
    error = getattr(curves, f"{curve}_se", None)
    if error is not None and bool((error > 0).any()):
        how = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0, "label": "± 2 standard errors"}
        ax.fill_between(alpha, values - 2 * error, values + 2 * error, **how)
    ax.axvline(curves.at, color="black", linestyle=":", label=f"fitted, α = {curves.at:.3g}")
    mean = ", geometric mean of the groups" if len(la.prior_precision_) > 1 else ""
    ax.set(xscale="log", yscale="log" if curve == "mode_norm" else "linear")
    ax.set(xlabel=f"prior precision α{mean}", ylabel=_CURVES[curve])
    ax.legend()
    return ax


def plot_history(la: Any, ax: Axes = None) -> Axes:
    r"""Prior precision `α`, noise precision `b` and effective dimension `γ` in each step of `fit_hyperparameters`.

    Values are those of `history_`: `α` and `b` during the step, and `γ` summed over the groups of the prior; there is a
    line for each `α` and `b` where there are several.

    Args:
        la: a `LinearisedLaplace` after `fit_hyperparameters`.
        ax: to draw on; a new figure by default.

    Returns:
        The axes.

    Raises:
        NotFittedError: before a fit.
        ImportError, TypeError, ValueError: without matplotlib; for other objects; after `fit`, which takes no steps.
    """
    steps = la.history_
    if not steps:
        raise ValueError(
            "`plot_history(la)` needs the steps of `fit_hyperparameters`, but `history_` is empty: the posterior was "
            "fitted by `fit`, at the hyperparameters that it was given."
        )
    ax = axes_of("plot_history", ax)
    series = (
        ("prior precision α", [step.prior_precision for step in steps]),
        ("noise precision b = 1/σ²", [step.noise_precision for step in steps if step.noise_precision is not None]),
        ("effective dimension γ", [[sum(step.effective_dimension)] for step in steps]),
    )
    for number, (label, rows) in enumerate(series):
        for column, values in enumerate(zip(*rows, strict=True)):
            label_once = label if column == 0 else None
            ax.plot(range(1, len(values) + 1), values, color=f"C{number}", marker="o", label=label_once)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(yscale="log", xlabel="step", ylabel="value")
    ax.legend()
    return ax


def plot_ood(
    inside: Prediction,
    outside: Prediction,
    score: str = "epistemic",
    ax: Axes = None,
    *,
    num_bins: int = 30,
) -> Axes:
    r"""Histograms of a score for inputs like the training data and for others, and how well it separates them.

    The legend has the area under the ROC curve: the probability that the score of an input from outside is larger than
    that of one from inside, with half of the ties. 1 is a perfect detector, 0.5 a coin.

    Args:
        inside: prediction at inputs like the training data.
        outside: prediction at other inputs, by the same model.
        score: the score, an attribute of both predictions: `"epistemic"`; for a classification also `"entropy"` or
            `"mutual_information"`. If there is a score for each position or output, each counts.
        ax: axes to draw on; a new figure by default.
        num_bins: number of bins, the same for both histograms. For positive scores they are even in the logarithm.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for other objects; for a score that the predictions do not have; for scores that are not
            finite.
    """
    check_whole("`plot_ood(num_bins=...)`", num_bins, 1)
    named = {"inside": inside, "outside": outside}
    scores = {name: _scores(name, pred, score) for name, pred in named.items()}
    ax = axes_of("plot_ood", ax)
    # scipy.stats takes a second to import.
    from scipy.stats import mannwhitneyu

    low, high = scores.values()
    auroc = mannwhitneyu(high, low).statistic / (len(high) * len(low))
    values = np.concatenate([low, high])
    log = bool((values > 0).all())
    edges = np.histogram_bin_edges(np.log(values) if log else values, num_bins)
    edges = np.exp(edges) if log else edges
    edges[0], edges[-1] = min(edges[0], values.min()), max(edges[-1], values.max())  # not rounded past an end
    for name, values in scores.items():
        share = np.histogram(values, edges)[0] / len(values)
        ax.stairs(share, edges, fill=True, alpha=0.5, label=f"{name}, {len(values)}")
    ax.set_xscale("log" if log else "linear")
    ax.set(xlabel=f"score: {score.replace('_', ' ')}", ylabel="share of inputs")
    ax.legend(title=f"AUROC {auroc:.3f}")
    return ax


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
    pred: ClassificationPrediction | Regression,
    y: Any,
    ax: Axes = None,
    *,
    num_bins: int = 15,
) -> Axes:
    r"""How often predictions are right against how often they claim to be; on the diagonal both agree.

    For a classification, in bins of equal width: the share of right labels against the mean probability of the most
    probable class. For labels of zero and one it is the share of ones against the mean probability of one. The legend
    has the expected calibration error (Guo et al. 2017, eq. 5), `ECE = Σ_b (n_b/N) |acc_b − conf_b|`.

    For a regression: the share of targets inside `interval(q)` against the probability `q`, for `num_bins` values of it
    (Kuleshov et al. 2018). The legend has the mean distance from the diagonal. Above it, error bars are too wide.

    Args:
        pred: a prediction.
        y: its targets, as `log_prob` takes them. Ignored labels do not count; each position and output counts.
        ax: axes to draw on; a new figure by default.
        num_bins: number of bins of probabilities; grey bars are the share of all labels in each.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, and targets that are not of these predictions.
    """
    check_whole("`plot_reliability(num_bins=...)`", num_bins, 1)
    if isinstance(pred, Regression):
        targets = pred._prepared(y, "plot_reliability(pred, y)")[1].to(pred.mean).reshape(pred.mean.shape)
        ax = axes_of("plot_reliability", ax)
        _draw_coverage(ax, pred, targets, num_bins)
    else:
        needed = "the prediction of a classification or a regression, such as `pred[head]`"
        check_kind("plot_reliability(pred, y)", pred, ClassificationPrediction, needed)
        claimed, right = _claims(pred, y)
        ax = axes_of("plot_reliability", ax)
        _draw_bins(ax, claimed, right, num_bins)
        one = isinstance(pred.likelihood, Bernoulli)
        ax.set_xlabel("predicted probability of label 1" if one else "probability of the predicted class")
        ax.set_ylabel("share of label 1" if one else "share of right labels")
    ax.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, zorder=1)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(loc="upper left")
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


def _draw_bins(ax: Axes, claimed: np.ndarray, right: np.ndarray, num_bins: int) -> None:
    edges = np.linspace(0, 1, num_bins + 1)
    # A probability of 1 belongs to the last bin.
    numbers = np.minimum((claimed * num_bins).astype(int), num_bins - 1)
    counts, sums, rights = (np.bincount(numbers, w, num_bins) for w in (np.ones_like(claimed), claimed, right))
    filled = counts > 0
    confidence, accuracy, share = sums[filled] / counts[filled], rights[filled] / counts[filled], counts / counts.sum()
    error = float((share[filled] * np.abs(accuracy - confidence)).sum())
    ax.bar(edges[:-1], share, 1 / num_bins, align="edge", color="0.85", edgecolor="white", label="share of labels")
    ax.plot(confidence, accuracy, marker="o", clip_on=False, label=f"predictions, ECE {error:.3f}")


def _draw_coverage(ax: Axes, pred: Regression, targets: Tensor, num_bins: int) -> None:
    levels = np.linspace(0, 1, num_bins + 2)[1:-1]
    intervals = [pred.interval(float(level)) for level in levels]
    inside = torch.stack([(targets >= low) & (targets <= high) for low, high in intervals])
    shares = as_array(inside[:, ~targets.isnan()]).mean(1)
    error = float(np.abs(shares - levels).mean())
    ax.plot(levels, shares, marker="o", clip_on=False, label=f"intervals, mean distance {error:.3f}")
    ax.set(xlabel="probability of the interval", ylabel="share of targets inside")


def plot_evaluation(evaluation: Any, ax: Axes = None) -> Axes:
    """The scores of an `Evaluation`, a panel for each, with a dot for each predictor and its value beside it.

    An arrow says which way is better.

    Args:
        evaluation: what `evaluate` returned.
        ax: axes whose place the panels take; a new figure by default.

    Returns:
        The axes of the first panel; `ax.figure.axes` are all of them.

    Raises:
        ImportError, TypeError: without matplotlib; for other objects.
    """
    check_kind("plot_evaluation(evaluation)", getattr(evaluation, "table", None), dict, "what `evaluate` returns")
    table: dict[str, dict[str, float]] = evaluation.table
    names, colours = list(next(iter(table.values()))), {"network": GREY, "laplace": BLUE}
    columns = min(4, -(-len(names) // 2))
    rows = -(-len(names) // columns)
    ax = axes_of("plot_evaluation", ax, (2.4 * columns, (0.9 + 0.25 * len(table)) * rows))
    parts = panels(ax, rows, columns)
    for number, (part, name) in enumerate(zip(parts, names, strict=False)):
        label, larger = SCORES[name]
        part.set_title(label + {True: " ↑", False: " ↓", None: ""}[larger], fontsize="small")
        for place, (predictor, scores) in enumerate(table.items()):
            value, colour = scores[name], colours.get(predictor, ORANGE)
            part.plot(value, place, "o", color=colour)
            if np.isfinite(value):
                part.annotate(
                    f"{value:.3g}", (value, place), (6, 0), textcoords="offset points", va="center", fontsize="small"
                )
        part.set_yticks(range(len(table)), list(table) if number % columns == 0 else [""] * len(table))
        part.set_ylim(len(table) - 0.5, -0.5)
        part.margins(x=0.4)
        part.tick_params(labelsize="small")
        part.spines[["top", "right"]].set_visible(False)
    for part in parts[len(names) :]:
        part.remove()
    return ax
