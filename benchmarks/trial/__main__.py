"""`python -m benchmarks.trial [--parts random_networks,threads] [--scale 0.1] [--seed 0]`.

Prints how many trials each part made and the defects that it found; the exit status is 1 if there are any. With
`--scale 1` it takes less than 30 minutes on two cores.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.trial.parts import COUNTS, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trial", description=__doc__)
    parser.add_argument("--parts", default=",".join(COUNTS), help="names of parts, with commas between them")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials of a nightly run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="parts that run at the same time")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in COUNTS]:
        parser.error(f"there are no parts {unknown}; the parts are {list(COUNTS)}")
    found = 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        runs = {p: pool.submit(run, p, max(1, round(options.scale * COUNTS[p])), options.seed) for p in parts}
        for part, future in runs.items():
            report, seconds = future.result()
            found += len(report.defects)
            sys.stdout.write("\n".join(report.lines(part)) + f"\n  in {seconds:.0f} s\n")
            sys.stdout.flush()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
