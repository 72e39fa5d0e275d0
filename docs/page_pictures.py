"""Pictures of a page of the documentation, drawn by the code on it, so that they are those of the code as it is now."""

import doctest
import io
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes

__all__ = ["pictures_of"]

_DPI = 110


def pictures_of(page: Path) -> dict[str, bytes]:
    """The pictures that a page shows from `images/plots/`, as PNG, by their paths.

    Each is named for the variable that the examples of the page leave its `Axes` or `Figure` in.
    """
    text = page.read_text()
    names: dict[str, object] = {}
    for example in doctest.DocTestParser().get_examples(text, str(page)):
        exec(compile(example.source, str(page), "exec"), names)
    shown = re.findall(r"\((images/plots/(\w+)\.png)\)", text)
    return {path: _png(names[name]) for path, name in shown}


def _png(drawn: Any) -> bytes:
    file = io.BytesIO()
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()
