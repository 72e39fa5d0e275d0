"""`python -m benchmarks`: error bars of this library and of others on many small tasks, measured alike.

`run` appends a line of JSON for each result and continues where an earlier run stopped. `fidelity` and `cost` do the
same for distances to the exact posterior and for seconds and memory. `report` writes the page of tables and figures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison import cost, fidelity, report, run

# Results that the page is written from.
RECORDS = Path(__file__).parent / "records"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run methods on tasks")
    running.add_argument("--only", metavar="REGEX", help="searched for in `task / network / training / method`")
    running.add_argument("--seeds", type=int, help="fewer than the suite has")
    running.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    running.add_argument("--uci", type=Path, metavar="DIR", help="a folder of UCI data, as for `benchmarks.gp.uci`")
    running.add_argument("--data", type=Path, metavar="DIR", help="images, uci and uci-large, for `first` and `second`")
    running.add_argument("--list", action="store_true", help="print what would be run, and for how long")
    others = [
        commands.add_parser("fidelity", help="distances to the exact posterior"),
        commands.add_parser("cost", help="seconds and memory, beside laplace-torch"),
    ]
    for command in (running, *others):
        command.add_argument("--suite", choices=tuple(run.SUITES), default="small")
        command.add_argument("--out", type=Path, metavar="FILE", help="by default results/SUITE.jsonl")
    reporting = commands.add_parser("report", help="tables and figures")
    reporting.add_argument("files", type=Path, nargs="*", default=sorted(RECORDS.glob("*.jsonl")))
    reporting.add_argument("--page", type=Path, default=Path("docs/results.md"))
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.command == "report":
        report.write(options.files, options.page)
        return
    out = options.out or Path("results") / f"{options.suite}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.command == "fidelity":
        fidelity.run(options.suite, out)
    elif options.command == "cost":
        cost.run(options.suite, out)
    else:
        suite = run.SUITES[options.suite]
        suite = suite.with_seeds(options.seeds)
        if suite.folder and options.data is None:
            parser().error(f"--suite {options.suite} is on data from a folder: give --data DIR")
        folders = run.Folders(options.uci, options.data)
        if options.list:
            remaining, seconds = run.left(suite, out, options.only, folders)
            for unit in remaining:
                sys.stdout.writelines(f"{unit.case.name} / {method} / seed {unit.seed}\n" for method in unit.methods)
            sys.stdout.write(f"{run.time_of(seconds / options.jobs)} with {options.jobs} jobs\n")
            return
        run.run(options.suite, suite, out, only=options.only, jobs=options.jobs, folders=folders)


if __name__ == "__main__":
    main()
