"""Curves of several methods over seeds, as a figure and as a table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.comparison.report import table
from benchmarks.published.setup import Rows
from benchmarks.published.tables import mean

__all__ = ["Axes", "curves", "final", "standard_errors"]


@dataclass(frozen=True)
class Axes:
    """Labels of the axes, and the name of the file."""

    x: str
    y: str
    file: str
    log: bool = False


def curves(groups: Mapping[str, Rows], axes: Axes, folder: Path) -> str:
    """Draws means over seeds with bands of a standard error, a panel a group; the path of the image from the page."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, panels = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4), layout="constrained", squeeze=False)
    for panel, (title, rows) in zip(panels[0], groups.items(), strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            chosen = [row for row in rows if row["method"] == method]
            values = np.array([row["curve"] for row in chosen])
            centre, error = values.mean(0), standard_errors(values)
            panel.plot(chosen[0]["at"], centre, marker=".", label=method)
            panel.fill_between(chosen[0]["at"], centre - error, centre + error, alpha=0.2)
        panel.set(title=title, xlabel=axes.x, ylabel=axes.y, yscale="log" if axes.log else "linear")
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*panels[0, -1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(folder / axes.file, dpi=110)
    plt.close(figure)
    return f"{folder.name}/{axes.file}"


def standard_errors(values: np.ndarray) -> np.ndarray:
    """Of the mean over the first axis; zero where there is one value, of which no spread is known."""
    return values.std(0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else np.zeros(values.shape[1:])


def final(rows: Rows, *names: str, digits: int = 3) -> str:
    """The last value of each curve and its mean, as means over seeds."""
    ends = [row | {"end": row["curve"][-1], "mean": float(np.mean(row["curve"]))} for row in rows]
    by_method = {m: [r for r in ends if r["method"] == m] for m in dict.fromkeys(r["method"] for r in ends)}
    lines = [[m, str(len(r)), mean(r, "end", digits), mean(r, "mean", digits)] for m, r in by_method.items()]
    return table(["method", "seeds", *names], lines)
