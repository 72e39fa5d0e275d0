"""Threads that predict at the same time, on two models: every prediction is that of a single thread."""

import threading
from collections import Counter

import torch
from torch import Tensor, nn

from benchmarks.trial.report import Report
from benchmarks.trial.states import changes, state_of
from laplace_sampling import LinearisedLaplace

__all__ = ["run"]

_THREADS = 4
# Seconds that all threads may take, for each prediction.
_LONGEST = 5.0


def run(count: int, seed: int) -> Report:
    report, lock = Report(), threading.Lock()
    pair, inputs = _models(seed)
    expected = [_moments(la, x) for la, x in zip(pair, inputs, strict=True)]
    # In training mode, so that a model that is left in evaluation mode is seen.
    for la in pair:
        la.network.module.train()
    before = [state_of(la.network.module) for la in pair]
    found: Counter[str] = Counter()

    def predict(number: int) -> None:
        for trial in range(number, count, _THREADS):
            # Threads 0 and 1 use one model each, the others both in turns.
            which = number if number < 2 else (trial // _THREADS) % 2
            try:
                moments = _moments(pair[which], inputs[which])
                wrong = [
                    n
                    for n, a, b in zip(("deviations", "stddev"), moments, expected[which], strict=True)
                    if not torch.equal(a, b)
                ]
                defect = f"wrong {' and '.join(wrong)}" if wrong else ""
            except Exception as error:
                defect = f"{type(error).__name__}: {str(error)[:80]}".replace("\n", " ")
            with lock:
                report.trials += 1
                found.update([defect] if defect else [])

    threads = [threading.Thread(target=predict, args=(n,), daemon=True) for n in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 + _LONGEST * count / _THREADS)
    if any(thread.is_alive() for thread in threads):
        report.defects.append(f"seed {seed}: threads do not end")
    report.defects += [f"seed {seed}: {defect}, in {n} of {count} predictions" for defect, n in found.items()]
    for which, la in enumerate(pair):
        changed = changes(before[which], state_of(la.network.module))
        report.defects += [f"seed {seed}: model {which} is changed: {name}" for name in changed]
    return report


def _models(seed: int) -> tuple[list[LinearisedLaplace], list[Tensor]]:
    """Two fitted networks and inputs; the second has batch norms and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))
        second = nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(36, 3)
        )
        x, images = torch.randn(30, 2), torch.randn(30, 1, 4, 4)
        y, labels = torch.randn(30, 2), torch.randint(3, (30,))
    pair = [
        LinearisedLaplace(first, "regression", method="krylov", num_samples=16).fit([(x, y)], progress=False),
        LinearisedLaplace(second, "classification", method="exact", num_samples=16).fit(
            [(images, labels)], progress=False
        ),
    ]
    return pair, [x, images]


def _moments(la: LinearisedLaplace, x: Tensor) -> tuple[Tensor, Tensor]:
    pred = la.predict(x)
    return pred.deviations, pred.stddev
