"""What pictures have in common: axes and panels of them, colours, checks of what is drawn."""

from typing import Any

import numpy as np
from torch import Tensor

from laplace_sampling.predictions.prediction import HeteroscedasticPrediction, RegressionPrediction

Axes = Any  # of matplotlib, which may not be there
Regression = RegressionPrediction | HeteroscedasticPrediction

# Colours of Okabe and Ito, which stay apart for the colour-blind; their lightness differs, so that grey prints do, too.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "0.45"
SEVERAL = (BLUE, RED, GREEN, ORANGE, PURPLE)


def axes_of(call: str, ax: Any, size: tuple[float, float] | None = None) -> Axes:
    """The axes that were given, or those of a new figure, of a size in inches."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib import axes
    except ImportError as error:
        raise ImportError(f'`{call}` needs matplotlib: pip install "laplace_sampling[plots]"') from error
    if ax is None:
        return plt.subplots(layout="constrained", figsize=size)[1]
    check_kind(f"{call}(ax=...)", ax, axes.Axes, "one `Axes` of matplotlib")
    return ax


def panels(ax: Axes, rows: int, columns: int) -> list[Axes]:
    """Axes in rows and columns that take the place of one, which becomes the first of them."""
    spec, box = ax.get_subplotspec(), ax.get_position()
    ends = {"left": box.x0, "right": box.x1, "bottom": box.y0, "top": box.y1}
    # Axes that were placed by hand have no grid that could be divided.
    place = ax.figure.add_gridspec(rows, columns, **ends) if spec is None else spec.subgridspec(rows, columns)
    first, *others = [place[row, column] for row in range(rows) for column in range(columns)]
    ax.set_subplotspec(first)
    return [ax, *map(ax.figure.add_subplot, others)]


def check_kind(call: str, value: Any, kind: Any, needed: str) -> None:
    """Raise unless a value is of a kind."""
    if not isinstance(value, kind):
        raise TypeError(f"`{call}` needs {needed}, but got a {type(value).__name__}.")


def as_array(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor, in double precision."""
    return tensor.detach().cpu().double().numpy()


def named(call: str, pred: Any, kinds: Any, needed: str) -> dict[str, Any]:
    """One prediction without a name, or several by name; raises for anything else.

    Args:
        call: the call, for messages.
        pred: what was given.
        kinds: classes of predictions that are drawn.
        needed: what they are, in words.
    """
    # A prediction of several heads is a mapping, too, of heads that need targets of their own.
    several = dict(pred) if isinstance(pred, dict) and pred else {"": pred}
    for name, one in several.items():
        check_kind(call, one, kinds, needed if name == "" else f"{needed}, for each of its names")
    return several


def key_above(ax: Axes) -> None:
    """What each mark is, above the axes, where it hides none."""
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize="small", borderaxespad=0.2)


def label_ends(ax: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Words to the right of the axes, at the heights where lines end, moved apart where these are close.

    Args:
        ax: the axes.
        labels: height, word and colour of each.
    """
    line = 12.0  # points, of small letters
    points = 72 / ax.figure.dpi
    ordered = sorted(labels)
    heights = [float(ax.transData.transform((ax.get_xlim()[0], height))[1]) * points for height, _, _ in ordered]
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + line) if placed else height)
    shift = (sum(heights) - sum(placed)) / len(placed)
    for (height, word, colour), at, own in zip(ordered, placed, heights, strict=True):
        where = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
        ax.annotate(word, (1, height), (5, at + shift - own), va="center", color=colour, fontsize="small", **where)
