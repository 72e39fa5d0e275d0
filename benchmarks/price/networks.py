"""Networks of the price list, for grey images of 28 × 28 and for digits of 8 × 8; narrow ones for tests."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

__all__ = ["CNN", "LENET", "MLP", "SMALL", "build", "num_weights"]

CNN, LENET, SMALL, MLP = "CNN with batch norm", "LeNet", "small LeNet", "digits MLP"


def cnn(first: int = 8, second: int = 16, hidden: int = 32) -> nn.Module:
    """Two convolutions with batch norm and two linear layers: 26,874 weights."""
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(49 * second, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def lenet(first: int = 6, second: int = 16, third: int = 120, fourth: int = 84) -> nn.Module:
    """That of 1998, with 61,706 weights."""
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(25 * second, third), nn.ReLU(),
        nn.Linear(third, fourth), nn.ReLU(), nn.Linear(fourth, 10),
    )  # fmt: skip


def mlp(width: int = 30) -> nn.Module:
    """Two hidden layers: 3,190 weights."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


# Of each network that of the price list, and a narrow one.
_NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    CNN: (cnn, partial(cnn, 2, 3, 8)),
    LENET: (lenet, partial(lenet, 2, 3, 12, 8)),
    # 4,236 weights, and 256
    SMALL: (partial(lenet, 4, 8, 14, 20), partial(lenet, 1, 1, 5, 4)),
    MLP: (mlp, partial(mlp, 8)),
}


def build(name: str, seed: int, narrow: bool = False) -> nn.Module:
    """A network before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _NETWORKS[name][narrow]()


def num_weights(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
