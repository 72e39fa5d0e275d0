"""Tasks on real data from a folder that is not part of the project: images, and small and large regressions.

The folder has `images` (`benchmarks.data.image_sets`), `uci` and `uci-large` (`benchmarks.data.uci`). Nothing is read
before a task is loaded.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.data import uci
from benchmarks.data.image_sets import labelled_images, pixels, standardised
from benchmarks.data.tasks import Data, Part, Task, number_part, regression_data, uci_task, with_corruptions

# Training images: 1,000, 10,000 and all; `None` is all but those for validation.
SIZES: dict[str, tuple[int | None, ...]] = {
    "MNIST": (1000, 10_000, None),
    "Fashion-MNIST": (1000, 10_000, None),
    "CIFAR-10": (1000, None),
}
OTHERS = {
    "MNIST": ("Fashion-MNIST", "letters", "CIFAR-10"),
    "Fashion-MNIST": ("MNIST", "letters", "CIFAR-10"),
    "CIFAR-10": ("Fashion-MNIST", "letters"),
}
# At most so many images for validation, test, corruptions, and of each set of other things.
VALIDATION, TEST, CORRUPTED, OTHER = 2000, 2000, 500, 500


def image_task(folder: Path, name: str, num: int | None) -> Task:
    """A set of images of ten classes.

    Validation data are the last images of the training part: a fifth of the number of training images, at most 2,000.
    Training data are so many of the others, by the seed, or all of them. Test data are the first 2,000 test images (all
    1,000 of the part of CIFAR-10), and the first 500 of them are corrupted. Other things are 500 images of each of
    two or three other sets, in the size, the channels and the statistics of this one.
    """

    def load(seed: int) -> Data:
        train, test = labelled_images(folder, name)
        held_out = min(VALIDATION, (len(train.y) if num is None else num) // 5)
        rest = len(train.y) - held_out
        order = torch.randperm(rest, generator=torch.Generator().manual_seed(seed))[:num]
        validation = Part(train.x[rest:], train.y[rest:])
        data = Data(Part(train.x[order], train.y[order]), validation, Part(test.x[:TEST], test.y[:TEST]))
        others = {other: standardised(pixels(folder, other, OTHER), name) for other in OTHERS[name]}
        return replace(with_corruptions(data, seed, CORRUPTED), others=others)

    return Task("classification", 10, load)


def gap_task(folder: Path) -> Task:
    """A small UCI set without the middle third of an input; the seed is the input, and that third is the shift."""

    def load(seed: int) -> Data:
        split, x, y = uci.load_gap(folder, seed)
        return regression_data(split, seed, gap=number_part(x, y))

    return Task("regression", 1, load)


def large_task(folder: Path) -> Task:
    """A large UCI set; the seed is the split, and at most 2,000 data are for validation."""
    return Task("regression", 1, lambda seed: regression_data(uci.load_large(folder, seed), seed, VALIDATION))


def folder_tasks(folder: Path) -> dict[str, Task]:
    """All tasks, by name."""
    images = {
        f"{name}, {'all' if num is None else f'n={num}'}": image_task(folder / "images", name, num)
        for name, sizes in SIZES.items()
        for num in sizes
    }
    kinds: tuple[tuple[str, str, tuple[str, ...], Callable[[Path], Task]], ...] = (
        ("uci {}", "uci", uci.SETS, uci_task),
        ("uci {}, gap", "uci", uci.SETS, gap_task),
        ("uci {}", "uci-large", uci.LARGE_SETS, large_task),
    )
    tables = {text.format(name): task(folder / sub / name) for text, sub, names, task in kinds for name in names}
    return images | tables
