"""Networks without normalisation layers for glyphs, of about 30,000 and 15,000 weights, and their training."""

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_sampling.__main__ import Data

__all__ = ["accuracy", "lenet", "small_cnn", "train"]


def lenet(classes: int = 62, side: int = 20) -> nn.Sequential:
    """Two convolutions and two linear layers, about 30,000 weights for 62 classes and 20×20 images."""
    last_side = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(1, 12, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(12, 24, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24 * last_side**2, 140), nn.ReLU(), nn.Linear(140, classes),
    )  # fmt: skip


def small_cnn(classes: int = 62, side: int = 20) -> nn.Sequential:
    """Three convolutions and a linear layer, about 15,000 weights for 62 classes and 20×20 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24 * (side // 8) ** 2, classes),
    )  # fmt: skip


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        right = sum(int((model(a).argmax(-1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return right / len(y)


def train(make: Callable[[], nn.Module], data: Data, epochs: int = 5, batch_size: int = 100) -> nn.Module:
    """A network trained by Adam from a fixed seed, on the device of the data; prints size, test accuracy and time.

    Unlike in the demo's training, the step size rises and falls, which suits a few epochs on many data.
    """
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().to(data.x.device)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = epochs * math.ceil(len(data.y) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.y), generator=generator).split(batch_size):
            optimiser.zero_grad()
            F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimiser.step()
            schedule.step()
    model.eval()
    num_weights = sum(p.numel() for p in model.parameters())
    score, seconds = accuracy(model, data.x_test, data.y_test), time.perf_counter() - start
    print(f"{num_weights} weights, {epochs} epochs: test accuracy {score:.1%}, {seconds:.0f} s", flush=True)
    return model
