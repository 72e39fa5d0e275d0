"""Priors of a network's own temperature, below one, that held-out labels choose: what is gained, and what is lost.

`python -m benchmarks.methods.own_temperature [--data DIR] [--cache DIR]` trains small classifiers of the first half of
the comparison in five ways. Some test data are drawn ten times; they choose the temperature `T ≤ 1` of the network
without error bars under each prior of `log T`, and the other test data say what it gains in mean log-likelihood over
`T = 1`. It prints means over networks, those that need a temperature below 0.9 (which the other data say) and all
others apart, and in brackets the mean over draws of the network that loses most.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.comparison.report import table
from benchmarks.comparison.training import Problem, Recipe, outputs_of
from benchmarks.data.folder_tasks import folder_tasks
from benchmarks.data.tasks import TASKS

__all__ = ["PRIORS", "gains", "least"]

RECIPES = (Recipe(), Recipe(0.01), Recipe(early=True), Recipe(steps=100), Recipe(augmented="shifts"))
IMAGES = ("digits, n=150", "digits, n=300", "digits, n=300, noise 1", "digits, n=600, noise 1")
# Tasks, networks and ways of training.
CASES = (
    (IMAGES, ("MLP", "LeNet", "LeNet with batch norm"), RECIPES),
    (("MNIST, n=1000",), ("LeNet of 1998", "strided CNN, small"), RECIPES),
    (("wine", "breast cancer", "two moons"), ("MLP",), RECIPES[:3]),
)
NUMBERS, DRAWS = (20, 40, 80, 200, 1000), 10
# What each adds to the sum of losses, a function of `log T`.
PRIORS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda log_T: 0 * log_T,
    **{f"normal, {s}": lambda log_T, s=s: 0.5 * (log_T / s) ** 2 for s in (0.1, 0.2)},
    **{f"exponential, {s}": lambda log_T, s=s: log_T.abs() / s for s in (0.05, 0.1, 0.2)},
}
LOGS = torch.linspace(-5, 0, 501, dtype=torch.float64)


def least(losses: Tensor, prior: Callable[[Tensor], Tensor]) -> int:
    """The index in `LOGS` where the sum of losses `[N, logs]` and of the prior's is least."""
    return int((losses.sum(0) + prior(LOGS)).argmin())


def gains(losses: Tensor, number: int, generator: torch.Generator) -> tuple[dict[str, float], float]:
    """By prior the gain on data that did not choose, for so many that do; and the best temperature of the former."""
    chosen, others = torch.randperm(len(losses), generator=generator).tensor_split([number])
    mean = losses[others].mean(0)
    found = {name: float(mean[-1] - mean[least(losses[chosen], prior)]) for name, prior in PRIORS.items()}
    return found, math.exp(float(LOGS[mean.argmin()]))


def problems(data: Path | None, cache: Path | None) -> Iterator[Problem]:
    tasks = TASKS | (folder_tasks(data) if data is not None else {})
    for names, networks, recipes in CASES:
        for name in names:
            if name in tasks:
                loaded = tasks[name].load(0)
                yield from (
                    Problem(tasks[name], loaded, network, recipe, name=name, networks=cache)
                    for network in networks
                    for recipe in recipes
                )


def losses_of(problem: Problem) -> Tensor:
    """Of each test datum at each temperature: `[N, logs]`. Validation data may have stopped the training."""
    test = problem.data.test
    f = outputs_of(problem.network, test.x).double()
    return torch.stack([F.cross_entropy(f / T, test.y, reduction="none") for T in LOGS.exp().tolist()], 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.own_temperature", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="images, for networks of MNIST")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="for trained networks")
    options = parser.parse_args()
    by: dict[tuple[bool, int], list[dict[str, float]]] = defaultdict(list)
    for problem in problems(options.data, options.cache):
        losses, generator = losses_of(problem), torch.Generator().manual_seed(0)
        for number in NUMBERS:
            if 2 * number <= len(losses):
                draws = [gains(losses, number, generator) for _ in range(DRAWS)]
                means = {name: fmean(found[name] for found, _ in draws) for name in PRIORS}
                by[fmean(best for _, best in draws) < 0.9, number].append(means)
        print(
            f"{problem.name}, {problem.architecture}, {problem.recipe.name}, {problem.recipe.steps} steps", flush=True
        )
    rows = [
        [
            "below 0.9" if unsure else "above 0.9",
            str(number),
            str(len(found)),
            *(f"{fmean(g[name] for g in found):+.4f} ({min(g[name] for g in found):+.4f})" for name in PRIORS),
        ]
        for (unsure, number), found in sorted(by.items(), reverse=True)
    ]
    print(table(["best `T`", "data", "networks", *PRIORS], rows))


if __name__ == "__main__":
    main()
