"""Data of the benchmark: generated, or bundled with scikit-learn and matplotlib.

A seed gives a split, the noise, and everything else that is random in a task.
"""

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.data import glyphs, uci
from benchmarks.data.shifts import SEVERITIES, corrupt


@dataclass(frozen=True)
class Part:
    """Inputs `[N, ...]` and targets: labels `[N]`, numbers `[N, 1]`, or zeros and ones `[N, H, W]`."""

    x: Tensor
    y: Tensor

    def loader(self, batch_size: int = 100) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size)


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a task and a seed.

    Attributes:
        train: data for training networks and for fitting error bars.
        validation: seen by methods that say so, and by early stopping.
        test: data of the same distribution.
        shifts: test data of other distributions.
        others: inputs of other things, which belong to no class.
    """

    train: Part
    validation: Part
    test: Part
    shifts: dict[str, Part] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    def to_images(self, num: int) -> "Data":
        """The first test images alone, and a quarter as many of each kind of shifted and of other ones."""
        few = num // 4
        shifts = {name: Part(part.x[:few], part.y[:few]) for name, part in self.shifts.items()}
        others = {name: x[:few] for name, x in self.others.items()}
        return replace(self, test=Part(self.test.x[:num], self.test.y[:num]), shifts=shifts, others=others)


def data_of(parts: Iterable[Part], **others: Any) -> Data:
    train, validation, test = parts
    return Data(train, validation, test, **others)


@dataclass(frozen=True)
class Task:
    """A likelihood as `LinearisedLaplace` names it, outputs of a network, and data from a seed."""

    likelihood: str
    outputs: int
    load: Callable[[int], Data]


def split(x: Tensor, y: Tensor, train: int, validation: int, seed: int, test: int | None = None) -> Data:
    """Splits in an order given by the seed; standardises inputs on the training data, images by one mean and scale."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    ends = train, train + validation, None if test is None else train + validation + test
    parts = [order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] : ends[2]]]
    first = x[parts[0]]
    axes = 0 if x.dim() == 2 else None
    mean, scale = (first.mean(), first.std()) if axes is None else (first.mean(axes), first.std(axes).clamp_min(1e-6))
    return data_of(Part((x[i] - mean) / scale, y[i]) for i in parts)


def with_corruptions(data: Data, seed: int, num: int | None = None) -> Data:
    """With the first so many test data in five severities."""
    x, y = data.test.x[:num], data.test.y[:num]
    shifts = {f"severity {s}": Part(corrupt(x, s, seed), y) for s in SEVERITIES}
    return replace(data, shifts=shifts)


def digits(train: int) -> Callable[[int], Data]:
    """Digits of 8×8 pixels; letters of matplotlib's fonts, as small, belong to no class."""

    def load(seed: int) -> Data:
        images, labels = datasets.load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
        data = split(x, torch.tensor(labels), train, 150, seed, test=400)
        letters = "".join(sorted(set(string.ascii_uppercase) - set("BDIOQSZ")))
        other = glyphs.images(letters, 200, 8, 0.0, torch.Generator().manual_seed(1000 + seed))
        return replace(with_corruptions(data, seed), others={"letters": (other - other.mean()) / other.std()})

    return load


def standardised_targets(data: Data) -> Data:
    mean, scale = data.train.y.mean(), data.train.y.std()

    def standard(part: Part) -> Part:
        return Part(part.x, (part.y - mean) / scale)

    shifts = {name: standard(part) for name, part in data.shifts.items()}
    return data_of(map(standard, (data.train, data.validation, data.test)), shifts=shifts)


def gap(seed: int) -> Data:
    """`sin 3x` with noise 0.15, on both sides of a gap; test data between are a shift."""
    generator = torch.Generator().manual_seed(seed)

    def part(*pieces: tuple[float, float, int]) -> Part:
        x = torch.cat([low + (high - low) * torch.rand(num, 1, generator=generator) for low, high, num in pieces])
        return Part(x, torch.sin(3 * x) + 0.15 * torch.randn(x.shape, generator=generator))

    sides = [part((-2, -0.7, num), (0.5, 2, num)) for num in (40, 20, 200)]
    return data_of(sides, shifts={"gap": part((-0.7, 0.5, 200))})


TASKS: dict[str, Task] = {
    **{f"digits, n={num}": Task("classification", 10, digits(num)) for num in (150, 220, 300)},
    "gap": Task("regression", 1, gap),
}


def regression_data(split: uci.Split, seed: int, most: int | None = None, **shifts: Part) -> Data:
    """A fifth of the training data, at most so many, is for validation; inputs and targets are standardised."""
    order = np.random.default_rng(seed).permutation(len(split.y))
    num = len(order) // 5
    held_out, rest = np.split(order, [num if most is None else min(num, most)])
    x, y = split.x[rest], split.y[rest]
    parts = [number_part(x, y), number_part(split.x[held_out], split.y[held_out])]
    parts.append(number_part(split.x_test, split.y_test))
    mean, scale = parts[0].x.mean(0), parts[0].x.std(0).clamp_min(1e-6)

    def standard(part: Part) -> Part:
        return Part((part.x - mean) / scale, part.y)

    shifted = {name: standard(part) for name, part in shifts.items()}
    return standardised_targets(data_of(map(standard, parts), shifts=shifted))


def number_part(x: np.ndarray, y: np.ndarray) -> Part:
    return Part(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None])


def uci_task(folder: Path) -> Task:
    """A small UCI set; the seed is the split."""
    return Task("regression", 1, lambda seed: regression_data(uci.load(folder, seed), seed))
