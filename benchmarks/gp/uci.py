"""Error bars of small regression networks on UCI data with the standard splits, against other libraries and methods.

`python -m benchmarks.gp.uci --uci DIR` appends a line to `--out` for each data set, split, depth and method, and
continues where an earlier run stopped. `--table` prints the tables of such a file. `benchmarks.data.uci` says what
`DIR` holds.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from joblib import Memory
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from benchmarks.data.uci import SETS, Split, load
from benchmarks.gp.regression_task import Task, train
from benchmarks.gp.regressors import METHODS, WITHOUT_NETWORK

LEVEL = 0.9


def standardise(split: Split, depth: int, seed: int, networks: Path | None = None) -> Task:
    """A split in units of its training data; `networks` is a folder for trained networks."""
    inputs, unit = StandardScaler().fit(split.x), float(np.std(split.y))
    x, x_test = (torch.from_numpy(np.asarray(inputs.transform(v))) for v in (split.x, split.x_test))
    y = torch.from_numpy((split.y - split.y.mean()) / unit)
    # The noise that rounding of the targets causes.
    resolution = float(np.diff(np.unique(split.y)).min()) / unit
    floor = max(resolution / math.sqrt(12), 1e-3)
    return Task(
        x, y, x_test, depth, seed, floor, cast(Callable[..., np.ndarray], Memory(networks, verbose=0).cache(train))
    )


def evaluate(
    split: Split, methods: Sequence[str], depth: int, seed: int, networks: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Test scores of each method, in the units of the targets."""
    task = standardise(split, depth, seed, networks)
    unit = float(np.std(split.y))
    y_test = torch.from_numpy((split.y_test - split.y.mean()) / unit)
    for method in methods:
        start = time.perf_counter()
        outcome = METHODS[method](task)
        seconds = time.perf_counter() - start
        p = outcome.distribution
        covered = (p.cdf(y_test) - 0.5).abs() <= LEVEL / 2
        yield {
            "method": method,
            "log_likelihood": float(p.log_prob(y_test).mean()) - math.log(unit),
            "rmse": float((p.mean - y_test).square().mean().sqrt()) * unit,
            "coverage": float(covered.double().mean()),
            "seconds": round(seconds, 2),
            "details": outcome.details,
        }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(
    folder: Path,
    out: Path,
    sets: Sequence[str],
    splits: Sequence[int],
    depths: Sequence[int],
    methods: Sequence[str],
    networks: Path | None = None,
) -> None:
    """Appends the lines that the file does not have. A method without a network has depth 0, and runs once."""
    done = {(r["set"], r["split"], r["depth"], r["method"]) for r in read(out)}
    cells = [
        (name, split, depth, [m for m in methods if (m in WITHOUT_NETWORK) == (depth == 0)])
        for split in splits
        for name in sets
        for depth in (*depths, 0)
    ]
    remaining = [
        (name, split, depth, [m for m in wanted if (name, split, depth, m) not in done])
        for name, split, depth, wanted in cells
    ]
    with tqdm(total=sum(len(wanted) for *_, wanted in remaining)) as bar:
        for name, split, depth, wanted in remaining:
            bar.set_description(f"{name}, split {split}, {depth} hidden")
            results = evaluate(load(folder / name, split), wanted, max(depth, 1), split, networks) if wanted else ()
            for result in results:
                with out.open("a") as file:
                    file.write(json.dumps({"set": name, "split": split, "depth": depth, **result}) + "\n")
                bar.update()


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, which is NaN for a single value."""
    x = np.asarray(values)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def table(results: Sequence[dict[str, Any]], quantity: str, depth: int, digits: int) -> str:
    """A Markdown table of a quantity by method: mean ± standard error over splits, and the mean over sets."""
    sets = [name for name in SETS if any(r["set"] == name for r in results)]
    most = max(Counter((r["set"], r["depth"], r["method"]) for r in results).values(), default=0)
    lines = [f"| method | {' | '.join(sets)} | mean |", "|---" * (len(sets) + 2) + "|"]
    for method in METHODS:
        row_depth = 0 if method in WITHOUT_NETWORK else depth
        cells, means = [], []
        for name in sets:
            key = (method, row_depth, name)
            values = [r[quantity] for r in results if (r["method"], r["depth"], r["set"]) == key]
            if not values:
                cells.append("")
                continue
            mean, error = mean_and_error(values)
            means.append(mean)
            cells.append(f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}"))
            if len(values) < most:
                cells[-1] += f" ({len(values)} splits)"
        if means:
            total = f"{np.mean(means):.{digits}f}" if len(means) == len(sets) else ""
            lines.append(f"| {method} | {' | '.join(cells)} | {total} |")
    return "\n".join(lines)


def tables(results: Sequence[dict[str, Any]]) -> str:
    parts = []
    for depth in sorted({r["depth"] for r in results} - {0}):
        for quantity, title, digits in (
            ("log_likelihood", "test log-likelihood", 3),
            ("rmse", "test RMSE", 3),
            ("coverage", f"coverage of {LEVEL:.0%} intervals", 3),
        ):
            layers = f"{depth} hidden layer{'s' if depth > 1 else ''}"
            parts.append(f"{layers}, {title}:\n\n{table(results, quantity, depth, digits)}")
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uci", type=Path, metavar="DIR", help="the folder of data sets; without it only `--table`")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--splits", nargs="+", type=int, default=range(20))
    parser.add_argument("--depths", nargs="+", type=int, default=(1, 2), help="hidden layers of the networks")
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS), metavar="METHOD")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--networks", type=Path, metavar="DIR", help="where trained networks are kept for later runs")
    parser.add_argument("--table", action="store_true", help="print the tables of what is in `--out`")
    args = parser.parse_args(arguments)
    if args.uci is None and not args.table:
        parser.error("give --uci DIR, --table, or both")
    if args.uci is not None:
        run(args.uci, args.out, args.sets, args.splits, args.depths, args.methods, args.networks)
    if args.table:
        print(tables(read(args.out)))


if __name__ == "__main__":
    main()
