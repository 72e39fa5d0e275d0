"""`python -m benchmarks.price [--data DIR] [--parts last_layer,factored] [--scale 0.1] [--quick] [--seed 0]`.

Prints the price list with its bounds, each figure beside an epoch of training in the same run, on one thread. `DIR`
has `fashion-mnist.npz` and `mnist.npz`; without it images are made up. Results are appended to a file as they are
found; a second run continues there, and starts from the networks in `--cache`.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.price.parts import PARTS, records, run
from benchmarks.price.report import line, page
from benchmarks.price.setup import Setup

# Of data and of repeated timings in a quick run, which takes seconds and shows that all parts run.
QUICK = 0.01


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.price", description=__doc__)
    top.add_argument("--data", type=Path, metavar="DIR", help="a folder of images")
    top.add_argument("--parts", default=",".join(PARTS), help="names of parts, with commas between them")
    top.add_argument("--scale", type=float, default=1.0, help="share of the data")
    top.add_argument("--quick", action="store_true", help="few data, narrow networks, everything once")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--patience", type=float, default=2.0, help="a fit is stopped at so many times its bound")
    top.add_argument("--out", type=Path, default=Path("results/price.jsonl"), metavar="FILE")
    top.add_argument("--page", type=Path, metavar="FILE", help="for the table, which is printed anyway")
    top.add_argument("--cache", type=Path, metavar="DIR", help="for trained networks; by default a temporary one")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a bound does not hold."""
    options = parser().parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser().error(f"there are no parts {unknown}; the parts are {list(PARTS)}")
    torch.set_num_threads(1)
    cache = options.cache or Path(tempfile.gettempdir()) / "price-list-networks"
    scale, repeats = (QUICK * options.scale, 1) if options.quick else (options.scale, 3)
    setup = Setup(options.data, cache, scale, options.quick, options.seed, repeats, options.patience)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for rows in run(setup, parts, options.out):
        for row in rows:
            print(line(vars(row)), flush=True)
    found = [record for record in records(options.out, setup) if record["part"] in parts]
    text = page(found)
    sys.stdout.write(f"\n{text}")
    if options.page is not None:
        options.page.write_text(text)
    return 1 if any(row["holds"] is False for record in found for row in record["rows"]) else 0


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(main())
