"""Tables of means over seeds, as Markdown."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.comparison.report import table
from benchmarks.published.setup import Rows

__all__ = ["beside", "mean", "sizes"]


def mean(rows: Rows, key: str, digits: int = 3) -> str:
    """Mean and, of several rows, its standard error; empty without a row that has a figure."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return ""
    error = f" ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}"


def beside(
    head: Sequence[str],
    published: Mapping[str, Sequence[str]],
    rows: Rows,
    keys: Sequence[str],
    by: str = "method",
    text: Callable[[Rows, str], str] = mean,
) -> str:
    """Published rows, then one of ours for each value of `by`, in the order of the rows."""
    theirs = [["published", name, *cells] for name, cells in published.items()]
    names = dict.fromkeys(row[by] for row in rows)
    ours = [["here", str(n), *(text([r for r in rows if r[by] == n], key) for key in keys)] for n in names]
    return table(["", *head], [*theirs, *ours])


def sizes(rows: Rows) -> str:
    """Data, weights, epochs and seeds behind some rows, in words."""
    numbers = {key: sorted({row[key] for row in rows if key in row}) for key in ("num_data", "num_weights", "epochs")}
    words = {"num_data": "N = {}", "num_weights": "P = {}", "epochs": "{} epochs of training"}
    parts = [words[key].format(" or ".join(f"{v:,}" for v in values)) for key, values in numbers.items() if values]
    seeds = len({row["seed"] for row in rows})
    return ", ".join([*parts, f"{seeds} seed{'s' if seeds > 1 else ''}"])
