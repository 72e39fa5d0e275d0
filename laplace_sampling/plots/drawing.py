"""What pictures have in common: axes and panels of them, colours, checks of what is drawn."""

from typing import Any

import numpy as np
from torch import Tensor

Axes = Any  # of matplotlib, which may not be there

# Colours of Okabe and Ito, which stay apart for the colour-blind; their lightness differs, so that grey prints do, too.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "0.45"


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
