"""Runs methods on trained networks and writes a line of JSON for each; results that exist are not computed again.

A case is a task, a network and a training recipe. A seed gives the split of the data and the initial weights.
"""

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.comparison.lines import append, read, versions
from benchmarks.comparison.methods import METHODS, missing
from benchmarks.comparison.metrics import ood_auroc, score
from benchmarks.comparison.predictions import Classified, targets
from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data.tasks import TASKS, Part, Task, uci_tasks

# A result with the same values of these is not computed again.
KEY = ("case", "seed", "method")

__all__ = ["KEY", "SUITES", "Case", "Suite", "Unit", "estimate", "run", "units"]


@dataclass(frozen=True)
class Case:
    """A network on a task, and how it is trained."""

    task: str
    network: str
    recipe: Recipe
    tier: int = 2  # of the methods that run

    @property
    def name(self) -> str:
        return f"{self.task} / {self.network} / {self.recipe.name}"


@dataclass(frozen=True)
class Suite:
    cases: tuple[Case, ...]
    seeds: int


@dataclass(frozen=True)
class Unit:
    """Methods that share one network and its data."""

    case: Case
    seed: int
    methods: tuple[str, ...]


def grid(task: str, network: str, decay: float, tier: int, *, others: bool = True, **settings: Any) -> list[Case]:
    """Trained to convergence without weight decay; with it and stopped early too, for tier 0, if `others`."""
    recipes = [Recipe(**settings), Recipe(weight_decay=decay, **settings)]
    recipes += [replace(recipe, early=True) for recipe in recipes]
    return [Case(task, network, r, tier if i == 0 else 0) for i, r in enumerate(recipes if others else recipes[:1])]


def _small() -> tuple[Case, ...]:
    noisy = "digits, n=300, noise 1"
    return (
        *grid("two moons", "MLP", 1e-3, 3),
        *grid("wine", "MLP", 1e-3, 3),
        *grid("breast cancer", "MLP", 1e-3, 3),
        *grid("digits, n=300", "LeNet with batch norm", 1e-3, 1),
        *grid(noisy, "LeNet with batch norm", 1e-3, 2),
        *grid(noisy, "MLP", 1e-3, 1),
        *grid(noisy, "LeNet", 1e-3, 0, others=False),
        *grid(noisy, "ResNet", 1e-3, 0, others=False),
        *grid(noisy, "ViT", 1e-3, 0, others=False),
        *grid("digits, n=1400, noise 2", "LeNet with batch norm", 1e-3, 0, others=False),
        *grid("glyphs, 10 classes, n=600", "LeNet with batch norm", 1e-3, 1, others=False),
        *grid("segmentation", "pixels", 1e-3, 1),
        *grid("diabetes", "tanh MLP", 1e-2, 2),
        *grid("gap", "tanh MLP", 1e-3, 2),
    )


def _full() -> tuple[Case, ...]:
    images = ("MLP", "LeNet", "LeNet with batch norm", "ResNet", "ViT")
    cases = [c for task in TASKS if task.startswith("digits") for net in images for c in grid(task, net, 1e-3, 3)]
    for task in (t for t in TASKS if t.startswith("glyphs")):
        large = "60000" in task
        for network in images[1:]:
            steps, tier = (12_000, 1) if large else (4000, 3)
            cases += grid(task, network, 1e-4, tier, steps=steps, batch_size=100)
    tables = [c for task in ("two moons", "wine", "breast cancer") for c in grid(task, "MLP", 1e-3, 3)]
    numbers = [*grid("diabetes", "tanh MLP", 1e-2, 2), *grid("gap", "tanh MLP", 1e-3, 2)]
    return (*cases, *tables, *grid("segmentation", "pixels", 1e-3, 2), *numbers)


SUITES = {"small": Suite(_small(), 3), "full": Suite(_full(), 5)}


def units(suite: Suite, only: str | None = None, done: Iterable[dict[str, Any]] = ()) -> Iterator[Unit]:
    """The units without results, seed after seed; `only` is searched for in `task / network / recipe / method`."""
    there = {(r["case"], r["seed"], r["method"]) for r in done}
    tasks = TASKS
    for seed in range(suite.seeds):
        for case in suite.cases:
            likelihood = tasks[case.task].likelihood if case.task in tasks else "regression"
            methods = tuple(
                name
                for name, method in METHODS.items()
                if method.tier <= case.tier
                and likelihood in method.likelihoods
                and missing(method) is None
                and (case.name, seed, name) not in there
                and (only is None or re.search(only, f"{case.name} / {name}"))
            )
            if methods:
                yield Unit(case, seed, methods)


