"""Deep image priors: a U-Net from a back-projection to an image, trained on the measurements of this image alone."""

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tomography.problems import Problem
from laplace_sampling.likelihoods.measurement import Measurement, as_measurement

# Of a sigmoid's input, as in the public code of Antorán et al. (2022).
_LARGEST = 15.0


def _convolution(before: int, after: int, stride: int, norm: bool, dropout: float) -> list[nn.Module]:
    parts = [nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(4, after), nn.Dropout2d(dropout)]
    return [part for part, there in zip(parts, (True, norm, dropout > 0), strict=True) if there] + [nn.LeakyReLU(0.2)]


class UNet(nn.Module):
    """`scales` resolutions of `width` channels, and 1 × 1 skips of four channels."""

    def __init__(self, channels: int, scales: int, width: int, norm: bool, sigmoid: bool, dropout: float = 0.0) -> None:
        super().__init__()

        def block(before: int, *strides: int) -> nn.Sequential:
            sizes = [before] + [width] * len(strides)
            layers = [_convolution(a, width, s, norm, dropout) for a, s in zip(sizes, strides, strict=False)]
            return nn.Sequential(*(part for layer in layers for part in layer))

        self.first, self.sigmoid = block(channels, 1), sigmoid
        self.down = nn.ModuleList(block(width, 2, 1) for _ in range(scales - 1))
        self.skips = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in range(scales - 1))
        self.up = nn.ModuleList(block(width + 4, 1, 1) for _ in range(scales - 1))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        x, seen = self.first(z), []
        for down in self.down:
            seen.append(x)
            x = down(x)
        for up, skip in zip(self.up, self.skips, strict=True):
            fine = seen.pop()
            x = F.interpolate(x, size=fine.shape[-2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([x, skip(fine)], 1))
        x = self.last(x)
        return x.clamp(-_LARGEST, _LARGEST).sigmoid() if self.sigmoid else x


class _Measured(torch.autograd.Function):
    """`T x` of a flat image by two sparse matrices, as torch has no derivative of their products with vectors."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.backward_ = backward
        return forward(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_(*gradients), None, None


def variation(image: Tensor) -> Tensor:
    """Anisotropic total variation of `[..., H, W]`, a sum."""
    return image.diff(dim=-1).abs().sum() + image.diff(dim=-2).abs().sum()


def objective(image: Tensor, T: Measurement, y: Tensor, smoothness: float) -> Tensor:
    """`mean (T g − y)² + smoothness · TV(g)` of an image `[1, 1, H, W]`."""
    error = _Measured.apply(image.flatten(1), T.apply, T.adjoint)[0] - y
    return error.square().mean() + smoothness * variation(image)


def trained(net: nn.Module, z: Tensor, problem: Problem, smoothness: float, steps: int, rate: float) -> nn.Module:
    """The network of the smallest loss in training by Adam, with gradients of a norm of at most one."""
    optimiser, y = torch.optim.Adam(net.parameters(), lr=rate), torch.as_tensor(problem.y)
    T, best, kept = as_measurement(problem.T, net(z).detach()), float("inf"), net.state_dict()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 0.1 * rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = objective(net.train()(z), T, y, smoothness)
        if (value := loss.item()) < best:
            best, kept = value, copy.deepcopy(net.state_dict())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    net.load_state_dict(kept)
    return net.eval()


def residuals(net: nn.Module, z: Tensor, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """`y − T g` of the measurements, and of those from other angles."""
    with torch.no_grad():
        image = net(z).flatten().numpy()
    return problem.y - problem.T @ image, problem.held_y - problem.held_T @ image
