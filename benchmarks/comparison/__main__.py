"""`python -m benchmarks.comparison`: error bars of this library and of others on the same networks, measured alike.

`--suite first|second --data DIR` runs a half of the real data; `--quick` runs two small cases in about a minute. Each
result is a line of JSON in `--out`, and a second run continues there. `report [FILE ...]` writes the means of such
files, and the page and the figure that are drawn from the means.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison import report
from benchmarks.comparison.run import read, run
from benchmarks.comparison.suites import SUITES

ROOT = Path(__file__).parents[2]
MEANS = ROOT / "benchmarks" / "records" / "means.csv"


def write(files: Sequence[Path], records: Path, page: Path) -> None:
    """Adds means of the files, if there are any, to the records, and writes the page of these."""
    if files:
        there = report.read_means(records) if records.exists() else []
        report.write_means(report.merged(there, report.means(read(files))), records)
    rows = report.read_means(records)
    report.draw(rows, page.parent / "images" / "results.png")
    page.write_text(report.page(rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    top = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    if arguments[:1] == ["report"]:
        top.add_argument("files", type=Path, nargs="*", help="results; without any the page of the present means")
        top.add_argument("--records", type=Path, default=MEANS)
        top.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
        options = top.parse_args(arguments[1:])
        return write(options.files, options.records, options.page)
    top.add_argument("--suite", choices=("first", "second", "budget"), default="second")
    top.add_argument("--data", type=Path, metavar="DIR", help="with images, uci and uci-large")
    top.add_argument("--quick", action="store_true", help="two small cases, without data from a folder")
    top.add_argument("--only", metavar="REGEX", default="", help="searched for in `task / network / training / method`")
    top.add_argument("--seeds", type=int, help="fewer than the suite has")
    top.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    top.add_argument("--out", type=Path, metavar="FILE", help="by default results/SUITE.jsonl")
    options = top.parse_args(arguments)
    name = "quick" if options.quick else options.suite
    if options.data is None and not options.quick:
        top.error("the halves are of data from a folder: give --data DIR, or --quick")
    out = options.out or Path("results") / f"{name}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"only": options.only, "seeds": options.seeds, "jobs": options.jobs}
    return run(name, SUITES[name], out, options.data or Path(), **settings)


if __name__ == "__main__":
    main()
