"""What all parts share: data from a folder or made up, sizes, and the form of a part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data.image_sets import labelled_images, pixels, standardised
from benchmarks.data.tasks import Data, Part, Task
from benchmarks.price.images import made_up

__all__ = ["Cells", "Rows", "Setup", "Study"]

BATCH = 100
# Images of other things, of which the detection of such is measured.
OTHER = 2000

Rows = Sequence[dict[str, Any]]
Cells = Mapping[str, Callable[[], Rows]]


@dataclass(frozen=True)
class Study:
    """A part of the page.

    Attributes:
        title: its heading.
        cells: what it computes, by name; each is stored when it is done.
        section: its Markdown from the rows of all cells, and a folder for figures, which it may draw.
    """

    title: str
    cells: Callable[["Setup"], Cells]
    section: Callable[[Rows, Path], str]


@dataclass(frozen=True, eq=False)
class Setup:
    """Data and sizes.

    Attributes:
        folder: with the subfolders `images` and `uci-large`; without one, data are made up.
        cache: a folder for trained networks.
        quick: few data and steps, and narrow networks, for tests.
        num: training images, where not those of the part.
        epochs: of training on images, where not those of the part.
        seeds: runs of every cell that depends on a seed, where not those of the part.
    """

    folder: Path | None
    cache: Path
    quick: bool = False
    num: int | None = None
    epochs: int | None = None
    seeds: int | None = None

    @property
    def name(self) -> str:
        """Of all that changes a result, but the seed."""
        changed = {"N": self.num, "epochs": self.epochs}
        sizes = "".join(f", {name} {value}" for name, value in changed.items() if value is not None)
        return f"{'made up' if self.folder is None else 'real'}{', quick' if self.quick else ''}{sizes}"

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def runs(self, full: int) -> range:
        """Seeds."""
        return range(self.seeds or self.size(full, 1))

    def images(self, name: str) -> tuple[Part, Part]:
        """Training and test images of a set."""
        if self.folder is None:
            made = made_up(200, 60)
            return made.train, made.test
        return labelled_images(self.folder / "images", name)

    def problem(self, name: str, architecture: str, seed: int, *, num: int, epochs: int, test: int) -> Problem:
        """A network on images of a set: the last tenth of the first `num` is for validation."""
        train, tests = self.images(name)
        num = min(self.num or num, len(train.y), self.size(num, 200))
        first, steps = num - num // 10, self.size(self.epochs or epochs, 1) * (num - num // 10) // BATCH
        data = Data(
            Part(train.x[:first], train.y[:first]),
            Part(train.x[first:num], train.y[first:num]),
            Part(tests.x[:test], tests.y[:test]),
            others=self._others(name),
        )
        task = Task("classification", 10, lambda seed: data)
        recipe = Recipe(steps=max(1, steps), batch_size=BATCH, step_size=1e-3)
        return Problem(task, data, architecture, recipe, seed, f"{name} {first} {self.name}", self.cache, links=False)

    def _others(self, name: str) -> dict[str, torch.Tensor]:
        if self.folder is None:
            return {"made up": made_up(200, 60).other}
        other = "MNIST" if name != "MNIST" else "Fashion-MNIST"
        return {other: standardised(pixels(self.folder / "images", other, OTHER), name)}
