"""The cases of the comparison: a task, a network and a training recipe each, in two halves of real data.

Choices in the library were made on the first half; the second half was run once at the end. `quick` shows in a minute
that everything runs, without data from a folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.comparison.strange import PEERS
from benchmarks.comparison.training import Recipe
from benchmarks.data import uci


@dataclass(frozen=True)
class Case:
    """A network on a task, and how it is trained; methods of a `tier` up to its own run on it."""

    task: str
    network: str
    recipe: Recipe
    tier: int
    seeds: int = 1

    @property
    def name(self) -> str:
        return f"{self.task} / {self.network} / {self.recipe.name}"


@dataclass(frozen=True)
class Suite:
    """Cases, and the methods that run on them with their tiers; on the first few test `images` only, if it says so."""

    cases: tuple[Case, ...]
    tiers: Mapping[str, int]
    images: int | None = None


# 0 runs on all networks, 1 where methods are compared, 2 where settings of this library are, 3 on small networks only.
BOTH = {
    **dict.fromkeys(
        (
            "MAP", "temperature scaling", "temperature by test oracle", "ours", "ours, validation",
            "ours, last layer", "ours, last layer, validation", "ours, KFAC", "ours, novelty",
            "ours, novelty, validation", "laplace-torch, last layer, KFAC",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "laplace-torch, last layer", "laplace-torch, last layer, validation",
            "laplace-torch, last layer, KFAC, validation", "GAPA", "projected features",
            "projected features, validation", "MC dropout", "SNGP", "ensemble of 5",
            "ensemble of 5, a fifth of the steps",
        ),
        1,
    ),
    **dict.fromkeys(PEERS, 1),  # scores of other data alone
    **dict.fromkeys(
        (
            "laplace-torch, KFAC", "laplace-torch, KFAC, validation", "laplace-torch, diagonal",
            "laplace-torch, diagonal, validation",
        ),
        3,
    ),
}  # fmt: skip
OWN = ("ours, evidence", "ours, self-consistency", "ours, g-prior", "ours, layerwise")
FIRST = {**BOTH, **dict.fromkeys(("GP, RBF", "deep kernel"), 1), **dict.fromkeys(OWN, 2)}
SECOND = {**BOTH, "GP, inducing points": 1}
BUDGET = {
    **dict.fromkeys(
        (
            "MAP", "ours", "ours, validation", "ours, 20 epochs", "ours, 20 epochs, validation", "ours, last layer",
            "ours, last layer, validation", "ours, KFAC", "ours, KFAC, validation",
        ),
        0,
    )
}  # fmt: skip
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


def _quick() -> tuple[Case, ...]:
    recipe = Recipe(steps=100)
    return Case("digits, n=150", "LeNet", recipe, 3), Case("gap", "tanh MLP", recipe, 3)


SUITES = {
    "first": Suite(_first(), FIRST),
    "second": Suite(_second(), SECOND),
    # What settings of this library cost and give, on the networks of the second half; the smallest first.
    "budget": Suite(_second()[::-1], BUDGET, images=800),
    "quick": Suite(_quick(), FIRST | SECOND),
}
