"""The parts of the price list by name, those that take long last; and a run of them that continues an earlier one."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison.lines import append, read, versions
from benchmarks.price import (
    budgets,
    defaults,
    exact_fits,
    factored,
    last_layer,
    numbers,
    one_image,
    published,
    small_jobs,
    warm_starts,
)
from benchmarks.price.setup import Cells, Row, Setup

__all__ = ["PARTS", "records", "run"]

PARTS: dict[str, Callable[[Setup], Cells]] = {
    "last_layer": last_layer.cells,
    "factored": factored.cells,
    "one_image": one_image.cells,
    "small_jobs": small_jobs.cells,
    "exact_fits": exact_fits.cells,
    "warm_starts": warm_starts.cells,
    "budgets": budgets.cells,
    "published": published.cells,
    "defaults": defaults.cells,
    "numbers": numbers.cells,
}
KEY = ("part", "cell", "setup")


def records(out: Path, setup: Setup) -> list[dict[str, Any]]:
    """What a file has of this setup."""
    return [record for record in read(out, KEY) if record["setup"] == setup.name]


def run(setup: Setup, parts: Sequence[str], out: Path) -> Iterator[list[Row]]:
    """Appends a line for each cell that the file does not have, and yields its rows."""
    done = {(record["part"], record["cell"]) for record in records(out, setup)}
    for part in parts:
        for cell, rows in PARTS[part](setup).items():
            if (part, cell) in done:
                continue
            started = time.perf_counter()
            found = rows()
            seconds = round(time.perf_counter() - started, 2)
            record = {"part": part, "cell": cell, "setup": setup.name, "rows": [vars(row) for row in found]}
            append(out, record | {"seconds": seconds, "versions": versions()})
            yield found
