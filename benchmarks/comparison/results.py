"""Result lines by case, method and seed, and the numbers that tables take from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.comparison.methods import METHODS

__all__ = ["Results", "compared", "nan_mean", "severe"]


@dataclass(frozen=True)
class Results:
    """Lines of `run` without errors, by case, method and seed."""

    lines: Sequence[dict[str, Any]]

    @cached_property
    def _cells(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in self.lines:
            if "error" not in line:
                cells.setdefault((line["case"], line["method"]), []).append(line)
        return cells

    @cached_property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(line["case"] for line in self.lines))

    def methods(self, cases: Iterable[str]) -> list[str]:
        """The methods with a result in one of the cases, in the order of the table."""
        known = set(cases)
        there = {method for case, method in self._cells if case in known}
        return [method for method in METHODS if method in there]

    def likelihood(self, case: str) -> str:
        """`"classification"`, also of segmentations, or `"regression"`."""
        likelihood = next(line["likelihood"] for line in self.lines if line["case"] == case)
        return "regression" if likelihood == "regression" else "classification"

    def values(self, case: str, method: str, metric: str, part: str = "test") -> dict[int, float]:
        """Values by seed."""
        cells = {
            line["seed"]: line["metrics"].get(part, {}).get(metric) for line in self._cells.get((case, method), [])
        }
        return {seed: value for seed, value in cells.items() if value is not None}

    def mean(self, case: str, method: str, metric: str = "log_likelihood", part: str = "test") -> float:
        """The mean over seeds; NaN without results."""
        values = self.values(case, method, metric, part)
        return float(np.mean(list(values.values()))) if values else float("nan")

    def gain(self, case: str, method: str, metric: str, part: str = "test", over: str = "MAP") -> float:
        """The mean difference to another method, over the seeds of both."""
        mine, other = (self.values(case, name, metric, part) for name in (method, over))
        seeds = mine.keys() & other.keys()
        return float(np.mean([mine[s] - other[s] for s in seeds])) if seeds else float("nan")

    def shifts(self, case: str) -> list[str]:
        line = next(line for line in self.lines if line["case"] == case and "metrics" in line)
        return [part for part in line["metrics"] if part != "test"]

    def others(self, case: str) -> list[str]:
        """Names of other data."""
        found = [name for line in self.lines if line["case"] == case for name in line.get("ood_auroc") or {}]
        return list(dict.fromkeys(found))

    def ood_auroc(self, case: str, method: str, other: str, score: str) -> float:
        """How well a score separates other data from test data, the mean over seeds; NaN without results."""
        lines = self._cells.get((case, method), [])
        found = [(line.get("ood_auroc") or {}).get(other, {}).get(score) for line in lines]
        return nan_mean([value for value in found if value is not None])

    def of_suite(self, suite: str) -> "Results":
        """Those of one suite; lines that name none are of the small one."""
        return Results([line for line in self.lines if line.get("suite", "small") == suite])

    def temperature(self, case: str) -> float:
        """The best temperature for test data, geometric mean over seeds: above one for an overconfident network."""
        lines = self._cells.get((case, "temperature by test oracle"), [])
        return float(np.exp(np.mean([np.log(line["details"]["temperature"]) for line in lines]))) if lines else np.nan


def compared(results: Results, likelihood: str) -> list[str]:
    """Cases with more methods than those that run everywhere."""
    everywhere = {name for name, method in METHODS.items() if method.tier == 0}
    return [
        case
        for case in results.cases
        if results.likelihood(case) == likelihood and set(results.methods([case])) - everywhere
    ]


def severe(parts: Sequence[str]) -> list[str]:
    """The corruptions of severity 3 to 5, and all other shifts."""
    return [part for part in parts if part not in ("severity 1", "severity 2")]


def nan_mean(values: Sequence[float]) -> float:
    known = [v for v in values if not np.isnan(v)]
    return float(np.mean(known)) if known else float("nan")
