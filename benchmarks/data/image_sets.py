"""Sets of real images from a folder: MNIST, Fashion-MNIST, a part of CIFAR-10, and letters (notMNIST).

They are standardised by the mean and standard deviation of the training pixels, for each channel; images that belong to
no class of a set are standardised as that set is.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.data.tasks import Data, Part


@dataclass(frozen=True)
class ImageSet:
    """Where the images of a set are, and the statistics of their training pixels in `[0, 1]`."""

    file: str
    mean: tuple[float, ...]
    scale: tuple[float, ...]


IMAGE_SETS = {
    "MNIST": ImageSet("mnist.npz", (0.1307,), (0.3081,)),
    "Fashion-MNIST": ImageSet("fashion-mnist.npz", (0.2860,), (0.3530,)),
    "CIFAR-10": ImageSet("cifar-10-part.npz", (0.493, 0.483, 0.447), (0.247, 0.243, 0.262)),
}
# 10,000 images of letters, without a training part.
_LETTERS = "not-mnist/t10k-images-idx3-ubyte.gz"
# Bytes before the pixels of a file in IDX format with three axes.
_IDX_HEADER = 16


def labelled_images(folder: Path, name: str) -> tuple[Part, Part]:
    """Training and test images `[N, C, H, W]` of a set, standardised, with their labels."""
    with np.load(folder / IMAGE_SETS[name].file) as data:
        labels = [torch.tensor(data[f"y_{part}"]).long().flatten() for part in ("train", "test")]
        images = [_channels_first(data[f"x_{part}"]) for part in ("train", "test")]
    train, test = (Part(standardised(x, name), y) for x, y in zip(images, labels, strict=True))
    return train, test


def pixels(folder: Path, name: str, num: int | None = None) -> Tensor:
    """Test images of a set, or `"letters"`, `[N, C, H, W]` in `[0, 1]`."""
    if name == "letters":
        with gzip.open(folder / _LETTERS) as file:
            flat = np.frombuffer(file.read(), np.uint8, offset=_IDX_HEADER)
        return _channels_first(flat.reshape(-1, 28, 28)[:num])
    with np.load(folder / IMAGE_SETS[name].file) as data:
        return _channels_first(data["x_test"][:num])


def standardised(images: Tensor, name: str) -> Tensor:
    """Images in `[0, 1]` as those of a set: of its size, with as many channels, and by its statistics."""
    of = IMAGE_SETS[name]
    mean, scale = (torch.tensor(values)[:, None, None] for values in (of.mean, of.scale))
    side = 32 if len(of.mean) == 3 else 28
    if images.shape[-1] != side:
        images = F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)
    if images.shape[1] > len(of.mean):
        images = images.mean(1, keepdim=True)
    return (images - mean) / scale


def _channels_first(images: np.ndarray) -> Tensor:
    x = torch.tensor(images).float() / 255
    return x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()


def made_up(num: int, test: int, seed: int = 0) -> Data:
    """Ten smooth grey patterns with noise, a tenth of the labels wrong; `test` images in each part but the first."""
    generator = torch.Generator().manual_seed(seed)

    def patterns() -> Tensor:
        return F.interpolate(torch.randn(10, 1, 5, 5, generator=generator), size=(28, 28), mode="bilinear")

    def part(shapes: Tensor, num: int = test) -> Part:
        y = torch.randint(10, (num,), generator=generator)
        wrong = torch.rand(num, generator=generator) < 0.1
        x = shapes[y] + 0.5 * torch.randn(num, 1, 28, 28, generator=generator)
        return Part(x, torch.where(wrong, torch.randint(10, (num,), generator=generator), y))

    shapes, others = patterns(), patterns()
    return Data(part(shapes, num), part(shapes), part(shapes), others={"made up": part(others).x})