def problem_of(case: Case, seed: int, networks: Path | None, tasks: dict[str, Task] = TASKS) -> Problem:
    task = tasks[case.task]
    return Problem(task, task.load(seed), case.network, case.recipe, seed, case.task, networks)


def evaluate(problem: Problem, name: str) -> dict[str, Any]:
    """Costs and scores of a method, or its error."""
    network = problem.network  # trained before the clock starts: all methods need it
    started = time.perf_counter(), time.process_time()
    try:
        fit = METHODS[name].fit(problem)
        fitted = time.perf_counter(), time.process_time()
        inside = fit.predict(problem.data.test.x)
        predicted = time.perf_counter()
        parts = {"test": problem.data.test, **problem.data.shifts}
        scores = {
            key: part_scores(problem, fit, part, inside if key == "test" else None) for key, part in parts.items()
        }
        if problem.data.ood is not None and isinstance(inside, Classified):
            outside = fit.predict(problem.data.ood)
            assert isinstance(outside, Classified)
            scores["test"]["ood_auroc"] = ood_auroc(inside, outside)
    except Exception as error:
        message = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {message[0][:300]}"}
    return {
        "seconds_fit": round(max(fitted[0] - started[0], fit.seconds), 3),
        "cpu_seconds_fit": round(fitted[1] - started[1], 3),
        "seconds_predict": round(predicted - fitted[0], 3),
        "passes_fit": fit.passes,
        "products_predict": fit.products,
        "num_parameters": sum(p.numel() for p in network.parameters()),
        "details": fit.details,
        "metrics": scores,
    }


def part_scores(problem: Problem, fit: Any, part: Part, known: Any) -> dict[str, float]:
    p = fit.predict(part.x) if known is None else known
    return score(p, targets(problem.likelihood, part.y), problem.seed)


def work(unit: Unit, out: Path, networks: Path, uci: Path | None, threads: int) -> Unit:
    """Runs all methods of a unit and appends the results."""
    torch.set_num_threads(threads)
    tasks = TASKS | (uci_tasks(uci) if uci is not None else {})
    problem = problem_of(unit.case, unit.seed, networks, tasks)
    for name in unit.methods:
        started = time.perf_counter(), time.process_time()
        result = evaluate(problem, name)
        head = {
            "case": unit.case.name,
            "task": unit.case.task,
            "network": unit.case.network,
            "training": unit.case.recipe.name,
            "weight_decay": unit.case.recipe.weight_decay,
            "likelihood": problem.likelihood,
            "seed": unit.seed,
            "method": name,
        }
        spent = round(time.perf_counter() - started[0], 3), round(time.process_time() - started[1], 3)
        append(out, head | result | {"seconds": spent[0], "cpu_seconds": spent[1], "versions": versions()})
    return unit


def estimate(remaining: Sequence[Unit], done: Sequence[dict[str, Any]]) -> float:
    """Predicts the seconds of the units, from other seeds of the same cell, or else from other cells of the method."""
    by_cell: dict[tuple[str, str], list[float]] = {}
    by_method: dict[str, list[float]] = {}
    for result in done:
        by_cell.setdefault((result["case"], result["method"]), []).append(result["seconds"])
        by_method.setdefault(result["method"], []).append(result["seconds"])
    total = 0.0
    for unit in remaining:
        for method in unit.methods:
            known = by_cell.get((unit.case.name, method)) or by_method.get(method)
            total += float(np.mean(known)) if known else math.nan
    return total


def run(
    suite: Suite, out: Path, *, only: str | None = None, jobs: int = 1, threads: int = 1, uci: Path | None = None
) -> None:
    """Appends the results that the file does not have. Trained networks are kept in a folder beside the file."""
    if uci is not None:
        cases = [c for name in uci_tasks(uci) for c in grid(name, "tanh MLP", 1e-3, 2, others=False)]
        suite = replace(suite, cases=(*suite.cases, *cases))
    done = read(out, KEY)
    remaining = list(units(suite, only, done))
    count = sum(len(unit.methods) for unit in remaining)
    seconds = estimate(remaining, done) / jobs
    known = f"about {seconds / 60:.0f} minutes" if math.isfinite(seconds) else "time not known before a first seed"
    print(f"{count} results to come on {len(remaining)} networks, {len(done)} there: {known}.", flush=True)
    networks = out.with_suffix("") / "networks"
    with tqdm(total=count) as bar, ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, unit, out, networks, uci, threads) for unit in remaining]):
            bar.set_description(future.result().case.name)
            bar.update(len(future.result().methods))
