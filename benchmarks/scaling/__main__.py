"""`python -m benchmarks.scaling [--out FILE] [--minutes 8] [--vectors 1] [--quick]`.

Times GGN products of two networks on one and on two processes of one thread each, sums of vectors over both processes,
and how much they slow each other down. It wants a machine of two cores that does nothing else. Records are appended to
`--out` at the end, with the load of the machine before.

`python -m benchmarks.scaling report [FILE] [--page docs/scaling.md]` writes the tables of the page from the records
and from the cost model.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.comparison.lines import append, read, versions
from benchmarks.scaling.fitted import comparison, rows_of
from benchmarks.scaling.measure import ALL_REDUCE, timings
from benchmarks.scaling.networks import CASES
from benchmarks.scaling.processes import on_ranks
from benchmarks.scaling.report import with_tables

RANKS = 2
OUT = Path("results/scaling.jsonl")
# Those that the page is written from.
RECORDS = Path(__file__).parents[1] / "records" / "scaling.jsonl"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    top.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    top.add_argument("--minutes", type=float, default=8.0, help="that repetitions may take")
    top.add_argument("--vectors", type=int, default=1, metavar="TIMES", help="as many vectors as by default")
    top.add_argument("--quick", action="store_true", help="narrow networks, few data, one repetition")
    return top


def reporter() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.scaling report")
    top.add_argument("file", type=Path, nargs="?", default=RECORDS)
    top.add_argument("--page", type=Path, default=Path("docs/scaling.md"))
    return top


def run(quick: bool, minutes: float, times: int = 1) -> dict[str, Any]:
    """The record of a run."""
    load = os.getloadavg()[0]
    cases = [case.quick() if quick else case for case in CASES]
    cases = [replace(case, vectors=times * case.vectors) for case in cases]
    sizes = ALL_REDUCE[:3] if quick else ALL_REDUCE
    rows = rows_of(on_ranks(timings, RANKS, cases, sizes, 60 * minutes, quick))
    batches = {case.name: case.batch for case in cases}
    return {
        "setup": ("quick" if quick else "full") + ("" if times == 1 else f", {times} times the vectors"),
        "load_before": load,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "rows": [{**row, "batch": batches.get(row["network"], 0)} for row in rows],
        "versions": versions(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["report"]:
        options = reporter().parse_args(arguments[1:])
        records = read(options.file, ("setup",))
        options.page.write_text(with_tables(options.page.read_text(encoding="utf-8"), records), encoding="utf-8")
        return
    options = parser().parse_args(arguments)
    record = run(options.quick, options.minutes, options.vectors)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    append(options.out, record)
    for case in CASES:
        found = comparison(record["rows"], case.name)
        print(
            f"{case.name}: predicted {found.predicted:.3f} s, measured {found.measured:.3f} s ({found.error:+.1%}); "
            f"efficiency {found.data_parallel:.2f} data-parallel, {found.sample_parallel:.2f} sample-parallel; "
            f"slowdown {found.slowdown:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
