"""`python -m benchmarks`: error bars of this library and of others on many small tasks, measured alike.

`run` appends a line of JSON for each result and goes on where it stopped; `report` writes the tables of such a file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run methods on tasks")
    running.add_argument("--suite", choices=tuple(run.SUITES), default="small")
    running.add_argument("--only", metavar="REGEX", help="of `task / network / training / method`")
    running.add_argument("--seeds", type=int, help="fewer than the suite has")
    running.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    running.add_argument("--uci", type=Path, metavar="DIR", help="a folder of UCI data, as for `benchmarks.uci`")
    running.add_argument("--list", action="store_true", help="print what would be run")
    for command in (running,):
        command.add_argument("--out", type=Path, default=Path("results/small.jsonl"))
    args = parser.parse_args(arguments)
    if args.command == "run":
        suite = run.SUITES[args.suite]
        if args.seeds is not None:
            suite = run.Suite(suite.cases, args.seeds)
        if args.list:
            for unit in run.units(suite, args.only, run.read(args.out)):
                sys.stdout.writelines(f"{unit.case.name} / {method} / seed {unit.seed}\n" for method in unit.methods)
            return
        args.out.parent.mkdir(parents=True, exist_ok=True)
        run.run(suite, args.out, only=args.only, jobs=args.jobs, uci=args.uci)


if __name__ == "__main__":
    main()
