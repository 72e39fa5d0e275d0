"""Large UCI regressions: a trained network with our error bars, SVGP, and a Gaussian process on a part of the data."""

import gzip
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.metrics import score
from benchmarks.comparison.predictions import Fitted
from benchmarks.comparison.processes import sparse_process
from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data.tasks import Data, Part, Task
from benchmarks.published.classifiers import described
from benchmarks.published.setup import Cells, Rows, Setup, Study
from benchmarks.published.tables import beside, sizes
from laplace_sampling.gp.linear_operators import gpytorch

__all__ = ["STUDY", "read"]

SETS = ("bike", "keggdirected", "kin40k")
SPLITS, STEPS, BATCH, VALIDATION = 1, 10_000, 200, 0.1
# Of batches of 512: on bike 150 epochs, about as many as the network has.
PART, INDUCING, SVGP_STEPS = 2000, 512, 4000
KEYS = ("rmse", "log_likelihood", "coverage")
# RMSE and log-likelihood of targets of mean 0 and variance 1.
PUBLISHED = {
    "bike": {
        "GP, conjugate gradients (Antorán 2024)": ("0.04 ± 0.00", "2.62 ± 0.06"),
        "GP, dual descent (Antorán 2024)": ("0.04 ± 0.00", "2.49 ± 0.09"),
        "SVGP, M = 3,000 (Antorán 2024)": ("0.08 ± 0.00", "1.21 ± 0.01"),
    },
    "keggdirected": {
        "GP, conjugate gradients (Antorán 2024)": ("0.08 ± 0.00", "0.92 ± 0.10"),
        "GP, dual descent (Antorán 2024)": ("0.08 ± 0.00", "0.92 ± 0.11"),
        "SVGP, M = 3,000 (Antorán 2024)": ("0.10 ± 0.00", "0.54 ± 0.02"),
    },
    "kin40k": {
        "SVGP, M = 1,000 (Ober 2022)": ("0.17 ± 0.00", "0.33 ± 0.00"),
        "network, mini-batches (Ober 2022)": ("0.05 ± 0.00", "1.51 ± 0.01"),
        "deep kernel, mini-batches (Ober 2022)": ("0.03 ± 0.00", "1.73 ± 0.02"),
    },
}


def read(folder: Path, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with the target in the last column, `[N, D + 1]`, and which rows are for tests, `[N]`."""
    with gzip.open(folder / "data.csv.gz", "rt") as data, gzip.open(folder / "test_mask.csv.gz", "rt") as mask:
        return np.loadtxt(data, delimiter=","), np.loadtxt(mask, delimiter=",", usecols=split).astype(bool)


def problem_of(setup: Setup, name: str, split: int) -> Problem:
    """In units of the training data; a tenth of them is for validation."""
    if setup.folder is None:
        table = np.random.default_rng(0).normal(size=(240, 5))
        table[:, -1] = np.sin(2 * table[:, 0]) + 0.1 * table[:, -1]
        is_test = np.arange(240) % 6 == 0
    else:
        table, is_test = read(setup.folder / "uci-large" / name, split)
    if setup.quick:
        table, is_test = table[:240], is_test[:240]
    train, test = table[~is_test], table[is_test]
    centre, scale = train.mean(0), np.maximum(train.std(0), 1e-8)
    order = np.random.default_rng(split).permutation(len(train))
    held = round(VALIDATION * len(train))

    def part(rows: np.ndarray) -> Part:
        values = torch.from_numpy((rows - centre) / scale).float()
        return Part(values[:, :-1], values[:, -1:])

    data = Data(part(train[order[held:]]), part(train[order[:held]]), part(test))
    recipe = Recipe(early=True, steps=setup.size(STEPS, 50), batch_size=BATCH, step_size=2e-3)
    task = Task("regression", 1, lambda seed: data)
    architecture = "MLP" if setup.quick else "MLP, wide"
    return Problem(task, data, architecture, recipe, split, f"{name} {setup.name}", setup.cache)


def on_a_part(problem: Problem, num: int) -> Fitted:
    """An exact Gaussian process, RBF with a length for each input, on some of the training data."""
    train = problem.data.train
    data = replace(problem.data, train=Part(train.x[:num], train.y[:num]))
    return METHODS["GP, RBF"].fit(replace(problem, data=data))


def svgp(problem: Problem, **settings: Any) -> Fitted:
    """Inducing points with a Matérn-3/2 kernel with a length for each input, as in the thesis of Antorán."""
    kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=problem.data.train.x.shape[1])
    return sparse_process(problem, kernel=kernel, **settings)


def contenders(setup: Setup) -> dict[str, Callable[[Problem], Fitted]]:
    part, inducing = setup.size(PART, 50), setup.size(INDUCING, 20)
    return {
        "network alone, noise of training residuals": METHODS["MAP"].fit,
        "network, ours": METHODS["ours"].fit,
        "network, ours, by validation": METHODS["ours, validation"].fit,
        f"SVGP, M = {inducing}": partial(svgp, num_inducing=inducing, steps=setup.size(SVGP_STEPS, 10)),
        f"GP on {part:,} data": partial(on_a_part, num=part),
    }


def cells(setup: Setup) -> Cells:
    methods = contenders(setup)

    def row(name: str, split: int, method: str) -> Rows:
        problem = problem_of(setup, name, split)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predicted = methods[method](problem).predict(problem.data.test.x)
            scores = score(predicted, problem.data.test.y.flatten().to(cast(torch.Tensor, predicted.samples)))
        return [{"data": name, "method": method, **described(problem), **scores}]

    return {
        f"{name}, {method}, split {split}": partial(row, name, split, method)
        for split in setup.runs(SPLITS)
        for name in SETS[: setup.size(3, 1)]
        for method in methods
    }


def section(rows: Rows, images: Path) -> str:
    text = ""
    for name in dict.fromkeys(row["data"] for row in rows):
        chosen = [row for row in rows if row["data"] == name]
        published = {method: (*cells, "") for method, cells in PUBLISHED[name].items()}
        head = ("method", "RMSE", "log-likelihood", "coverage of 90 % intervals")
        text += f"{name}, {sizes(chosen)}:\n\n{beside(head, published, chosen, KEYS)}\n\n"
    return (
        f"{text}Targets have mean 0 and variance 1 on the training data. A seed is one of the ten splits (90 % for "
        "training) of the files, which are not the splits of the sources (five, and twenty, of 90 %). The network has "
        "three hidden layers of 100 units and is stopped early by a tenth of the training data; SVGP has fewer "
        f"inducing points and {SVGP_STEPS:,} steps; the exact process has an RBF kernel where Antorán has Matérn-3/2. "
        "The target of bike is the logarithm of the sum of two of its inputs, up to constants."
    )


STUDY = Study("Large UCI regressions", cells, section)
