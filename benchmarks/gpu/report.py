"""Rows of the table, the jobs that fill them, and what the run knows of its device."""

import datetime
import gc
import math
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.time_limit import time_limit

COLUMNS = (
    "part", "network", "weights", "run", "outcome", "seconds", "epochs or gradients", "peak, GB",
    "log loss, network → error bars", "accuracy", "AUROC", "predict 10,000, s", "one image, ms", "remarks",
)  # fmt: skip
NO_TIME = "not run: no time left"

Cells = dict[str, str]


class OutOfTime(BaseException):
    """The time of a job ran out; like that of Ctrl-C, it is no `Exception`, which a job may take for one of a peer."""


class FailedError(Exception):
    """A job has come to its end with a wrong result; `cells` are those of its row all the same."""

    def __init__(self, message: str, cells: Cells) -> None:
        super().__init__(message)
        self.cells = cells


@dataclass(frozen=True)
class Setup:
    """The device, where images are, whether everything is small, and the networks that are fitted."""

    device: torch.device
    data: Path | None = None
    quick: bool = False
    networks: tuple[str, ...] = ()

    def synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds until a call is done, also on the device."""
        self.synchronise()
        started = time.perf_counter()
        call()
        self.synchronise()
        return time.perf_counter() - started

    def reset_peak(self) -> None:
        self._of_memory("empty_cache")
        self._of_memory("reset_peak_memory_stats")

    def peak(self) -> str:
        """GB that tensors took at most since the last reset; a dash on a CPU."""
        found = self._of_memory("max_memory_allocated")
        return "–" if found is None else f"{found / 1e9:.2f}"

    def _of_memory(self, name: str) -> int | None:
        call = getattr(torch.get_device_module(self.device), name, None)
        if call is None:
            return None
        return call() if name == "empty_cache" else call(self.device)

    def __str__(self) -> str:
        on_gpu = self.device.type == "cuda"
        card = torch.cuda.get_device_name(self.device) if on_gpu else platform.processor() or platform.machine()
        head = f"{card} ({self.device}), torch {torch.__version__}, CUDA {torch.version.cuda}, "
        head += f"Python {platform.python_version()}, {datetime.date.today()}"
        return head + (". Quick: everything is small, and no figure means anything" if self.quick else "")


@dataclass(frozen=True)
class Job:
    """What fills one row.

    Attributes:
        run: returns the cells of the row; an error is written into it.
        labels: cells that are known before.
        most: seconds that it may take.
    """

    run: Callable[[], Cells]
    labels: Cells = field(default_factory=dict)
    most: float = math.inf


class Report:
    """Runs the jobs of parts, each until its deadline, prints rows as they are done, and the table of all."""

    def __init__(self) -> None:
        self.rows: list[Cells] = []
        self.failed = False

    def run(self, part: str, jobs: Callable[[], Iterable[Job]], deadline: float) -> None:
        """Runs one part; `deadline` is by `time.monotonic`."""
        if time.monotonic() >= deadline:
            self.failed = True
            return self._add(part, {}, {"outcome": NO_TIME})
        try:
            for job in jobs():
                self._add(part, job.labels, self._cells(job, min(job.most, deadline - time.monotonic())))
        except Exception as error:
            self._add(part, {}, self._failure(error))

    def _cells(self, job: Job, seconds: float) -> Cells:
        if seconds <= 0:
            self.failed = True
            return {"outcome": NO_TIME}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with time_limit(seconds, OutOfTime, wall=True):
                    cells = job.run()
            except (Exception, OutOfTime) as error:
                cells = getattr(error, "cells", {}) | self._failure(error)
                error.__traceback__ = None  # its frames hold tensors
        gc.collect()
        return cells | {"remarks": words(cells.get("remarks"), *dict.fromkeys(_short(w) for w in told))}

    def _failure(self, error: BaseException) -> Cells:
        self.failed = True
        traceback.print_exception(error, file=sys.stderr)
        name = "stopped" if isinstance(error, OutOfTime) else f"**{type(error).__name__}**"
        first = str(error).strip().partition("\n")[0]
        return {"outcome": f"{name}: {first[:200]}"}

    def _add(self, part: str, labels: Cells, cells: Cells) -> None:
        row = {"part": part, **labels, **cells}
        self.rows.append({name: value.replace("|", "/") for name, value in row.items()})
        print(" · ".join(value for value in self.rows[-1].values() if value), flush=True)

    def table(self) -> str:
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(row.get(name, '') for name in COLUMNS)} |" for row in self.rows]
        return "\n".join(lines)


def _short(warning: warnings.WarningMessage) -> str:
    """The kind of a warning: those of the library say by it what is meant."""
    return warning.category.__name__ if warning.category.__module__.startswith("laplace_sampling") else ""


def number(value: float | None, digits: int = 3) -> str:
    """A figure as it stands in the table; a dash for none."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def words(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)
