"""Runs methods on trained networks and writes a line of JSON for each; results that exist are not computed again.

A seed gives the split of the data and the initial weights.
"""

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.comparison.expected import Expected
from benchmarks.comparison.lines import append, read, versions
from benchmarks.comparison.methods import METHODS, missing
from benchmarks.comparison.metrics import ood_aurocs, score
from benchmarks.comparison.predictions import Classified, Fitted, Regressed, targets
from benchmarks.comparison.suites import HALVES, SUITES, Case, Suite, Unit, grid
from benchmarks.comparison.training import Problem
from benchmarks.data.folder_tasks import folder_tasks
from benchmarks.data.tasks import TASKS, Part, Task, uci_tasks

# A result with the same values of these is not computed again.
KEY = ("case", "seed", "method")

__all__ = ["KEY", "SUITES", "Case", "Folders", "Suite", "Unit", "estimate", "left", "run", "time_of", "units"]


@dataclass(frozen=True)
class Folders:
    """Where data are that are not part of the project.

    Attributes:
        uci: small UCI sets that are run beside a suite.
        data: the data of `benchmarks.data.folder_tasks`.
    """

    uci: Path | None = None
    data: Path | None = None

    @property
    def tasks(self) -> dict[str, Task]:
        tasks = TASKS | (uci_tasks(self.uci) if self.uci is not None else {})
        return tasks | (folder_tasks(self.data) if self.data is not None else {})


def units(
    suite: Suite,
    only: str | None = None,
    done: Iterable[dict[str, Any]] = (),
    tasks: Mapping[str, Task] = TASKS | folder_tasks(Path()),
) -> Iterator[Unit]:
    """The units without results, seed after seed; `only` is searched for in `task / network / recipe / method`."""
    there = {(r["case"], r["seed"], r["method"]) for r in done}
    tiers = suite.tiers or {name: method.tier for name, method in METHODS.items()}
    for seed in range(max((suite.seeds, *(case.seeds or 0 for case in suite.cases)))):
        for case in suite.cases:
            if seed >= (case.seeds or suite.seeds):
                continue
            methods = tuple(
                name
                for name, method in METHODS.items()
                if tiers.get(name, math.inf) <= case.tier
                and tasks[case.task].likelihood in method.likelihoods
                and missing(method) is None
                and (case.name, seed, name) not in there
                and (only is None or re.search(only, f"{case.name} / {name}"))
            )
            if methods:
                yield Unit(case, seed, methods)


def problem_of(case: Case, seed: int, networks: Path | None, tasks: Mapping[str, Task] = TASKS) -> Problem:
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
        others = {} if isinstance(inside, Regressed) else other_data(problem, fit, inside)
        if others:
            scores["test"]["ood_auroc"] = float(np.mean([each["entropy"] for each in others.values()]))
    except Exception as error:
        message = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {message[0][:300]}"}
    return {
        "seconds_fit": round(max(fitted[0] - started[0], fit.seconds), 3),
        "cpu_seconds_fit": round(max(fitted[1] - started[1], fit.cpu_seconds), 3),
        "seconds_predict": round(predicted - fitted[0], 3),
        "passes_fit": fit.passes,
        "products_predict": fit.products,
        "num_parameters": sum(p.numel() for p in network.parameters()),
        "details": fit.details,
        "metrics": scores,
        "ood_auroc": others,
    }


def other_data(problem: Problem, fit: Fitted, inside: Classified) -> dict[str, dict[str, float]]:
    """By other data and score, how well the score separates them from test data."""
    found = {}
    for name, x in problem.data.others.items():
        outside = fit.predict(x)
        assert isinstance(outside, Classified)
        found[name] = ood_aurocs(inside, outside)
    return found


def part_scores(problem: Problem, fit: Any, part: Part, known: Any) -> dict[str, float]:
    p = fit.predict(part.x) if known is None else known
    return score(p, targets(problem.likelihood, part.y), problem.seed)


def work(unit: Unit, out: Path, networks: Path, folders: Folders, threads: int, suite: str = "small") -> Unit:
    """Runs all methods of a unit and appends the results."""
    torch.set_num_threads(threads)
    problem = problem_of(unit.case, unit.seed, networks, folders.tasks)
    problem = replace(problem, links=suite not in HALVES)
    for name in unit.methods:
        started = time.perf_counter(), time.process_time()
        result = evaluate(problem, name)
        head = {
            "suite": suite,
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


def estimate(
    remaining: Sequence[Unit], done: Sequence[dict[str, Any]], tasks: Mapping[str, Task] | None = None
) -> float:
    """Predicts the seconds of the units, from other seeds of the same cell, or else from other cells of the method.

    With tasks it measures a step of training on each network that has no results, and counts on from there.
    """
    by_cell: dict[tuple[str, str], list[float]] = {}
    by_method: dict[str, list[float]] = {}
    for result in done:
        by_cell.setdefault((result["case"], result["method"]), []).append(result["seconds"])
        by_method.setdefault(result["method"], []).append(result["seconds"])
    expected = Expected({} if tasks is None else tasks)
    total = 0.0
    for unit in remaining:
        for method in unit.methods:
            known = by_cell.get((unit.case.name, method))
            if known is None and tasks is not None:
                known = [expected.seconds(unit, method)]
            known = known or by_method.get(method)
            total += float(np.mean(known)) if known else math.nan
    return total


def with_uci(suite: Suite, uci: Path | None) -> Suite:
    """With the small UCI sets of a folder."""
    if uci is None:
        return suite
    cases = [c for name in uci_tasks(uci) for c in grid(name, "tanh MLP", 1e-3, 2, others=False)]
    return replace(suite, cases=(*suite.cases, *cases))


def left(suite: Suite, out: Path, only: str | None, folders: Folders) -> tuple[list[Unit], float]:
    """What is to be run, and how many seconds it takes one after another, by earlier results and by expectation.

    Raises:
        ValueError: for a suite on data from a folder without one.
    """
    if suite.folder and folders.data is None:
        raise ValueError(
            "This suite is on data from a folder: give `--data DIR`, with images, uci and uci-large in it."
        )
    done = read(out, KEY)
    remaining = list(units(with_uci(suite, folders.uci), only, done, folders.tasks))
    return remaining, estimate(remaining, done, folders.tasks if suite.folder else None)


def run(
    name: str,
    suite: Suite,
    out: Path,
    *,
    only: str | None = None,
    jobs: int = 1,
    threads: int = 1,
    folders: Folders = Folders(),
) -> None:
    """Appends the results that the file does not have. Trained networks are kept in a folder beside the file."""
    remaining, seconds = left(suite, out, only, folders)
    count = sum(len(unit.methods) for unit in remaining)
    print(f"{count} results to come on {len(remaining)} networks: {time_of(seconds / jobs)}.", flush=True)
    networks = out.with_suffix("") / "networks"
    with tqdm(total=count) as bar, ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        arguments = [(unit, out, networks, folders, threads, name) for unit in remaining]
        for future in as_completed([pool.submit(work, *each) for each in arguments]):
            bar.set_description(future.result().case.name)
            bar.update(len(future.result().methods))


def time_of(seconds: float) -> str:
    return f"about {seconds / 60:.0f} minutes" if math.isfinite(seconds) else "time not known before a first seed"
