"""What all plots share: the axes to draw on, and arrays for matplotlib, which is imported only when one is drawn."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["as_array", "axes_of", "check_fitted"]


def axes_of(call: str, ax: Any) -> "Axes":
    """The axes that were given, or those of a new figure.

    Raises:
        ImportError: without matplotlib.
        TypeError: for anything but one `Axes`.
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.axes import Axes
    except ImportError as error:
        raise ImportError(f'`{call}` needs matplotlib: pip install "laplace_sampling[plots]"') from error
    if ax is None:
        return plt.subplots(layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise TypeError(f"`{call}(ax=...)` must be one `Axes` of matplotlib, but is of type {type(ax).__name__}.")
    return ax


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def check_fitted(call: str, la: Any, needed: str) -> None:
    """Raise unless an object is a `LinearisedLaplace`, which has `needed`."""
    # Asked of the class, because the attribute of an object that is not fitted raises an error of its own.
    if not hasattr(type(la), needed):
        raise TypeError(f"`{call}(la)` needs a fitted `LinearisedLaplace`, but got a {type(la).__name__}.")
