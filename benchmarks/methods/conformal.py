"""Coverage and width of conformal intervals of regressions, beside those of the network alone.

`python -m benchmarks.methods.conformal [--data DIR] [--out FILE]` appends a line of JSON for each task, split and kind
of interval, continues where an earlier run stopped, and prints a Markdown table.

Kinds of intervals, at a level of 90 %:

- `network, split`: `f(x)` plus and minus one number, the quantile of the absolute errors of validation data;
- `ours, split`: after `calibrate_conformal(val_loader)` with the same validation data.

The standard error of a coverage follows from `q(1 − q)(1/m + 1/(n + 2))` of each split: `m` test data by which it is
counted, and the variance of the coverage that the rank of one of `n` scores has, `q(1 − q)/(n + 2)`.
"""

import argparse
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.comparison.lines import append, read
from benchmarks.comparison.report import table
from benchmarks.comparison.training import Problem, Recipe, outputs_of
from benchmarks.data.tasks import TASKS, Task, uci_tasks
from laplace_sampling import LinearisedLaplace
from laplace_sampling.predictions.conformal import SplitConformal

__all__ = ["KINDS", "coverage_table", "intervals", "standard_error"]

LEVEL, SPLITS, BATCH = 0.9, 5, 500
KEY = ("task", "network", "training", "seed", "kind")
NETWORK = "tanh MLP"
# None stops early, by which validation data would have been seen.
RECIPES = (Recipe(), Recipe(weight_decay=1e-2))

Interval = tuple[Tensor, Tensor]


def network_alone(problem: Problem) -> Interval:
    validation, test = problem.data.validation, problem.data.test
    errors = (validation.y - outputs_of(problem.network, validation.x)).abs()
    half = SplitConformal.of(errors, 1).largest(LEVEL)
    f = outputs_of(problem.network, test.x)
    return f - half, f + half


def ours(problem: Problem) -> Interval:
    data = problem.data
    la = LinearisedLaplace(problem.network, "regression", seed=problem.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit_hyperparameters(data.train.loader(BATCH), progress=False)
    la.calibrate_conformal(data.validation.loader(BATCH))
    predictions: list[Any] = [la.predict(x) for x in data.test.x.split(BATCH)]
    parts = [prediction.interval(LEVEL) for prediction in predictions]
    return torch.cat([low for low, _ in parts]), torch.cat([high for _, high in parts])


KINDS: dict[str, Callable[[Problem], Interval]] = {
    "network, split": network_alone,
    "ours, split": ours,
}


def standard_error(level: float, num_test: int, num_scores: int) -> float:
    """Of the share of `m` test data in intervals from the rank of one of `n` scores."""
    return math.sqrt(level * (1 - level) * (1 / num_test + 1 / (num_scores + 2)))


def intervals(problem: Problem, kind: str) -> dict[str, float]:
    """Coverage of the test targets, its standard error, and widths in standard deviations of the training targets."""
    low, high = KINDS[kind](problem)
    y = problem.data.test.y
    width = (high - low).flatten().double() / problem.data.train.y.std()
    return {
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "standard_error": standard_error(LEVEL, len(y), len(problem.data.validation.y)),
        "width": float(width.mean()),
        "median_width": float(width.median()),
        "unbounded": float(width.isinf().double().mean()),
    }


def coverage_table(lines: Iterable[dict[str, Any]]) -> str:
    """A row for each task: coverage of each kind with its distance from the level in standard errors, and widths."""
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        name = f"{line['task']} / {line['training']}"
        cells.setdefault(name, {}).setdefault(line["kind"], []).append(line)
    rows = []
    for task, kinds in cells.items():
        row = [task, str(max(map(len, kinds.values())))]
        for kind in KINDS:
            found = kinds.get(kind, [])
            coverage = statistics.fmean(line["coverage"] for line in found)
            error = math.sqrt(sum(line["standard_error"] ** 2 for line in found)) / len(found)
            row.append(f"{coverage:.3f} ({(coverage - LEVEL) / error:+.1f})")
        row += [f"{statistics.fmean(line['median_width'] for line in kinds.get(kind, [])):.3f}" for kind in KINDS]
        widths = [line["width"] for line in kinds["ours, split"]]
        plain = [line["width"] for line in kinds["network, split"]]
        row.append("–" if None in widths + plain else f"{statistics.fmean(widths) / statistics.fmean(plain):.3f}")
        rows.append(row)
    heads = [*(f"coverage, {kind}" for kind in KINDS), *(f"median width, {kind}" for kind in KINDS)]
    return table(["task / training", "splits", *heads, "mean width, ours by network's, split"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.conformal", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder of UCI data, as for `benchmarks.gp.uci`")
    parser.add_argument("--out", type=Path, default=Path("results/conformal.jsonl"), metavar="FILE")
    parser.add_argument("--only", default="", help="part of the names of tasks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks: dict[str, Task] = {name: task for name, task in TASKS.items() if task.likelihood == "regression"}
    tasks |= uci_tasks(options.data) if options.data is not None else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {tuple(line[name] for name in KEY) for line in read(options.out, KEY)}
    networks = options.out.with_suffix("") / "networks"
    for name, recipe, seed in tqdm(list(itertools.product(tasks, RECIPES, range(SPLITS)))):
        if options.only in name:
            task = tasks[name]
            problem = Problem(task, task.load(seed), NETWORK, recipe, seed, name, networks)
            for kind in KINDS:
                head = {"task": name, "network": NETWORK, "training": recipe.name, "seed": seed, "kind": kind}
                if tuple(head.values()) not in done:
                    append(options.out, head | intervals(problem, kind))
    print(coverage_table(read(options.out, KEY)))


if __name__ == "__main__":
    main()
