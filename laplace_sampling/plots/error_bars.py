"""`plot_error_bars`: predictions of a regression with their intervals."""

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from laplace_sampling.plots.axes import as_array, axes_of
from laplace_sampling.predictions.regression_prediction import HeteroscedasticPrediction, RegressionPrediction
from laplace_sampling.solvers.checks import as_numbers, check_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_error_bars"]

Intervals = dict[str, tuple[np.ndarray, np.ndarray]]

_CALL = "plot_error_bars"


def plot_error_bars(
    pred: RegressionPrediction | HeteroscedasticPrediction,
    x: Any = None,
    y: Any = None,
    ax: "Axes | None" = None,
    *,
    level: float = 0.95,
    output: int | None = None,
    sort: str = "mean",
    num_samples: int = 0,
) -> "Axes":
    r"""The mean with two intervals: of the function, `f ± z √(var f)`, and of an observation, `pred.interval(level)`.

    `z` is the quantile of a normal distribution, 1.96 for a level of 0.95. With `x` they are bands over it; else bars,
    one for each datum, in the order of the mean or of the width of the interval.

    Args:
        pred: the prediction of a regression.
        x: the inputs of the prediction, if they are single numbers, `[N]` or `[N, 1]`, in any order.
        y: targets at these inputs, of the shape of `pred.mean`.
        ax: to draw on; a new figure by default.
        level: probability of the intervals.
        output: which of several (flattened) outputs.
        sort: without `x`, `"mean"` or `"error"`, the width of the interval.
        num_samples: joint samples of the function to draw; with `x` only.

    Returns:
        The axes. Training data are added by `ax.plot(x_train, y_train, "k.")`.

    Raises:
        ImportError: without matplotlib.
        TypeError, ValueError: for predictions of other kinds, inputs and targets that are not of these predictions, and
            options that are not known.
    """
    if not isinstance(pred, RegressionPrediction | HeteroscedasticPrediction):
        raise TypeError(
            f"`{_CALL}(pred)` needs the prediction of a regression, but got a {type(pred).__name__}; of a network with "
            "several heads, give `pred[head]`."
        )
    if sort not in ("mean", "error"):
        raise ValueError(f'`{_CALL}(sort={sort!r})` is not known; use "mean" or "error".')
    _check_samples(num_samples, len(pred.deviations), x is not None)
    column = _column(pred, output)
    low, high = (column(end) for end in pred.interval(level))
    mean, half = column(pred.mean), NormalDist().inv_cdf((1 + level) / 2) * column(pred.stddev)
    # The wider interval first: it lies beneath the other.
    share = f"{100 * level:.4g} %"
    intervals = {f"observation, {share}": (low, high), f"function, {share}": (mean - half, mean + half)}
    targets = None if y is None else column(pred._prepared(y, f"{_CALL}(pred, x, y)")[1].reshape(pred.mean.shape))
    if x is None:
        place = np.argsort(np.argsort(mean if sort == "mean" else high - low, kind="stable"))
        ax = axes_of(_CALL, ax)
        _draw_bars(ax, place, mean, intervals)
        ax.set_xlabel("data, by mean" if sort == "mean" else "data, by width of the interval")
    else:
        place = _places(x, len(mean))
        ax = axes_of(_CALL, ax)
        _draw_bands(ax, place, mean, intervals, [column(sample) for sample in pred.samples[:num_samples]])
        ax.set_xlabel("x")
    if targets is not None:
        ax.plot(place, targets, ".", color="black", label="targets")
    ax.set_ylabel("y")
    ax.legend()
    return ax


def _check_samples(num_samples: int, available: int, with_x: bool) -> None:
    check_whole(f"`{_CALL}(num_samples=...)`", num_samples, 0)
    if num_samples and not with_x:
        raise ValueError(f"`{_CALL}(num_samples={num_samples})` draws lines over `x`, which is not given.")
    if num_samples > available:
        raise ValueError(f"`{_CALL}(num_samples={num_samples})`: the prediction has {available} samples.")


def _column(
    pred: RegressionPrediction | HeteroscedasticPrediction, output: int | None
) -> Callable[[Tensor], np.ndarray]:
    """Takes one output of what has the shape of the mean."""
    num = pred.mean[0].numel()
    if output is None and num > 1:
        raise ValueError(
            f"`{_CALL}(pred)`: there are {num} outputs for each datum; choose one, as `output=0` for the first."
        )
    if output is not None:
        check_whole(f"`{_CALL}(output=...)`", output, 0)
        if output >= num:
            raise ValueError(f"`{_CALL}(output={output})`: outputs are numbered from 0 to {num - 1}.")
    return lambda values: as_array(values.reshape(len(values), -1)[:, output or 0])


def _places(x: Any, num: int) -> np.ndarray:
    place = as_numbers(f"`{_CALL}(x=...)`", x)
    if place.shape not in ((num,), (num, 1)):
        raise ValueError(
            f"`{_CALL}(x=...)` must have one number for each of the {num} predictions, but has shape "
            f"{list(place.shape)}. Without `x`, there is a bar for each datum."
        )
    return as_array(place.reshape(-1))


def _draw_bars(ax: "Axes", place: np.ndarray, mean: np.ndarray, intervals: Intervals) -> None:
    for (label, (low, high)), width in zip(intervals.items(), (1, 3), strict=True):
        ax.vlines(place, low, high, color="C0", linewidth=width, alpha=0.5, label=label)
    ax.plot(place, mean, ".", color="C0", label="mean")


def _draw_bands(
    ax: "Axes", x: np.ndarray, mean: np.ndarray, intervals: Intervals, samples: Sequence[np.ndarray]
) -> None:
    order = np.argsort(x, kind="stable")
    for (label, (low, high)), alpha in zip(intervals.items(), (0.15, 0.3), strict=True):
        ax.fill_between(x[order], low[order], high[order], color="C0", alpha=alpha, linewidth=0, label=label)
    for number, sample in enumerate(samples):
        label = "joint samples of the function" if number == 0 else None
        ax.plot(x[order], sample[order], color="C1", linewidth=0.8, label=label)
    ax.plot(x[order], mean[order], color="C0", label="mean")
