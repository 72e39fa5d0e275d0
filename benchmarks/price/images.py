"""Images of the price list: Fashion-MNIST with MNIST as other data from a folder, or such that are made up."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.data.image_sets import labelled_images, pixels, standardised
from benchmarks.data.tasks import Part

__all__ = ["Images", "made_up", "read"]

# Test images that are scored; validation images come from the other end of the test set.
TEST, VALIDATION, OTHER = 2000, 2000, 1000


@dataclass(frozen=True, eq=False)
class Images:
    """Images `[N, 1, 28, 28]` and labels.

    Attributes:
        name: of the data, for names of files.
        train: of which parts take the first so many.
        validation: that no network was trained on.
        test: likewise; scores are of these.
        other: images of other things.
    """

    name: str
    train: Part
    validation: Part
    test: Part
    other: Tensor


def read(folder: Path) -> Images:
    """From `fashion-mnist.npz` and `mnist.npz`."""
    train, test = labelled_images(folder, "Fashion-MNIST")
    other = standardised(pixels(folder, "MNIST", OTHER), "Fashion-MNIST")
    validation = Part(test.x[-VALIDATION:], test.y[-VALIDATION:])
    return Images("fashion-mnist", train, validation, Part(test.x[:TEST], test.y[:TEST]), other)


def made_up(num: int, test: int, seed: int = 0) -> Images:
    """Ten smooth patterns with noise, a tenth of the labels wrong; `test` images in each part but that for training."""
    generator = torch.Generator().manual_seed(seed)

    def patterns() -> Tensor:
        return F.interpolate(torch.randn(10, 1, 5, 5, generator=generator), size=(28, 28), mode="bilinear")

    def part(shapes: Tensor, num: int = test) -> Part:
        y = torch.randint(10, (num,), generator=generator)
        wrong = torch.rand(num, generator=generator) < 0.1
        x = shapes[y] + 0.5 * torch.randn(num, 1, 28, 28, generator=generator)
        return Part(x, torch.where(wrong, torch.randint(10, (num,), generator=generator), y))

    shapes, others = patterns(), patterns()
    return Images("made up", part(shapes, num), part(shapes), part(shapes), part(others).x)
