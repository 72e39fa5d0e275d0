"""Seconds and memory of fit, tuning and prediction against laplace-torch, by numbers of outputs and weights.

Each cell of the table runs in a process of its own, with a time limit. A cell that runs out of time or memory is
recorded as such. Networks are MLPs with one hidden width, for classification of random inputs.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.comparison.laplace_torch import build
from benchmarks.comparison.lines import append, read, versions
from benchmarks.data.tasks import Part
from laplace_sampling import ClassificationPrediction, IsotropicPrior, LinearisedLaplace

__all__ = ["KEY", "METHODS", "SUITES", "cells", "network", "run"]

KEY = ("study", "outputs", "size", "method")
INPUTS, DATA, NEW, SAMPLES = 32, 500, 64, 64
PRECISION, LEAST_WIDTH = 10.0, 4
REPEATS = 5  # of a prediction of less than a second: the least counts
SUITES = {
    "small": ((2, 10, 100), (1e3, 1e4, 1e5), 60.0),
    "full": ((2, 10, 100, 1000), (1e3, 1e4, 1e5, 1e6, 1e7), 600.0),
}

Steps = tuple[Callable[[], object], Callable[[], object], Callable[[Tensor], object]]


def ours(model: nn.Module, data: Part) -> Steps:
    def build_ours() -> LinearisedLaplace:
        return LinearisedLaplace(
            model, "classification", prior=IsotropicPrior(precision=PRECISION), num_samples=SAMPLES
        )

    la, loader = build_ours(), data.loader(100)
    return (
        lambda: la.fit(loader, progress=False),
        lambda: build_ours().fit_hyperparameters(loader, progress=False),
        lambda x: cast(ClassificationPrediction, la.predict(x)).probs,
    )


def theirs(subset: str, structure: str) -> Callable[[nn.Module, Part], Steps]:
    def steps(model: nn.Module, data: Part) -> Steps:
        la, _, batch = build(model, "classification", subset, structure, prior_precision=PRECISION)
        return (
            lambda: la.fit(data.loader(batch)),
            lambda: la.optimize_prior_precision(method="marglik"),
            lambda x: torch.cat([la(part) for part in x.split(batch)]),
        )

    return steps


def ella(model: nn.Module, data: Part) -> Steps:
    """laplace-torch's ELLA; a grid on validation data tunes it."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    la: Any = Laplace(
        model, "classification", "all", "gp", functional_approximation="nystrom", subsample_size=100, n_eigenvalues=20,
        prior_precision=PRECISION,
    )  # fmt: skip
    loader = data.loader(50)
    return (
        lambda: la.fit(loader),
        lambda: la.optimize_prior_precision(pred_type="gp", method="gridsearch", val_loader=loader, grid_size=21),
        lambda x: torch.cat([la(part, pred_type="gp") for part in x.split(50)]),
    )


METHODS: dict[str, Callable[[nn.Module, Part], Steps]] = {
    "ours": ours,
    "diagonal": theirs("all", "diag"),
    "KFAC": theirs("all", "kron"),
    "last layer, KFAC": theirs("last_layer", "kron"),
    "ELLA": ella,
}


def network(outputs: int, size: float) -> nn.Module:
    """An MLP of about `size` weights, with two hidden layers of one width."""
    side = width(outputs, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(INPUTS, side), nn.ReLU(), nn.Linear(side, side), nn.ReLU(), nn.Linear(side, outputs)
    return nn.Sequential(*layers)


def width(outputs: int, size: float) -> int:
    """The width `w` that solves `w² + (inputs + outputs + 2) w + outputs = size`."""
    b = INPUTS + outputs + 2
    return round((math.sqrt(b**2 + 4 * max(0.0, size - outputs)) - b) / 2)


def measure(outputs: int, size: float, method: str) -> dict[str, float]:
    """Seconds of each step, and the growth of the peak of memory in MiB."""
    model = network(outputs, size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DATA + NEW, INPUTS, generator=generator)
    y = torch.randint(outputs, (DATA,), generator=generator)
    y[:outputs] = torch.arange(outputs)[:DATA]  # every class once, as far as there are data
    fit, tune, predict = METHODS[method](model, Part(x[:DATA], y))
    with torch.no_grad():
        model(x)
    before, figures = peak(), {"num_parameters": float(sum(p.numel() for p in model.parameters()))}
    new = x[DATA:]
    # the first prediction builds what later ones reuse
    for name, step in (
        ("fit", fit),
        ("first", lambda: predict(new)),
        ("predict", lambda: predict(new)),
        ("tune", tune),  # last, as what takes longest
    ):
        seconds = [timed(step)]
        while name == "predict" and len(seconds) < REPEATS and sum(seconds) < 1.0:
            seconds.append(timed(step))
        figures[f"seconds_{name}"] = round(min(seconds), 4)
        print(json.dumps(figures | {"mebibytes": round(peak() - before, 1)}), flush=True)
    return figures


def timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cells(suite: str) -> list[tuple[int, float, str]]:
    outputs, sizes, _ = SUITES[suite]
    return [(c, p, m) for p in sizes for c in outputs if width(c, p) >= LEAST_WIDTH for m in METHODS]


def run_cell(outputs: int, size: float, method: str, limit: float) -> dict[str, Any]:
    """Runs a cell in a process of its own; steps that ended count even if a later one did not."""
    arguments = ["--outputs", str(outputs), "--size", str(size), "--method", method]
    command = [sys.executable, "-m", "benchmarks.comparison.cost", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        output, error = done.stdout, (done.stderr.strip().splitlines() or ["killed"])[-1] if done.returncode else None
    except subprocess.TimeoutExpired as expired:
        output, error = (expired.stdout or b"").decode(), f"more than {limit:g} s"
    lines = output.strip().splitlines()
    return (json.loads(lines[-1]) if lines else {}) | ({"error": error[:300]} if error else {})


def run(suite: str, out: Path) -> None:
    """Appends the results that the file does not have."""
    done = {(r["outputs"], r["size"], r["method"]) for r in read(out, KEY)}
    for outputs, size, method in cells(suite):
        if (outputs, size, method) not in done:
            result = run_cell(outputs, size, method, SUITES[suite][2])
            head = {"study": "cost", "outputs": outputs, "size": size, "method": method}
            append(out, head | result | {"versions": versions()})
            print(f"C = {outputs}, P = {size:g}, {method}: {result}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, required=True)
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--method", choices=tuple(METHODS), required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measure(options.outputs, options.size, options.method)
