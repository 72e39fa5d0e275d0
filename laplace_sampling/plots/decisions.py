"""Pictures of what one does with predictions: leave out unsure ones, look at them, take sets in place of classes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_sampling.arguments import as_numbers, check_whole
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.labels import Labels
from laplace_sampling.plots.drawing import (
    BLUE,
    GREY,
    RED,
    SEVERAL,
    Axes,
    Regression,
    as_array,
    axes_of,
    check_kind,
    label_ends,
    named,
    panels,
)
from laplace_sampling.predictions.prediction import ClassificationPrediction, Prediction


def plot_rejection(pred: Any, y: Any, ax: Axes = None) -> Axes:
    r"""How good predictions are that are kept, against the share that is left out, the most unsure ones first.

    Of a classification the accuracy, in the order of the largest probability; of a regression the root mean squared
    error, in the order of `observation_variance`. A good order makes a classification's curve rise, and a regression's
    fall; a random one leaves it level (dotted). Of one prediction a grey line is the best order there is, that of the
    errors themselves. Numbers at the ends are the mean of each curve over all shares, the `rejection` of `evaluate`.

    Args:
        pred: the prediction of a classification or a regression; or several at the same inputs by name.
        y: their targets, as `log_prob` takes them. Missing ones do not count; each position and output counts.
        ax: axes to draw on; a new figure by default.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, of several kinds together, targets that are not of these
            predictions, and soft labels.
    """
    needed = "the prediction of a classification or a regression, such as `pred[head]`"
    several = named("plot_rejection(pred, y)", pred, ClassificationPrediction | Regression, needed)
    of_numbers = [isinstance(one, Regression) for one in several.values()]
    if any(of_numbers) and not all(of_numbers):
        raise TypeError("`plot_rejection(pred, y)` has regressions and classifications together: draw each by itself.")
    found = {name: (_errors if of_numbers[0] else _wrong)(one, y) for name, one in several.items()}
    ax, ends = axes_of("plot_rejection", ax), []
    for number, (name, (unsure, losses)) in enumerate(found.items()):
        colour = SEVERAL[number % len(SEVERAL)]
        orders = {"best order": (losses, GREY)} if len(found) == 1 else {}
        for label, (order, shade) in (orders | {name or "predictions": (unsure, colour)}).items():
            curve = _kept(losses[np.argsort(order, kind="stable")])
            curve = np.sqrt(curve) if of_numbers[0] else 1 - curve
            left_out = 1 - np.arange(1, len(curve) + 1) / len(curve)
            ax.plot(left_out, curve, color=shade)
            ends.append((float(curve[0]), f"{label}, mean {curve.mean():.3f}", shade))
            ax.axhline(curve[-1], color=shade, linestyle=":", linewidth=1)
    ax.set(xlim=(0, 1), xlabel="share left out, the most unsure first")
    ax.set_ylabel("root mean squared error of the others" if of_numbers[0] else "accuracy of the others")
    label_ends(ax, ends)
    return ax


def _kept(losses: np.ndarray) -> np.ndarray:
    """The mean loss of the first so many."""
    return np.cumsum(losses) / np.arange(1, len(losses) + 1)


def _wrong(pred: ClassificationPrediction, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """How unsure each label is predicted, and whether it is wrong."""
    likelihood, targets = pred._prepared(y, "plot_rejection(pred, y)")
    assert isinstance(likelihood, Labels)
    if likelihood.is_soft(targets):
        raise ValueError("`plot_rejection(pred, y)` needs labels, but these targets are probabilities.")
    labels, given = likelihood.labels(targets.cpu())
    top, predicted = pred._class_log_probs.cpu().max(-1)
    return as_array(-top[given]), as_array((predicted != labels)[given])


def _errors(pred: Regression, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """The variance and the squared error of each target."""
    targets = pred._prepared(y, "plot_rejection(pred, y)")[1].to(pred.mean).reshape(pred.mean.shape)
    given = ~targets.isnan()
    return as_array(pred.observation_variance[given]), as_array(((targets - pred.mean) ** 2)[given])


def plot_prediction_sets(pred: ClassificationPrediction, y: Any = None, ax: Axes = None, *, level: float = 0.9) -> Axes:
    """How many classes the sets of `pred.prediction_set(level)` have, and how often sets of each size have the label.

    Bars are shares of labels. With targets, the number at each bar is the share of its sets that contain the label, and
    the title has that of all sets. `calibrate_conformal` guarantees the latter, and not that of each size.

    Args:
        pred: the prediction of a classification.
        y: its targets, as `log_prob` takes them. Missing labels do not count; each position and output counts.
        ax: axes to draw on; a new figure by default.
        level: of the sets.

    Returns:
        The axes.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, targets that are not of these predictions, soft labels,
            and a level that is no probability.
    """
    needed = "the prediction of a classification, such as `pred[head]`"
    check_kind("plot_prediction_sets(pred)", pred, ClassificationPrediction, needed)
    sets = pred.prediction_set(level).cpu()
    if isinstance(pred.likelihood, Categorical):
        sets = sets.movedim(pred.likelihood.class_dim, -1)
    sets = sets.reshape(len(sets), -1, sets.shape[-1])
    sizes, given, right = sets.sum(-1), torch.ones(sets.shape[:-1], dtype=torch.bool), None
    if y is not None:
        likelihood, targets = pred._prepared(y, "plot_prediction_sets(pred, y)")
        assert isinstance(likelihood, Labels)
        if likelihood.is_soft(targets):
            raise ValueError("`plot_prediction_sets(pred, y)` needs labels, but these targets are probabilities.")
        labels, given = likelihood.labels(targets.cpu())
        right = as_array(sets.gather(-1, labels[..., None])[..., 0][given])
    sizes = as_array(sizes[given]).astype(int)
    ax = axes_of("plot_prediction_sets", ax)
    counts = np.bincount(sizes)
    places = np.flatnonzero(counts)
    bars = ax.bar(places, counts[places] / len(sizes), color=BLUE)
    title = f"level {level:.3g}, mean size {sizes.mean():.3g}"
    if right is not None:
        ax.bar_label(bars, [f"{right[sizes == size].mean():.2f}" for size in places], fontsize="small", padding=1)
        title += f", {right.mean():.3f} contain the label"
    ax.set_title(title, fontsize="medium")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="classes in the set", ylabel="share of labels")
    ax.margins(y=0.1)
    return ax


def plot_most_unsure(
    pred: Prediction, images: Any, y: Any = None, ax: Axes = None, *, score: str = "epistemic", num: int = 12
) -> Axes:
    """The images with the largest score, the first one the most unsure, each with what is predicted of it.

    Of a classification words are the most probable class and its probability, in red with the label where that is
    another; of a regression of one output the mean with its standard deviation.

    Args:
        pred: a prediction of these images.
        images: `[N, H, W]`, or `[N, c, H, W]` with one channel or three; each is drawn from its darkest to its
            brightest number.
        y: labels of a classification, `[N]`.
        ax: axes whose place the images take; a new figure by default.
        score: an attribute of the prediction, as `"novelty"` or `"entropy"`; of a datum with several labels or outputs,
            as the pixels of a segmentation, it is the mean.
        num: how many.

    Returns:
        The axes of the first image; `ax.figure.axes` are all of them.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for other objects, images of another shape or number, and scores that there are not.
    """
    check_kind("plot_most_unsure(pred, images)", pred, Prediction, "a prediction")
    check_whole("`plot_most_unsure(num=...)`", num, 1)
    pictures = as_numbers("`plot_most_unsure(pred, images)`", images).cpu()
    count = len(pred.outputs)
    if pictures.dim() == 4 and pictures.shape[1] in (1, 3):
        pictures = pictures.movedim(1, -1)
    elif pictures.dim() != 3:
        pictures = pictures[:0]
    if len(pictures) != count or not count:
        raise ValueError(
            f"`plot_most_unsure(pred, images)` needs images [N, H, W] or [N, c, H, W] of {count} predictions, with one "
            f"channel or three, but got {list(as_numbers('images', images).shape)}."
        )
    values = getattr(pred, score, None)
    allowed = [getattr(pred, "epistemic", torch.empty(0)).shape, torch.Size([count]), torch.Size([count, 1])]
    if not isinstance(values, Tensor) or values.shape not in allowed:
        raise ValueError(f"`plot_most_unsure(score={score!r})`: a {type(pred).__name__} has no such numbers.")
    chosen = values.reshape(count, -1).double().mean(1).argsort(descending=True, stable=True)[:num].tolist()
    labels = None if y is None else as_numbers("`plot_most_unsure(y=...)`", y).reshape(-1).tolist()
    if labels is not None and len(labels) != count:
        raise ValueError(f"`plot_most_unsure(y=...)` has {len(labels)} labels for {count} predictions.")
    columns = min(6, len(chosen))
    rows = -(-len(chosen) // columns)
    ax = axes_of("plot_most_unsure", ax, (1.3 * columns, 1.6 * rows))
    parts = panels(ax, rows, columns)
    for part, datum in zip(parts, chosen, strict=False):
        picture = as_array(pictures[datum])
        low, high = picture.min(), picture.max()
        part.imshow((picture - low) / (high - low if high > low else 1), cmap="gray", vmin=0, vmax=1)
        words, wrong = _said(pred, datum, None if labels is None else labels[datum])
        part.set_title(words, fontsize="small", color=RED if wrong else "black")
        part.set_axis_off()
    for part in parts[len(chosen) :]:
        part.remove()
    return ax


def _said(pred: Prediction, datum: int, label: float | None) -> tuple[str, bool]:
    """What is predicted of a datum, in words, and whether it is wrong."""
    if isinstance(pred, ClassificationPrediction) and pred._class_log_probs.shape[1] == 1:
        top, predicted = pred._class_log_probs[datum, 0].exp().max(0)
        wrong = label is not None and int(label) != int(predicted)
        return f"{int(predicted)}: {float(top):.2f}" + (f" ({int(label or 0)})" if wrong else ""), wrong
    if isinstance(pred, Regression) and pred.mean[datum].numel() == 1:
        stddev = pred.observation_variance[datum].sqrt()
        return f"{float(pred.mean[datum]):.3g} ± {float(stddev):.2g}", False
    return "", False
