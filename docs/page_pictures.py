"""Pictures of a page of the documentation, drawn by the code on it, so that they are those of the code as it is now."""

import io
import re
import warnings
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["pictures_of", "run_script", "script_of"]

_DPI = 110
# A block that runs. Others are ``` { .python }.
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pictures_of(page: Path) -> dict[str, bytes]:
    """The pictures that a page shows from `images/plots/`, as PNG, by their paths.

    Each is named for the variable that the blocks of code of the page, run in order, leave its `Axes` or `Figure` in.
    """
    text = page.read_text()
    names: dict[str, object] = {}
    for block in _BLOCK.findall(text):
        exec(compile(block, str(page), "exec"), names)
    shown = re.findall(r"\((images/plots/(\w+)\.png)\)", text)
    pictures = {path: _png(names[name]) for path, name in shown}
    plt.close("all")
    return pictures


def script_of(page: str) -> str | None:
    """The script that a page of the gallery has; `None` of those that show a stored picture."""
    blocks = _BLOCK.findall(page)
    return blocks[0] if blocks else None


@cache  # `mkdocs serve` builds pages again and again
def run_script(script: str) -> tuple[bytes, str]:
    """The figure that a whole script draws, as PNG, and what it prints."""
    printed = io.StringIO()
    plt.close("all")
    with warnings.catch_warnings(), redirect_stdout(printed):
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # of `plt.show()`
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    picture = _png(plt.gcf())
    plt.close("all")
    return picture, printed.getvalue()


def _png(drawn: Any) -> bytes:
    file = io.BytesIO()
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()
