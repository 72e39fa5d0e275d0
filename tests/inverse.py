"""Small inverse problems: sums of images along lines, and a network that gives an image."""

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn


def radon(side: int, num_angles: int) -> scipy.sparse.csr_matrix:
    """Sums along lines: each pixel is shared by the two detector cells beside its centre; corners are cut off."""
    axis, pixels = np.arange(side) - (side - 1) / 2, np.arange(side**2)
    parts = []
    for number, angle in enumerate(np.linspace(0, np.pi, num_angles, endpoint=False)):
        place = (axis * np.cos(angle) + axis[:, None] * np.sin(angle)).flatten() + (side - 1) / 2
        for cell in (np.floor(place), np.floor(place) + 1):
            weight = np.where((cell >= 0) & (cell < side), 1 - np.abs(place - cell), 0)
            parts.append((weight, (number * side + cell.clip(0, side - 1), pixels)))
    values, rows, columns = (np.concatenate(p) for p in zip(*((w, *place) for w, place in parts), strict=True))
    return scipy.sparse.csr_matrix((values, (rows.astype(int), columns)), shape=(num_angles * side, side**2))


class Picture(nn.Module):
    """A convolutional network whose output is an image."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        layers = [nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(8, channels, 3, padding=1))

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)


def picture(side: int, channels: int = 1) -> tuple[Picture, Tensor]:
    """A random network and its input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, z = Picture(channels).double().eval(), torch.randn(1, 2, side, side).double()
    return model, z


def noisy(values: Tensor, noise: float = 0.1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return values + noise * torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)
