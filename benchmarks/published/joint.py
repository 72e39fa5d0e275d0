"""Marginal and joint log-likelihoods, `κ = 1 … 5`, on Fashion-MNIST and a part of CIFAR-10.

The columns are those of Antorán (2024), Table 6.1.
"""

from functools import partial
from pathlib import Path

from benchmarks.comparison.methods import METHODS, missing
from benchmarks.published.classifiers import scored
from benchmarks.published.setup import Cells, Rows, Setup, Study
from benchmarks.published.tables import beside, sizes

__all__ = ["STUDY"]

SETS, NETWORK = ("Fashion-MNIST", "CIFAR-10"), "LeNet"
NUM, EPOCHS, TEST, SEEDS = 10_000, 30, 1000, 1
CONTENDERS = ("MAP", "ensemble of 5", "ours", "ours, validation", "laplace-torch, KFAC")
PUBLISHED = {
    "MAP": ("−1.40 ± 0.00", "−13.97 ± 0.01", "−27.89 ± 0.03", "−41.83 ± 0.03", "−55.89 ± 0.02"),
    "ensemble of 5": ("−0.90 ± 0.00", "−6.86 ± 0.01", "−14.17 ± 0.03", "−22.29 ± 0.04", "−31.07 ± 0.09"),
    "KFAC": ("−1.12 ± 0.01", "−4.92 ± 0.04", "−10.83 ± 0.12", "−19.02 ± 0.22", "−29.40 ± 0.40"),
    "samples": ("−1.07 ± 0.01", "−5.14 ± 0.04", "−10.77 ± 0.09", "−18.04 ± 0.18", "−26.75 ± 0.26"),
}


def cells(setup: Setup) -> Cells:
    sizes = {"num": NUM, "epochs": EPOCHS, "test": setup.size(TEST, 50)}

    network = NETWORK + ", small" * setup.quick

    def run(name: str, method: str, seed: int) -> Rows:
        problem = setup.problem(name, network, seed, **sizes)
        return [scored(problem, method, METHODS[method].fit) | {"data": name}]

    contenders = CONTENDERS[:3] if setup.quick else [m for m in CONTENDERS if missing(METHODS[m]) is None]
    return {
        f"{name}, {method}, seed {s}": partial(run, name, method, s)
        for name in SETS[: setup.size(2, 1)]
        for s in setup.runs(SEEDS)
        for method in contenders
    }


def section(rows: Rows, images: Path) -> str:
    keys = [f"joint_{kappa}" for kappa in range(1, 6)]
    head = ("method", *(f"κ = {kappa}" for kappa in range(1, 6)))
    text = ""
    for name in dict.fromkeys(row["data"] for row in rows):
        chosen = [row for row in rows if row["data"] == name]
        published = {f"CIFAR-100: {method}": cells for method, cells in PUBLISHED.items()}
        text += f"{name}, {sizes(chosen)}:\n\n{beside(head, published, chosen, keys)}\n\n"
    return (
        f"{text}κ = 1 is the log-likelihood of a datum; at larger κ it is joint over τ = 10(κ − 1) labels drawn from κ "
        "inputs, summed, the mean over groups and ten shuffles. Published: a ResNet-18 of 11 million weights on all of "
        "CIFAR-100, 100 classes, so that only the order of methods compares. Here: small LeNets, 10 classes, Adam; the "
        "ensemble takes four more trainings; `ours` uses no validation data."
    )


STUDY = Study("Joint predictions of labels, κ = 1 … 5", cells, section)
