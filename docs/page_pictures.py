"""Pictures of a page of the documentation, drawn by the code on it, so that they are those of the code as it is now."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["pictures_of"]

_DPI = 110


def pictures_of(page: Path) -> dict[str, bytes]:
    """The pictures that a page shows from `images/plots/`, as PNG, by their paths.

    Each is named for the variable that the blocks of code of the page, run in order, leave its `Axes` or `Figure` in.
    """
    text = page.read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), names)
    shown = re.findall(r"\((images/plots/(\w+)\.png)\)", text)
    pictures = {path: _png(names[name]) for path, name in shown}
    plt.close("all")
    return pictures


def _png(drawn: Any) -> bytes:
    file = io.BytesIO()
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()
