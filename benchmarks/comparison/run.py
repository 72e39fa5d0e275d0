"""Runs methods on trained networks and appends a line of JSON for each; results that exist are not computed again.

A seed gives the split of the data and the initial weights.
"""

import json
import math
import os
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.comparison.methods import METHODS, missing
from benchmarks.comparison.metrics import ood_aurocs, score
from benchmarks.comparison.predictions import Classified, targets
from benchmarks.comparison.suites import SUITES, Case, Suite
from benchmarks.comparison.training import Problem
from benchmarks.data.folder_tasks import folder_tasks
from benchmarks.data.tasks import TASKS, Task


@dataclass(frozen=True)
class Unit:
    """Methods that share one network and its data."""

    case: Case
    seed: int
    methods: tuple[str, ...]


def tasks_of(folder: Path) -> dict[str, Task]:
    """All tasks; nothing is read from the folder before a task is loaded."""
    return TASKS | folder_tasks(folder)


def units(
    suite: Suite, only: str, seeds: int | None, done: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]
) -> Iterator[Unit]:
    """The units without results, seed after seed; `only` is searched for in `task / network / recipe / method`."""
    there = {(line["case"], line["seed"], line["method"]) for line in done}
    for seed in range(seeds or max(case.seeds for case in suite.cases)):
        for case in suite.cases:
            methods = tuple(
                name
                for name, method in METHODS.items()
                if seed < case.seeds
                and suite.tiers.get(name, math.inf) <= case.tier
                and tasks[case.task].likelihood in method.likelihoods
                and missing(method) is None
                and (case.name, seed, name) not in there
                and re.search(only, f"{case.name} / {name}")
            )
            if methods:
                yield Unit(case, seed, methods)


def evaluate(problem: Problem, name: str) -> dict[str, Any]:
    """Costs and scores of a method, or its error."""
    network = problem.network  # trained before the clock starts: all methods need it
    started = time.perf_counter()
    try:
        fit = METHODS[name].fit(problem)
        fitted = time.perf_counter()
        inside = fit.predict(problem.data.test.x)
        predicted = time.perf_counter()
        scores = {"test": score(inside, targets(problem.likelihood, problem.data.test.y), problem.seed)}
        for key, part in problem.data.shifts.items():
            scores[key] = score(fit.predict(part.x), targets(problem.likelihood, part.y), problem.seed)
        others = {}
        for key, x in problem.data.others.items():
            outside = fit.predict(x)
            if isinstance(inside, Classified) and isinstance(outside, Classified):
                others[key] = ood_aurocs(inside, outside)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {
        "seconds_fit": fitted - started,
        "seconds_predict": predicted - fitted,
        "epochs_fit": fit.epochs,
        "num_parameters": sum(p.numel() for p in network.parameters()),
        "details": fit.details,
        "metrics": scores,
        "ood_auroc": others,
    }


def work(unit: Unit, suite: str, out: Path, networks: Path, folder: Path) -> Unit:
    """Runs all methods of a unit on one thread and appends the results."""
    torch.set_num_threads(1)
    task, images = tasks_of(folder)[unit.case.task], SUITES[suite].images
    data = task.load(unit.seed)
    if images is not None and task.likelihood == "classification":
        data = data.to_images(images)
    problem = Problem(task, data, unit.case.network, unit.case.recipe, unit.seed, unit.case.task, networks)
    for name in unit.methods:
        head = {"suite": suite, "case": unit.case.name, "likelihood": task.likelihood, "seed": unit.seed}
        append(out, head | {"method": name} | evaluate(problem, name))
    return unit


def run(
    name: str, suite: Suite, out: Path, folder: Path, *, only: str = "", seeds: int | None = None, jobs: int = 1
) -> None:
    """Appends the results that the file does not have. Trained networks are kept in a folder beside the file."""
    remaining = list(units(suite, only, seeds, read([out]), tasks_of(folder)))
    networks = out.with_suffix("") / "networks"
    with (
        tqdm(total=sum(len(unit.methods) for unit in remaining)) as bar,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        for future in as_completed([pool.submit(work, unit, name, out, networks, folder) for unit in remaining]):
            bar.set_description(future.result().case.name)
            bar.update(len(future.result().methods))


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The last line for each suite, case, seed and method; skips lines that were cut off in writing."""
    results: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in (path.read_text() for path in paths if path.exists()):
        for line in text.splitlines():
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            results[tuple(result[key] for key in ("suite", "case", "seed", "method"))] = result
    return list(results.values())


def append(path: Path, result: dict[str, Any]) -> None:
    """Writes a line in one piece, so that several processes may write to the file."""
    line = "\n" if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n") else ""
    line += json.dumps(rounded(result)) + "\n"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "wb") as file:
        file.write(line.encode())


def rounded(value: Any) -> Any:
    """Keeps six digits of numbers, and replaces NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
