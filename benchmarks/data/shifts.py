"""Corruptions of images in five severities: noise, blur, rotation and contrast."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

SEVERITIES = range(1, 6)


def noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    return x + 0.25 * severity * torch.randn(x.shape, generator=generator)


def blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Blurs by a Gaussian; its standard deviation grows by 3.5 % of the side of the image for each severity."""
    sigma = 0.035 * severity * x.shape[-1]
    size = 2 * math.ceil(3 * sigma) + 1
    padded = F.pad(x, [size // 2] * 4, mode="replicate")
    return gaussian_blur(padded, [size, size], [sigma, sigma])[..., size // 2 : -(size // 2), size // 2 : -(size // 2)]


def rotation(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Rotates by 12 degrees for each severity, to either side."""
    angle = math.radians(12 * severity) * (2 * torch.randint(2, (len(x),), generator=generator) - 1)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(len(x))
    maps = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def contrast(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Lowers the contrast of each image by 17 % for each severity."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (1 - 0.17 * severity) * (x - mean)


CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "noise": noise,
    "blur": blur,
    "rotation": rotation,
    "contrast": contrast,
}


def corrupt(x: Tensor, severity: int, seed: int = 0) -> Tensor:
    """Standardised images `[N, C, H, W]`: image `i` by corruption `i mod 4`, so that one set holds them all."""
    generator = torch.Generator().manual_seed(seed)
    changed = x.clone()
    for number, change in enumerate(CORRUPTIONS.values()):
        part = slice(number, None, len(CORRUPTIONS))
        changed[part] = change(x[part], severity, generator)
    return changed
