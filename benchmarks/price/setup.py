"""What all parts share: data, sizes, trained networks; and the rows that they return."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.data.tasks import Part
from benchmarks.price import images
from benchmarks.price.training import EPOCHS, trained

__all__ = ["Cells", "Row", "Setup", "at_most"]

FEWEST = 60


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        what: was measured.
        bound: in words; empty for what is worth knowing.
        figure: in words.
        holds: whether the bound does; `None` without a bound or a figure.
        values: the numbers behind the figure.
    """

    what: str
    bound: str
    figure: str
    holds: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)


Cells = Mapping[str, Callable[[], list[Row]]]


def at_most(
    what: str, value: float, bound: float, digits: int = 2, beside: str = "", values: Mapping[str, Any] | None = None
) -> Row:
    """A row whose value has an upper bound; `beside` stands behind the figure."""
    figure = f"{value:.{digits}f}{f' ({beside})' if beside else ''}"
    return Row(
        what, f"≤ {bound:.{digits}f}", figure, value <= bound, {"value": value, "bound": bound, **(values or {})}
    )


@dataclass(frozen=True, eq=False)
class Setup:
    """Data and sizes.

    Attributes:
        folder: of images; without one they are made up.
        cache: a folder for trained networks.
        scale: share of the numbers of data, of which `FEWEST` stay.
        narrow: whether networks are narrow, for tests.
        seed: of networks and posteriors.
        repeats: of what takes little time.
        patience: a fit is stopped when it has taken so many times its bound.
    """

    folder: Path | None
    cache: Path
    scale: float = 1.0
    narrow: bool = False
    seed: int = 0
    repeats: int = 3
    patience: float = 2.0

    @property
    def name(self) -> str:
        """Of all that changes a result."""
        data = "made up" if self.folder is None else "fashion-mnist"
        return f"{data}, scale {self.scale:g}, seed {self.seed}{', narrow' if self.narrow else ''}"

    @cached_property
    def images(self) -> images.Images:
        return (
            images.made_up(self.num(60_000), self.num(images.TEST)) if self.folder is None else images.read(self.folder)
        )

    def num(self, full: int) -> int:
        """A number of data at this scale."""
        return max(FEWEST, round(self.scale * full))

    def train(self, full: int) -> Part:
        return self._first(self.images.train, full)

    @property
    def validation(self) -> Part:
        return self._first(self.images.validation, images.VALIDATION)

    @property
    def test(self) -> Part:
        return self._first(self.images.test, images.TEST)

    @property
    def other(self) -> Tensor:
        return self.images.other[: self.num(images.OTHER)]

    def _first(self, part: Part, full: int) -> Part:
        return Part(part.x[: self.num(full)], part.y[: self.num(full)])

    def network(self, name: str, full: int, epochs: int = EPOCHS) -> nn.Module:
        """Trained on so many images."""
        settings = {"cache": self.cache, "epochs": epochs, "narrow": self.narrow}
        return trained(name, self.images.name, self.train(full), self.seed, **settings)
