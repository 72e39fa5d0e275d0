"""The scale that factored posteriors get, and what it makes of predictions.

`python -m benchmarks.methods.scale [--data DIR]` prints a Markdown table of test losses: of the network, and with error
bars at a scale of one, at the scale that the posterior's own leave-one-out chooses, and at the automatic one. With a
folder of `fashion-mnist.npz` there are rows for 500 of its images. Rows are also printed to standard error at once.
"""

import argparse
import statistics
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.comparison.ours import with_posterior
from benchmarks.comparison.report import table
from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data.tasks import TASKS, Part, Task, split
from laplace_sampling import LinearisedLaplace
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.left_out import left_out_classification

__all__ = ["losses"]

SEEDS = 3
RECIPES = {"converged": Recipe(), "early": Recipe(early=True), "decay": Recipe(weight_decay=1e-2)}
CASES = (
    ("wine", "MLP", "converged"),
    ("breast cancer", "MLP", "converged"),
    ("breast cancer", "MLP", "early"),
    ("two moons", "MLP", "converged"),
    ("digits, n=300, noise 1", "MLP", "converged"),
    ("digits, n=300, noise 1", "MLP", "early"),
    ("digits, n=300, noise 1", "MLP", "decay"),
    ("digits, n=300", "LeNet, small", "converged"),
)


def fashion(folder: Path) -> Task:
    """500 images of half the resolution."""
    with np.load(folder / "fashion-mnist.npz") as data:
        x, y = (torch.tensor(data[name][:20_000]) for name in ("x_train", "y_train"))
    x = F.avg_pool2d(x[:, None].float() / 255, 2)
    return Task("classification", 10, lambda seed: split(x, y.long(), 500, 200, seed, test=1000))


def losses(problem: Problem, method: str) -> dict[str, float]:
    """Mean test losses, and the automatic scale."""
    train, test = problem.data.train, problem.data.test
    la = LinearisedLaplace(problem.network, problem.likelihood, method=method, seed=problem.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit_hyperparameters(train.loader(200), criterion="evidence", progress=False)
    found = {"automatic scale": la.scale_, "automatic": loss(la, test)}
    fitted = la._fitted
    assert fitted is not None
    assert fitted.fit is not None
    deviations = torch.cat([la.network.jvp(x, la.samples_) for x in train.x.split(200)], dim=1)
    outputs = torch.cat([la.network(x) for x in train.x.split(200)])
    own = left_out_classification(la.settings.likelihood, train.y, outputs, fitted.fit.mode.outputs, deviations).scale
    for name, scale in (("scale 1", 1.0), ("its own leave-one-out", own)):
        other = with_posterior(la, replace(fitted.posterior, calibration=Calibration(scale=scale)))
        found[name] = loss(other, test)
    return found | {"its own scale": own, "network": float(F.cross_entropy(la.network(test.x), test.y))}


def loss(la: LinearisedLaplace, part: Part) -> float:
    """Mean negative log-likelihood."""
    return -float(torch.cat([la.predict(x).log_prob(y) for x, y in part.loader(200)]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.scale", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with `fashion-mnist.npz`")
    folder = parser.parse_args().data
    tasks, cases = dict(TASKS), list(CASES)
    if folder is not None:
        tasks["Fashion-MNIST, n=500"] = fashion(folder)
        cases.append(("Fashion-MNIST, n=500", "MLP", "early"))
    names = ("network", "scale 1", "its own leave-one-out", "automatic")
    rows = []
    for task, network, recipe in cases:
        problems = [
            Problem(tasks[task], tasks[task].load(seed), network, RECIPES[recipe], seed, task) for seed in range(SEEDS)
        ]
        for method in ("kfac", "diagonal"):
            found = [losses(problem, method) for problem in problems]
            means = [f"{statistics.fmean(f[name] for f in found):.3f}" for name in names]
            worst = max(f["automatic"] - f["network"] for f in found)
            scales = [", ".join(f"{f[name]:.2g}" for f in found) for name in ("its own scale", "automatic scale")]
            rows.append([f"{task} / {network} / {recipe}", method, *means, f"{worst:+.3f}", *scales])
            print("|", " | ".join(rows[-1]), "|", file=sys.stderr, flush=True)
    head = ("task / network / training", "method", *names, "worst change", "its own scales", "automatic scales")
    print(table(head, rows))


if __name__ == "__main__":
    main()
