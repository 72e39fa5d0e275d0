"""What the methods are compared on: a data set, a split, and a network that is trained on it once for all of them."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.comparison.networks import NETWORKS, mlp
from benchmarks.comparison.ours import BATCH
from benchmarks.comparison.processes import NOISE_FLOOR
from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data import uci
from benchmarks.data.tasks import Part, Task, data_of, number_part, regression_data, standardised_targets
from benchmarks.posteriors.layers import Layers
from laplace_sampling import LinearisedLaplace

SETS = {"gap": ("yacht", "energy"), "uci": ("yacht", "energy", "concrete"), "ranking": ("yacht",), "toy": ("cubic",)}
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}
RANKED = {
    f"{depth} x {width} {name}": partial(mlp, width=width, depth=depth, activation=activation)
    for depth in (1, 2, 3)
    for width in (20, 50)
    for name, activation in ACTIVATIONS.items()
}
NETWORKS.update(RANKED)
NETWORK, TOY_NETWORK = "1 x 50 tanh", "2 x 50 ReLU"
# About that of the prior which our posterior finds for these networks; validation data stop the training.
WEIGHT_DECAY = 1e-5


@dataclass(frozen=True)
class Effort:
    """How long methods run.

    Attributes:
        training: steps of training of the network.
        trajectories: of Hamiltonian Monte Carlo, of which a third is for adaptation; one in `thinning` is kept.
        mean_field, inducing: steps of Adam on the bounds.
        processes: steps of L-BFGS on an evidence.
        epochs: of stochastic gradients with noise, before draws are kept and after.
    """

    training: int = 10_000
    trajectories: int = 2000
    thinning: int = 10
    mean_field: int = 10_000
    inducing: int = 10_000
    processes: int = 50
    epochs: tuple[int, int] = (200, 3200)


QUICK = Effort(20, 12, 1, 3, 3, 2, (1, 64))


@dataclass(frozen=True, eq=False)
class Study:
    """A trained network, its data in standard units, and the standard deviation of the targets in original ones."""

    key: dict[str, Any]
    problem: Problem
    scale: float
    effort: Effort

    @cached_property
    def layers(self) -> Layers:
        return Layers.of(self.problem.network)

    @cached_property
    def weights(self) -> Tensor:
        return self.layers.weights_of(self.problem.network)

    @property
    def x(self) -> Tensor:
        return self.problem.data.train.x.double()

    @property
    def y(self) -> Tensor:
        return self.problem.data.train.y.flatten().double()

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.problem.seed)

    def fit(self) -> LinearisedLaplace:
        """Our posterior of all weights, with the precisions of prior and noise that the evidence gives."""
        la = LinearisedLaplace(self.problem.network, "regression", seed=self.problem.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return la.fit_hyperparameters(self.problem.data.train.loader(BATCH), progress=False)

    @cached_property
    def ours(self) -> LinearisedLaplace:
        return self.fit()

    @property
    def precision(self) -> float:
        """The prior precision of our posterior, which chains take as well."""
        return float(self.ours.prior_precision_)

    @property
    def noise(self) -> float:
        """The noise variance of our posterior; the floor is for targets that are rounded or come twice."""
        assert self.ours.noise_precision_ is not None
        return max(1 / float(self.ours.noise_precision_), NOISE_FLOOR**2)


def cubic(seed: int) -> tuple[uci.Split, np.ndarray, np.ndarray]:
    """`x³ + N(0, 3²)` at 50 inputs in [−4, −2] ∪ [2, 4]; a fifth is for validation; others between."""
    random = np.random.default_rng(seed)

    def drawn(num: int, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        x = random.uniform(low, high, (num, 1)) * random.choice([-1.0, 1.0], (num, 1))
        return x, x[:, 0] ** 3 + 3 * random.standard_normal(num)

    return uci.Split(*drawn(50, 2, 4), *drawn(200, 2, 4)), *drawn(200, 0, 2)


def study(part: str, name: str, split: int, network: str, data: Path, effort: Effort, kept: Path | None) -> Study:
    folder = data / "uci" / name
    if part in ("uci", "ranking"):
        raw = uci.load(folder, split)
        standard = regression_data(raw, split)
    else:
        raw, x, y = cubic(split) if part == "toy" else uci.load_gap(folder, split)
        standard = regression_data(raw, split, gap=number_part(x, y))
    # Standardised targets differ from the original ones by this factor, and a shift.
    scale = float(raw.y_test.std() / standard.test.y.double().std(correction=0))
    recipe = Recipe(WEIGHT_DECAY, early=True, steps=effort.training)
    task = Task("regression", 1, lambda _: standard)
    problem = Problem(task, standard, network, recipe, split, f"{part} {name} {split}", kept)
    return Study({"part": part, "set": name, "split": split, "network": network}, problem, scale, effort)


def studies(
    parts: Sequence[str], sets: Sequence[str] | None, splits: int, data: Path, kept: Path | None
) -> Iterator[Study]:
    """The studies of some parts, split after split, so that a run that is cut short has some of everything."""
    for part in parts:
        for split in range(1 if part == "toy" else splits):
            for name in SETS[part]:
                if part == "toy" or not sets or name in sets:
                    for network in {"ranking": list(RANKED), "toy": [TOY_NETWORK]}.get(part, [NETWORK]):
                        yield study(part, name, split, network, data, Effort(), kept)


def quick_studies(parts: Sequence[str]) -> Iterator[Study]:
    """The same of few made-up data, without a folder."""
    random = torch.Generator().manual_seed(0)
    sides = [Part(x, x**3) for x in torch.randn(3, 20, 1, generator=random)]
    data = standardised_targets(data_of(sides, shifts={"gap": sides[2]}))
    task = Task("regression", 1, lambda _: data)
    for part in parts:
        for network in list(RANKED)[:3] if part == "ranking" else [TOY_NETWORK]:
            problem = Problem(task, data, network, Recipe(steps=QUICK.training))
            yield Study({"part": part, "set": "made up", "split": 0, "network": network}, problem, 1.0, QUICK)
