"""Networks of the comparison, each built from the shape of an input and a number of outputs.

Where `dropout` is positive, dropout layers stand in the usual places.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.comparison.spectral import spectral

SPECTRAL = ", spectral"


def mlp(
    shape: torch.Size, outputs: int, dropout: float, width: int = 50, depth: int = 2, activation: type = nn.ReLU
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for size in [shape.numel(), *[width] * (depth - 1)]:
        layers += [nn.Linear(size, width), activation(), *_dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def tanh_mlp(shape: torch.Size, outputs: int, dropout: float) -> nn.Module:
    return mlp(shape, outputs, dropout, activation=nn.Tanh)


def lenet(
    shape: torch.Size, outputs: int, dropout: float, *, norm: bool = False, channels: tuple[int, int, int] = (8, 16, 32)
) -> nn.Module:
    """Two convolutions and two linear layers; an average pool after each convolution."""
    first, second, hidden = channels
    side = shape[-1] // 4

    def block(inside: int, outside: int) -> list[nn.Module]:
        normalise = [nn.BatchNorm2d(outside)] if norm else []
        return [nn.Conv2d(inside, outside, 3, padding=1), *normalise, nn.ReLU(), nn.AvgPool2d(2), *_dropout(dropout)]

    return nn.Sequential(
        *block(shape[0], first), *block(first, second), nn.Flatten(),
        nn.Linear(second * side**2, hidden), nn.ReLU(), *_dropout(dropout), nn.Linear(hidden, outputs),
    )  # fmt: skip


def lenet_norm(shape: torch.Size, outputs: int, dropout: float) -> nn.Module:
    return lenet(shape, outputs, dropout, norm=True)


def lenet_1998(shape: torch.Size, outputs: int, dropout: float) -> nn.Module:
    """LeNet-5 with ReLU and max pools: 61,706 weights for grey images of 28 × 28."""
    side = (shape[-1] // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), *_dropout(dropout),
        nn.Flatten(), nn.Linear(16 * side**2, 120), nn.ReLU(), *_dropout(dropout),
        nn.Linear(120, 84), nn.ReLU(), *_dropout(dropout), nn.Linear(84, outputs),
    )  # fmt: skip


def pooled_cnn(shape: torch.Size, outputs: int, dropout: float) -> nn.Module:
    """Two convolutions with batch norm and two linear layers: 26,874 weights for grey images of 28 × 28."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), *_dropout(dropout),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), *_dropout(dropout),
        nn.Flatten(), nn.Linear(16 * (shape[-1] // 4) ** 2, 32), nn.ReLU(), *_dropout(dropout), nn.Linear(32, outputs),
    )  # fmt: skip


def strided_cnn(
    shape: torch.Size, outputs: int, dropout: float, channels: tuple[int, int, int] = (16, 32, 32)
) -> nn.Module:
    """Three strided convolutions with batch norm, without weights of its own, and a mean over positions.

    14,634, 29,226 and 45,874 weights in three sizes for grey images, those of Antorán (2024, appendix A).
    """
    layers: list[nn.Module] = []
    for inside, outside, size in zip((shape[0], *channels), channels, (5, 3, 3), strict=False):
        convolution = nn.Conv2d(inside, outside, size, stride=2, padding=size // 2)
        layers += [convolution, nn.ReLU(), nn.BatchNorm2d(outside, affine=False), *_dropout(dropout)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], outputs))


class Residual(nn.Module):
    """`x + g(x)`, with batch norm before each convolution."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels), nn.ReLU(), *_dropout(dropout),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


def resnet(shape: torch.Size, outputs: int, dropout: float, width: int = 8) -> nn.Module:
    """Two residual blocks, the second of twice the width on half the resolution."""
    return nn.Sequential(
        nn.Conv2d(shape[0], width, 3, padding=1), Residual(width, dropout),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), Residual(2 * width, dropout),
        nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, outputs),
    )  # fmt: skip


class ViT(nn.Module):
    """A vision transformer: 4 × 4 patches, two layers of two heads, the mean over patches."""

    def __init__(self, shape: torch.Size, outputs: int, dropout: float, width: int = 16) -> None:
        super().__init__()
        size = shape[-1] // 4
        self.embed = nn.Conv2d(shape[0], width, size, stride=size)
        self.position = nn.Parameter(torch.randn(16, width) / math.sqrt(width))
        self.layers = nn.Sequential(*(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(2)
        ))  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).mT + self.position
        return self.head(self.norm(self.layers(patches)).mean(1))


def _dropout(rate: float) -> list[nn.Module]:
    return [nn.Dropout(rate)] if rate else []


NETWORKS: dict[str, Callable[[torch.Size, int, float], nn.Module]] = {
    "MLP": mlp,
    "tanh MLP": tanh_mlp,
    "LeNet": lenet,
    "LeNet with batch norm": lenet_norm,
    "LeNet of 1998": lenet_1998,
    "CNN with batch norm": pooled_cnn,
    "strided CNN, small": strided_cnn,
    "strided CNN": partial(strided_cnn, channels=(32, 32, 64)),
    "strided CNN, large": partial(strided_cnn, channels=(42, 48, 60)),
    "ResNet": resnet,
    "ViT": ViT,
}


def build(name: str, shape: torch.Size, outputs: int, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """A network before training; its initial weights depend on the seed only.

    With `SPECTRAL` behind its name it has spectral norms, and a Gaussian process in the place of its last layer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = NETWORKS[name.removesuffix(SPECTRAL)](shape, outputs, dropout)
        return spectral(network) if name.endswith(SPECTRAL) else network
