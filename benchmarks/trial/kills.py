"""Processes that are killed while they save: the file is whole at all times, the old posterior or the new one.

Every fourth process is not killed but may write only a part of the file, as on a disk that is full.
"""

import os
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.trial.report import Report
from laplace_sampling import LinearisedLaplace

__all__ = ["run"]

# Seconds after which a process is killed, at most; and its exit status if saving raised an error that says why.
_LONGEST, _SAID_WHY, _WITHOUT_ERROR = 0.1, 3, 4


def run(count: int, seed: int) -> Report:
    report, moments = Report(), random.Random(seed)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 20))
        x, y = torch.randn(12, 8), torch.randn(12, 20)
        # Two posteriors of one network, about 1.5 MB each.
        pair = [
            LinearisedLaplace(model, "regression", method="diagonal", num_samples=64, seed=s).fit(
                [(x, y)], progress=False
            )
            for s in (0, 1)
        ]
        expected = [la.predict(x).deviations for la in pair]
        path = Path(folder) / "posterior.pt"
        pair[0].save(path)
        for number in range(count):
            full = number % 4 == 3
            status = _disk_full(pair[1], path) if full else _killed(pair, path, moments.uniform(0, _LONGEST))
            report.trials += 1
            report.counts["disk full" if full else "killed"] += 1
            if full and status != _SAID_WHY:
                report.defects.append(f"trial {number}: a full disk ended `save` with status {status}, not an OSError")
            defect = _defect(path, model, x, expected)
            if defect:
                report.defects.append(f"seed {seed}, trial {number}: {defect}")
                path.unlink(missing_ok=True)
                pair[0].save(path)
        left = [file.name for file in Path(folder).iterdir() if file != path]
        report.counts["temporary files left by kills"] = len(left)
    return report


def _killed(pair: list[LinearisedLaplace], path: Path, seconds: float) -> int:
    """A child that saves both in turns until it is killed."""
    child = os.fork()
    if child == 0:
        while True:
            for la in pair:
                la.save(path)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _disk_full(la: LinearisedLaplace, path: Path) -> int:
    """The exit status of a child that may write less than the file needs."""
    child = os.fork()
    if child == 0:
        status = _WITHOUT_ERROR
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            la.save(path)
        except OSError:
            status = _SAID_WHY
        except BaseException as error:  # a child that goes on would run the parent's code
            os.write(2, f"`save` on a full disk: {type(error).__name__}: {error}\n"[:300].encode())
            status = 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _defect(path: Path, model: nn.Module, x: torch.Tensor, expected: list[torch.Tensor]) -> str:
    """What is wrong with the file, if anything."""
    try:
        deviations = LinearisedLaplace.load(path, model).predict(x).deviations
    except Exception as error:
        return f"the file cannot be read: {type(error).__name__}: {str(error)[:100]}".replace("\n", " ")
    return "" if any(torch.equal(deviations, other) for other in expected) else "the file holds neither posterior"
