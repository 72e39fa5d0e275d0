"""Training scripts with error bars that are killed at random moments and started again, until one ends.

Each goes on from the last checkpoint of its trainer, and ends with the weights, the optimiser and the fits of a
training that nobody disturbed, bit for bit. A third of the kills are aimed at a fit, a third at a checkpoint that is
being written.
"""

import logging
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from benchmarks.trial.report import Report
from benchmarks.trial.training_scripts import SCRIPTS
from laplace_sampling.integrations.transformers import FILE

__all__ = ["run"]

# Kills of a training, at most; then it may end.
_KILLS = 3
_STAGES, _POLLED = ("fit", "save"), 0.0005
# Stages last longer by so much in a process that is slowed down.
_SLOWER = 1.2


class _Stages:
    """How often a child has entered each stage, and which it is in, in memory that it shares with its parent."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 2 * len(_STAGES))

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        place = _STAGES.index(stage)
        self.memory[place] = min(255, self.memory[place] + 1)
        self.memory[len(_STAGES) + place] = 1
        try:
            yield
        finally:
            self.memory[len(_STAGES) + place] = 0

    def clear(self) -> None:
        self.memory[:] = bytes(2 * len(_STAGES))

    def entered(self, stage: str) -> int:
        return self.memory[_STAGES.index(stage)]

    @property
    def now(self) -> str:
        inside = self.memory[len(_STAGES) :]
        return next((stage for stage, value in zip(_STAGES, inside, strict=True) if value), "training")


class _Training:
    """A script in child processes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.stages = name, folder / name, _Stages()
        self.result = folder / f"{name}.result"
        self.clear()
        self.start()
        if not self.ended():
            raise AssertionError(f"{name}: a training that nobody disturbs has failed")
        self.expected, self.entered = self.numbers(), {stage: self.stages.entered(stage) for stage in _STAGES}
        # A second one, when all is imported and in caches of the disk, says how long a training takes.
        self.clear()
        started = time.perf_counter()
        self.start()
        self.lengths = self._lengths()
        self.ended()
        self.seconds = time.perf_counter() - started

    def _lengths(self) -> dict[str, float]:
        """Seconds of the longest stage of each kind, of the child that runs."""
        longest, since, before = dict.fromkeys(_STAGES, 0.0), time.perf_counter(), "training"
        while os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            now = self.stages.now
            if now != before:
                seconds, since = time.perf_counter() - since, time.perf_counter()
                if before in longest:
                    longest[before] = max(longest[before], seconds)
                before = now
            time.sleep(_POLLED)
        return longest

    def clear(self) -> None:
        """Removes what a training has left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.result.unlink(missing_ok=True)

    def numbers(self) -> Any:
        return torch.load(self.result, weights_only=True)

    def start(self) -> None:
        """A process that runs the script."""
        self.stages.clear()
        self.child = os.fork()
        if self.child:
            return
        status = 1
        try:
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            torch.save(asdict(SCRIPTS[self.name](self.folder, self.stages)), self.result)
            status = 0
        except BaseException as error:  # a child that goes on would run the parent's code
            os.write(2, f"{self.name}: {type(error).__name__}: {error}\n"[:2000].encode())
        finally:
            os._exit(status)

    def ended(self) -> bool:
        """Whether the process came to its end."""
        return os.waitpid(self.child, 0)[1] == 0

    def killed(self, moments: random.Random) -> str | None:
        """In which stage a new process was killed; `None` if it was faster."""
        self.start()
        stage = moments.choice([*_STAGES, "training"])
        latest = time.perf_counter() + (moments.random() if stage == "training" else 10) * self.seconds
        if stage != "training":
            number, delay = moments.randint(1, self.entered[stage]), _SLOWER * moments.random() * self.lengths[stage]
            while self.stages.entered(stage) < number and time.perf_counter() < latest and not self.result.exists():
                time.sleep(_POLLED)
            latest = min(latest, time.perf_counter() + delay)
        while time.perf_counter() < latest and not self.result.exists():
            time.sleep(_POLLED)
        os.kill(self.child, signal.SIGKILL)
        stage = self.stages.now
        return None if self.ended() else stage


def run(count: int, seed: int) -> Report:
    report, moments = Report(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        trainings: dict[str, _Training] = {}
        for number in range(count):
            name = list(SCRIPTS)[number % len(SCRIPTS)]
            training = trainings.get(name) or trainings.setdefault(name, _Training(name, Path(folder)))
            training.clear()
            kills = []
            for _ in range(moments.randint(1, _KILLS)):
                stage = training.killed(moments)
                training.result.unlink(missing_ok=True)  # half of one, if it was written then
                if stage is None:
                    break
                kills.append(stage)
                report.counts[f"{name}: kills, while at: {stage}"] += 1
                with suppress(StopIteration):
                    report.counts[f"{name}: kills after a checkpoint"] += bool(next(training.folder.iterdir()))
            training.start()
            defect = _defect(training) if training.ended() else "the training that went on has failed"
            report.trials += 1
            report.counts[f"{name}: temporary files left"] += sum(1 for _ in training.folder.rglob(".*.tmp"))
            if defect:
                report.defects.append(f"seed {seed}, trial {number}: {name}, killed in {kills}: {defect}")
    return report


def _defect(training: _Training) -> str:
    """What is wrong after a training, if anything."""
    found = training.numbers()
    wrong = [f"other {name}" for name in training.expected if not _same(found[name], training.expected[name])]
    # `laplace_sampling.pt` of the Trainer, and whole checkpoints of Lightning.
    for file in (*training.folder.rglob(FILE), *training.folder.glob("*.ckpt")):
        try:
            torch.load(file, weights_only=True)
        except Exception as error:
            wrong.append(f"{file.name} cannot be read: {type(error).__name__}")
    return ", ".join(wrong)


def _same(found: Any, expected: Any) -> bool:
    """Bit for bit."""
    (leaves, tree), (others, other) = tree_flatten(found), tree_flatten(expected)
    return tree == other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )
