"""`python -m benchmarks.published --data DIR [--parts fashion,joint] [--num 10000] [--epochs 10] [--seeds 1]
[--only REGEX]`.

Runs what published tables have, on the same data, and joint predictions at work, on one thread. `DIR` has the folders
`images` and `uci-large`; without it data are made up. Records are appended to `--out` as they are found; a second run
continues there, and starts from the networks in `--cache`. `--only` is searched for in the names of cells, which are
those of the records.

`python -m benchmarks.published report [FILE ...] [--page docs/published.md]` writes the page from the records only.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.published.parts import PARTS, page, run
from benchmarks.published.setup import Setup

OUT = Path("results/published.jsonl")
# Those that the page is written from.
RECORDS = Path(__file__).parents[1] / "records" / "published.jsonl"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    top.add_argument("--data", type=Path, metavar="DIR", help="a folder with `images` and `uci-large`")
    top.add_argument("--parts", default=",".join(PARTS), help="names of parts, with commas between them")
    top.add_argument("--only", metavar="REGEX", default="", help="searched for in the names of cells")
    top.add_argument("--num", type=int, help="training images, where a part has another number")
    top.add_argument("--epochs", type=int, help="of training on images, where a part has another number")
    top.add_argument("--seeds", type=int, help="where a part has another number")
    top.add_argument("--quick", action="store_true", help="few data, narrow networks, few steps")
    top.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    top.add_argument("--cache", type=Path, default=Path("results/published"), metavar="DIR", help="for networks")
    return top


def reporter() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.published report")
    top.add_argument("files", type=Path, nargs="*", default=[RECORDS])
    top.add_argument("--page", type=Path, default=Path("docs/published.md"))
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["report"]:
        options = reporter().parse_args(arguments[1:])
        options.page.write_text(page(options.files, options.page.parent / "images"), encoding="utf-8")
        return
    options = parser().parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser().error(f"there are no parts {unknown}; the parts are {list(PARTS)}")
    torch.set_num_threads(1)
    setup = Setup(options.data, options.cache, options.quick, options.num, options.epochs, options.seeds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for record in run(setup, parts, options.out, options.only):
        for row in record["rows"]:
            ends = {"end": row["curve"][-1]} if "curve" in row else {}
            figures = [f"{k} {v:.4g}" for k, v in (row | ends).items() if isinstance(v, float)]
            print(f"{record['part']}, {record['cell']}: {row['method']}, {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
