"""The parts by name, a run of them that continues an earlier one, and the page of their records."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison.lines import append, read, versions
from benchmarks.published import (
    active_learning,
    distances,
    fashion,
    joint,
    linear_mode,
    online,
    optimisation,
    regression,
)
from benchmarks.published.setup import Setup, Study

__all__ = ["PARTS", "page", "run"]

PARTS: dict[str, Study] = {
    "fashion": fashion.STUDY,
    "linear_mode": linear_mode.STUDY,
    "distances": distances.STUDY,
    "joint": joint.STUDY,
    "online": online.STUDY,
    "regression": regression.STUDY,
    "active_learning": active_learning.STUDY,
    "optimisation": optimisation.STUDY,
}
KEY = ("part", "cell", "setup")

INTRODUCTION = """# Published tables, and ours

`python -m benchmarks.published report` writes this page from the records of
`python -m benchmarks.published --data DIR`. Each table has published figures above ours,
on the same data where it says no other; below it stands what differs.
"""


def run(setup: Setup, parts: Sequence[str], out: Path, only: str = "") -> Iterator[dict[str, Any]]:
    """Appends a record for each cell that the file does not have, and yields it; `only` is searched for in its name."""
    done = {(r["part"], r["cell"]) for r in read(out, KEY) if r["setup"] == setup.name}
    for part in parts:
        for cell, rows in PARTS[part].cells(setup).items():
            if (part, cell) in done or not re.search(only, cell):
                continue
            started, processor = time.perf_counter(), time.process_time()
            record = {"part": part, "cell": cell, "setup": setup.name, "rows": list(rows())}
            seconds = {"seconds": time.perf_counter() - started, "processor_seconds": time.process_time() - processor}
            append(out, record | {key: round(value, 2) for key, value in seconds.items()} | {"versions": versions()})
            yield record


def page(files: Sequence[Path], images: Path) -> str:
    """Markdown of all parts that have records; of a cell the last record counts, whatever its sizes."""
    latest = {(r["part"], r["cell"]): r for file in files for r in read(file, KEY)}
    text = [INTRODUCTION]
    for name, study in PARTS.items():
        records = [record for (part, _), record in latest.items() if part == name]
        if not records:
            continue
        minutes = sum(record["processor_seconds"] for record in records) / 60
        body = study.section([row for record in records for row in record["rows"]], images)
        made_up = " **The data are made up.**" if any("made up" in record["setup"] for record in records) else ""
        cost = f"`--parts {name}`, {minutes:.0f} minutes of a processor, training of networks included.{made_up}"
        text.append(f"## {study.title}\n\n{body}\n\n{cost}\n")
    return "\n".join(text)
