"""Fits that are killed at random moments and called again, some of them several times, until one ends.

Each ends in the numbers of a fit that nobody disturbed, bit for bit, and leaves no file behind. A process is killed by
SIGKILL, of which it learns nothing.
"""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.trial.report import Report
from laplace_sampling import SGD, SVRG, LinearisedLaplace, Stochastic

__all__ = ["METHODS", "run"]

# What is fitted: by which method, and the likelihood.
METHODS = {
    "auto": "classification",
    "exact": "classification",
    "krylov": "classification",
    "stochastic": "classification",
    "sgd": "regression",
    "kfac": "classification",
    "subset": "classification",
    "dual": "regression",
    "ciq": "regression",
    "last_layer": "classification",
}
# Kills of a fit, at most; then it may end.
_KILLS = 3
# Part of the kills that wait for a time, and not for the file; seconds after which it is looked at again, and seconds
# that a kill comes later, at most.
_TIMED, _POLLED, _DELAY = 0.25, 0.002, 0.05


class _Fitted:
    """What is fitted in child processes, always the same."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.checkpoint, self.result = folder / f"{name}.checkpoint", folder / f"{name}.result"
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(90, 4, generator=generator)
        self.likelihood = METHODS[name]
        quadratic = self.likelihood == "regression"
        y = torch.sin(x[:, :2]) if quadratic else (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        self.batches = list(zip(x.split(30), y.split(30), strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2 if quadratic else 3))
            optimiser = torch.optim.Adam(self.model.parameters(), 0.02)
            loss = nn.functional.mse_loss if quadratic else nn.functional.cross_entropy
            for _ in range(60):
                optimiser.zero_grad()
                loss(self.model(x), y).backward()
                optimiser.step()
        self._fit(None)  # what is imported and tried at first is not done by each child
        self.ended(self.start(self._fit_alone))
        self.expected = self.numbers()
        started, self.bytes = time.perf_counter(), 0
        child = self.start(self.fit)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            self.bytes = max(self.bytes, self.size)
            time.sleep(_POLLED)
        self.seconds = time.perf_counter() - started
        if any(not torch.equal(a, b) for a, b in zip(self.numbers(), self.expected, strict=True)):
            raise AssertionError(f"{name}: a fit with a file is not that without one")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        try:
            return self.checkpoint.stat().st_size
        except FileNotFoundError:
            return 0

    def numbers(self) -> list[Tensor]:
        """The result of a child, which is deleted."""
        found = torch.load(self.result, weights_only=True)
        self.result.unlink()
        return found

    def fit(self) -> None:
        """The fit of a child."""
        self._fit(self.checkpoint)

    def _fit_alone(self) -> None:
        self._fit(None)

    def _fit(self, checkpoint: Path | None) -> None:
        few = {"stochastic": SVRG(max_rank=16), "sgd": SGD(epochs=2, min_steps=20, mode_epochs=4)}
        method = Stochastic(solver=few[self.name]) if self.name in few else self.name
        parameters = "last_layer" if self.name == "last_layer" else None
        la = LinearisedLaplace(self.model, self.likelihood, method=method, parameters=parameters, num_samples=4)
        la.fit_hyperparameters(self.batches, progress=False, checkpoint=checkpoint)
        steps = [[step.passes, *step.new_prior_precision, *step.effective_dimension] for step in la.history_]
        found = [la.samples_, la.mode_, la.prior_precision_, la.effective_dimension_, torch.tensor(steps)]
        found += [torch.tensor([la.scale_, la.temperature_, la.diagnose().epochs], dtype=torch.float64)]
        torch.save(found, self.result)

    def start(self, call: Callable[[], None]) -> int:
        """A process that makes a call."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                import warnings

                warnings.simplefilter("ignore")
                call()
                status = 0
            except BaseException as error:  # a child that goes on would run the parent's code
                os.write(2, f"{self.name}: {type(error).__name__}: {error}\n"[:400].encode())
            finally:
                os._exit(status)
        return child

    @staticmethod
    def ended(child: int) -> bool:
        """Whether a process came to its end."""
        return os.waitpid(child, 0)[1] == 0

    def killed(self, moments: random.Random) -> bool:
        """Whether a fit was killed, which else was faster: at any time, or while its file grows to a random size."""
        timed, size = moments.random() < _TIMED, moments.uniform(0, 1) * self.bytes
        latest = time.perf_counter() + (moments.uniform(0, 1) if timed else 10) * self.seconds
        delay, child = moments.uniform(0, _DELAY), self.start(self.fit)
        while time.perf_counter() < latest and (timed or self.size < size):
            if self.result.exists():
                break
            time.sleep(_POLLED)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        return not self.ended(child)


def run(count: int, seed: int) -> Report:
    report, moments = Report(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        fits: dict[str, _Fitted] = {}
        for number in range(count):
            name = list(METHODS)[number % len(METHODS)]
            fitted = fits.get(name) or fits.setdefault(name, _Fitted(name, Path(folder)))
            kills = went_on = 0
            for _ in range(moments.randint(1, _KILLS)):
                fitted.result.unlink(missing_ok=True)  # half of one, if it was written then
                if not fitted.killed(moments):
                    break
                kills, went_on = kills + 1, went_on + fitted.checkpoint.exists()
            else:
                fitted.result.unlink(missing_ok=True)
            ended = fitted.result.exists() or fitted.ended(fitted.start(fitted.fit))
            report.trials += 1
            report.counts[f"{name}: kills"] += kills
            report.counts[f"{name}: kills that left a file"] += went_on
            defect = _defect(fitted) if ended else "the fit that went on has failed"
            if defect:
                report.defects.append(f"seed {seed}, trial {number}: {name}, after {kills} kills: {defect}")
            for file in (fitted.checkpoint, fitted.result):
                file.unlink(missing_ok=True)
    return report


def _defect(fitted: _Fitted) -> str:
    """What is wrong after a fit, if anything."""
    names = ("samples", "mode", "prior precision", "effective dimension", "history", "scale, temperature or cost")
    pairs = zip(names, fitted.numbers(), fitted.expected, strict=True)
    if other := [name for name, found, expected in pairs if not torch.equal(found, expected)]:
        return f"other {', '.join(other)}"
    return "the file is still there" if fitted.checkpoint.exists() else ""
