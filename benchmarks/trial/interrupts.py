"""Ctrl-C at random moments of a fit, of a fit of hyperparameters and of a prediction.

Afterwards the model is bit-identical, flags included; an earlier posterior still predicts the same; and the steps that
a fit of hyperparameters had finished are in `history_`.
"""

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trial.report import Report
from benchmarks.trial.states import changes, state_of
from laplace_sampling import SGD, LinearisedLaplace, Stochastic

__all__ = ["run"]

# What is interrupted: a method, and a call.
_METHODS = ("exact", "krylov", "sgd", "dual", "kfac")
_CALLS = ("fit", "tune", "predict")


class _Interrupted:
    """One fitted model, and what may be interrupted of it."""

    def __init__(self, method: str, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 2))
            x, y = torch.randn(20, 2), torch.randn(20, 2)
        self.batches, self.x = [(x, y)], x[:4]
        quick = Stochastic(solver=SGD(epochs=2, min_steps=20, mode_epochs=4, tolerance=0.9))
        self.la = LinearisedLaplace(
            self.model, "regression", method=quick if method == "sgd" else method, num_samples=4, seed=seed
        ).fit(self.batches, progress=False)
        self.model.train()
        self.steps = 0
        self.expected = self.predict()
        self.seconds = {call: self._duration(getattr(self, call)) for call in _CALLS}
        self.fit()

    def _count(self, step: Any) -> None:
        self.steps += 1

    def fit(self) -> None:
        self.la.fit(self.batches, progress=False)

    def tune(self) -> None:
        self.steps = 0
        self.la.fit_hyperparameters(self.batches, progress=False, max_steps=3, callback=self._count)

    def predict(self) -> tuple[Tensor, Tensor]:
        pred = self.la.predict(self.x)
        return pred.deviations, pred.stddev

    @staticmethod
    def _duration(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def defects(self, call: str, moment: float) -> tuple[bool, list[str]]:
        """Whether the call was interrupted, and what is wrong afterwards."""
        before, interrupted = state_of(self.model), False
        try:
            signal.setitimer(signal.ITIMER_REAL, max(moment, 1e-6))
            getattr(self, call)()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        found = [f"the model is changed: {name}" for name in changes(before, state_of(self.model))]
        if found:
            return interrupted, found
        if interrupted and call == "tune" and len(self.la.history_) < self.steps:
            found.append(f"`history_` has {len(self.la.history_)} steps of {self.steps} that were finished")
        if interrupted or call == "predict":
            now = self.predict()
            if not all(torch.equal(a, b) for a, b in zip(now, self.expected, strict=True)):
                found.append("the earlier posterior predicts something else")
        return interrupted, found


def run(count: int, seed: int) -> Report:
    report, moments = Report(), random.Random(seed)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    cases: dict[str, _Interrupted] = {}
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(count):
                method, call = moments.choice(_METHODS), moments.choice(_CALLS)
                case = cases.get(method) or cases.setdefault(method, _Interrupted(method, seed))
                moment = moments.uniform(0, 1.1 * case.seconds[call])
                interrupted, found = case.defects(call, moment)
                report.trials += 1
                report.counts[f"{call}: {'interrupted' if interrupted else 'finished before'}"] += 1
                where = f"seed {seed}, trial {number}: {method}, {call}, after {moment:.3g} s"
                report.defects += [f"{where}: {defect}" for defect in found]
                if found or not interrupted:
                    # What was changed would be found again by all that follow; a finished fit is another posterior.
                    del cases[method]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGALRM, before)
    return report
