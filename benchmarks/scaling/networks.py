"""Networks whose products are timed, and the sizes at which they are."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.price.networks import LENET, build

__all__ = ["CASES", "Case", "resnet18"]


@dataclass(frozen=True)
class Case:
    """A network and the products that are timed.

    Attributes:
        name: of the network.
        network: builds it; narrow for a quick run.
        shape: of an input.
        vectors: `K`.
        batch: data that go through the network together.
        alone: numbers of data whose products on one process the arithmetic is fitted to.
        held_out: data of each of two ranks in the product that is predicted; the last batch is not full.
    """

    name: str
    network: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    vectors: int
    batch: int
    alone: tuple[int, ...]
    held_out: int

    def quick(self) -> "Case":
        """The same with few data and vectors."""
        return Case(self.name, self.network, self.shape, 2, 4, (2, 4, 8), 10)


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.around = nn.Sequential()
        if stride != 1 or inside != outside:
            self.around = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.around(x))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 for images of 32 × 32 (He et al., 2015): a first convolution of 3 × 3, 11,173,962 weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for stage in range(4):
        outside = width * 2**stage
        layers += [Block(inside, outside, 1 if stage == 0 else 2), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def _resnet18(narrow: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resnet18(4 if narrow else 64)


# A product of a batch takes half a second (LeNet) and a few seconds (ResNet-18) on one core.
CASES = (
    Case("LeNet", partial(build, LENET, 0), (1, 28, 28), 16, 256, (64, 128, 256, 512), 868),
    Case("ResNet-18", _resnet18, (3, 32, 32), 4, 8, (2, 4, 8, 16), 22),
)
