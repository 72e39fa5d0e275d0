"""Suites: cases, each a task, a network and a training recipe; and the methods that run on them.

"small" and "full" are on data that are generated or bundled. "first" and "second" are halves on data from a folder:
choices are made on the first, and the second is reported once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.comparison.training import Recipe
from benchmarks.data import uci
from benchmarks.data.tasks import TASKS

__all__ = ["HALVES", "SUITES", "Case", "Suite", "Unit", "grid"]


@dataclass(frozen=True)
class Case:
    """A network on a task, and how it is trained."""

    task: str
    network: str
    recipe: Recipe
    tier: int = 2  # of the methods that run
    seeds: int | None = None  # instead of those of the suite

    @property
    def name(self) -> str:
        return f"{self.task} / {self.network} / {self.recipe.name}"


@dataclass(frozen=True)
class Suite:
    """Cases and the number of their seeds.

    Attributes:
        tiers: the methods that run, with their tiers; by default those of `METHODS`.
        folder: whether its tasks are those of `benchmarks.data.folder_tasks`.
    """

    cases: tuple[Case, ...]
    seeds: int
    tiers: Mapping[str, int] | None = None
    folder: bool = False

    def with_seeds(self, most: int | None) -> "Suite":
        """With fewer seeds, if a number is given."""
        if most is None:
            return self
        cases = tuple(replace(case, seeds=None if case.seeds is None else min(most, case.seeds)) for case in self.cases)
        return replace(self, cases=cases, seeds=min(most, self.seeds))


@dataclass(frozen=True)
class Unit:
    """Methods that share one network and its data."""

    case: Case
    seed: int
    methods: tuple[str, ...]


def grid(task: str, network: str, decay: float, tier: int, *, others: bool = True, **settings: Any) -> list[Case]:
    """Trained to convergence without weight decay; with it and stopped early too, for tier 0, if `others`."""
    recipes = [Recipe(**settings), Recipe(weight_decay=decay, **settings)]
    recipes += [replace(recipe, early=True) for recipe in recipes]
    return [Case(task, network, r, tier if i == 0 else 0) for i, r in enumerate(recipes if others else recipes[:1])]


def _small() -> tuple[Case, ...]:
    noisy = "digits, n=300, noise 1"
    return (
        *grid("two moons", "MLP", 1e-3, 3),
        *grid("wine", "MLP", 1e-3, 3),
        *grid("breast cancer", "MLP", 1e-3, 3),
        *grid("digits, n=300", "LeNet with batch norm", 1e-3, 1),
        *grid(noisy, "LeNet with batch norm", 1e-3, 2),
        *grid(noisy, "MLP", 1e-3, 1),
        *grid(noisy, "LeNet", 1e-3, 0, others=False),
        *grid(noisy, "ResNet", 1e-3, 0, others=False),
        *grid(noisy, "ViT", 1e-3, 0, others=False),
        *grid("digits, n=1400, noise 2", "LeNet with batch norm", 1e-3, 0, others=False),
        *grid("glyphs, 10 classes, n=600", "LeNet with batch norm", 1e-3, 1, others=False),
        *grid("segmentation", "pixels", 1e-3, 1),
        *grid("diabetes", "tanh MLP", 1e-2, 2),
        *grid("gap", "tanh MLP", 1e-3, 2),
    )


def _full() -> tuple[Case, ...]:
    images = ("MLP", "LeNet", "LeNet with batch norm", "ResNet", "ViT")
    cases = [c for task in TASKS if task.startswith("digits") for net in images for c in grid(task, net, 1e-3, 3)]
    for task in (t for t in TASKS if t.startswith("glyphs")):
        large = "60000" in task
        for network in images[1:]:
            steps, tier = (12_000, 1) if large else (4000, 3)
            cases += grid(task, network, 1e-4, tier, steps=steps, batch_size=100)
    tables = [c for task in ("two moons", "wine", "breast cancer") for c in grid(task, "MLP", 1e-3, 3)]
    numbers = [*grid("diabetes", "tanh MLP", 1e-2, 2), *grid("gap", "tanh MLP", 1e-3, 2)]
    return (*cases, *tables, *grid("segmentation", "pixels", 1e-3, 2), *numbers)


# Of both halves: by tier what runs on all networks, on those where methods are compared, and on small ones.
BOTH = {
    **dict.fromkeys(
        (
            "MAP", "temperature scaling", "temperature by test oracle", "ours", "ours, validation",
            "ours, last layer", "ours, last layer, validation", "ours, KFAC", "laplace-torch, last layer, KFAC",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "laplace-torch, last layer", "laplace-torch, last layer, validation",
            "laplace-torch, last layer, KFAC, validation", "MC dropout", "SNGP", "ensemble of 5",
            "ensemble of 5, a fifth of the steps",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "laplace-torch, KFAC", "laplace-torch, KFAC, validation", "laplace-torch, diagonal",
            "laplace-torch, diagonal, validation",
        ),
        3,
    ),
}  # fmt: skip
FIRST = {
    **BOTH,
    **dict.fromkeys(("GP, RBF", "deep kernel"), 1),
    **dict.fromkeys(
        (
            "ours, evidence", "ours, evidence, not scaled", "ours, self-consistency", "ours, g-prior",
            "ours, layerwise", "ours, homogeneous", "ours, noise of the mode",
        ),
        2,
    ),
}  # fmt: skip
SECOND = {**BOTH, "GP, inducing points": 1}
# Training images, and epochs of training on them.
IMAGES = {"n=1000": (1000, 60), "n=10000": (10_000, 15), "all": (58_000, 10)}
CIFAR = {"n=1000": (1000, 60), "all": (8000, 20)}
DECAY = 5e-4


def image_case(
    task: str, network: str, tier: int, *, decay: bool = False, early: bool = False, augmented: str = ""
) -> Case:
    """Adam with steps of 10⁻³ on batches of 100, fewer epochs for more data."""
    sizes = CIFAR if task.startswith("CIFAR") else IMAGES
    num, epochs = sizes[task.rpartition(", ")[2]]
    recipe = Recipe(DECAY if decay else 0.0, early, epochs * num // 100, 1e-3, 100, augmented=augmented)
    return Case(task, network, recipe, tier)


def _first() -> tuple[Case, ...]:
    """Clean digits, MNIST, and small regressions with and without a gap; networks of the most work come first."""
    plain, stopped = Recipe(), Recipe(weight_decay=1e-3, early=True)
    digits = [
        Case(f"digits, n={num}", network, plain, 3, seeds=2)
        for num in (150, 220, 300)
        for network in ("LeNet", "LeNet with batch norm")
    ]
    tables = [
        Case(f"uci {name}{kind}", "tanh MLP", recipe, tier, seeds=3)
        for name in uci.SETS
        for kind in ("", ", gap")
        for recipe, tier in ((plain, 2), (stopped, 1))
    ]
    return (
        image_case("MNIST, all", "strided CNN", 1),
        image_case("MNIST, all", "LeNet of 1998", 0, decay=True, augmented="shifts"),
        image_case("MNIST, n=10000", "ResNet", 0, augmented="shifts"),
        image_case("MNIST, n=10000", "CNN with batch norm", 2),
        image_case("MNIST, n=10000", "LeNet of 1998", 2, decay=True, early=True),
        image_case("MNIST, n=10000", "ViT", 2),
        image_case("MNIST, n=1000", "LeNet of 1998", 3),
        image_case("MNIST, n=1000", "strided CNN, small", 2, decay=True),
        image_case("MNIST, n=1000", "MLP", 2, early=True),
        *digits,
        *tables,
    )


def _second() -> tuple[Case, ...]:
    """Fashion-MNIST, CIFAR-10 and large regressions; networks of the most work come first."""
    flips = "shifts and flips"
    large = Recipe(steps=8000, step_size=1e-3, batch_size=200)
    return (
        image_case("Fashion-MNIST, all", "CNN with batch norm", 1),
        image_case("Fashion-MNIST, all", "LeNet of 1998", 1, decay=True, augmented=flips),
        image_case("Fashion-MNIST, n=10000", "ResNet", 1, decay=True, augmented=flips),
        image_case("CIFAR-10, all", "ResNet", 0, augmented=flips),
        image_case("CIFAR-10, all", "strided CNN, large", 1, decay=True, augmented=flips),
        image_case("CIFAR-10, all", "CNN with batch norm", 1),
        image_case("CIFAR-10, all", "LeNet of 1998", 1, early=True),
        image_case("Fashion-MNIST, n=10000", "CNN with batch norm", 1),
        image_case("Fashion-MNIST, n=10000", "CNN with batch norm", 1, decay=True, early=True),
        image_case("Fashion-MNIST, n=10000", "LeNet of 1998", 1),
        image_case("Fashion-MNIST, n=10000", "LeNet of 1998", 1, decay=True, early=True),
        image_case("Fashion-MNIST, n=10000", "strided CNN, small", 1, augmented=flips),
        image_case("Fashion-MNIST, n=10000", "strided CNN", 1, decay=True),
        image_case("Fashion-MNIST, n=10000", "ViT", 1),
        image_case("Fashion-MNIST, n=10000", "MLP", 1, decay=True),
        image_case("Fashion-MNIST, n=1000", "LeNet of 1998", 3),
        image_case("Fashion-MNIST, n=1000", "CNN with batch norm", 1),
        image_case("Fashion-MNIST, n=1000", "MLP", 3, early=True),
        image_case("CIFAR-10, n=1000", "LeNet of 1998", 1),
        image_case("CIFAR-10, n=1000", "CNN with batch norm", 1, decay=True, early=True),
        *(Case(f"uci {name}", "MLP", large, 1, seeds=2) for name in uci.LARGE_SETS),
    )


HALVES = {
    "first": Suite(_first(), 1, FIRST, folder=True),
    "second": Suite(_second(), 1, SECOND, folder=True),
}
SUITES = {"small": Suite(_small(), 3), "full": Suite(_full(), 5), **HALVES}
