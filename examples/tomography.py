"""Tomography with a deep image prior, and a standard deviation for each pixel.

    python examples/tomography.py --angles 20 --picture tomography.png

The measurements are a parallel-beam Radon transform of a letter of 28 × 28 pixels, with 5 % noise. A small U-Net with a
fixed random input is trained until its output explains the measurements (Ulyanov et al., 2018). Then its tangent model
is fitted to the same measurements (Antorán et al., 2022, "Bayesian experimental design with the linearised deep image
prior"), which gives each pixel a standard deviation. The script prints how many pixels lie in their 90 % intervals, and
what conjugate gradients in observation space cost with and without a preconditioner.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.ndimage import rotate
from scipy.stats import norm
from torch import Tensor, nn

from laplace_sampling import Gaussian, LinearisedLaplace
from laplace_sampling.gp.dual import DualCG
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.linear_model import tangent_model_of

SIDE = 28


def letter(text: str, seed: int) -> Tensor:
    """Grey levels `[28, 28]` of a letter on a disc, from one of matplotlib's fonts."""
    figure = Figure(figsize=(1, 1), dpi=4 * SIDE)
    canvas = FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, text, ha="center", va="center_baseline", fontsize=44, rotation=10 * (seed % 5 - 2))
    canvas.draw()
    ink = 1 - np.asarray(canvas.buffer_rgba())[:, :, 0] / 255
    shade = torch.as_tensor(ink.reshape(SIDE, 4, SIDE, 4).mean((1, 3)), dtype=torch.float32)
    grid = torch.linspace(-1, 1, SIDE)
    disc = ((grid[:, None] ** 2 + grid**2) < 0.8).float()
    return 0.3 * disc + 0.7 * shade * disc


def radon(num_angles: int) -> Tensor:
    """The transform as a matrix `[angles · 28, 784]`: sums along the columns of the rotated image."""
    pixels = np.eye(SIDE**2).reshape(-1, SIDE, SIDE)
    angles = np.linspace(0, 180, num_angles, endpoint=False)
    sums = [rotate(pixels, angle, axes=(1, 2), reshape=False, order=1).sum(1).T for angle in angles]
    return torch.as_tensor(np.concatenate(sums), dtype=torch.float32)


class UNet(nn.Module):
    """Two scales, and two skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(4, after), nn.LeakyReLU(0.2)
            )

        self.first, self.down, self.bottom = block(8, width), block(width, 2 * width, 2), block(2 * width, 2 * width)
        self.up, self.last = block(3 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        fine = self.first(z)
        coarse = nn.functional.interpolate(self.bottom(self.down(fine)), scale_factor=2.0, mode="bilinear")
        return self.last(self.up(torch.cat([fine, coarse], dim=1))).flatten(1)


def train(T: Tensor, y: Tensor, z: Tensor, steps: int, smoothness: float) -> nn.Module:
    """The network trained on the squared error of the measurements and some total variation."""
    net = UNet()
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        image = net(z)
        square = image.reshape(SIDE, SIDE)
        variation = square.diff(dim=0).abs().sum() + square.diff(dim=1).abs().sum()
        (((image @ T.T - y) ** 2).sum() + smoothness * variation).backward()
        optimiser.step()
        schedule.step()
    return net.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letter", default="R")
    parser.add_argument("--angles", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.05, help="relative to the root mean square of the sinogram")
    parser.add_argument("--steps", type=int, default=3000, help="of training")
    parser.add_argument("--smoothness", type=float, default=3.0, help="factor of the total variation in training")
    parser.add_argument("--rank", type=int, default=400, help="of the preconditioner")
    parser.add_argument("--prior", default="g-prior")
    parser.add_argument("--learn-noise", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)

    truth, T = letter(options.letter, options.seed).flatten(), radon(options.angles)
    clean = T @ truth
    sigma = options.noise * float(clean.square().mean().sqrt())
    y = (clean + sigma * torch.randn(len(clean)))[None]
    z = torch.randn(1, 8, SIDE, SIDE)
    net = train(T, y, z, options.steps, options.smoothness * 2 * sigma**2)
    print(f"{len(clean)} measurements of {len(truth)} pixels, {sum(p.numel() for p in net.parameters())} weights")
    print(f"relative misfit {float((net(z) @ T.T - y).detach().norm() / y.norm()):.3f}")

    likelihood = Gaussian(1 / sigma**2, learn=options.learn_noise, observe=T)
    la = LinearisedLaplace(net, likelihood, prior=options.prior, num_samples=256)
    la.fit_hyperparameters([(z, y)], progress=False)
    print(la)
    prediction = la.predict(z)
    image, deviation = prediction.mean[0], prediction.stddev[0]
    error = image - truth
    print(f"PSNR {10 * math.log10(float(truth.max() ** 2 / error.square().mean())):.1f} dB")
    disc = truth > 0
    for level in (0.5, 0.9):
        inside = error.abs() <= norm.ppf(0.5 + level / 2) * deviation
        print(
            f"{level:.0%} intervals hold {inside.float().mean():.0%} of the pixels, "
            f"{inside[disc].float().mean():.0%} of the disc"
        )
    ranks = torch.stack([error.abs(), deviation]).argsort(1).argsort(1).double()
    print(f"correlation of the ranks of error and standard deviation {float(torch.corrcoef(ranks)[0, 1]):.2f}")

    count_products(la, options, T, z, y)
    if options.picture:
        draw(options.picture, truth, image, deviation, error)


def count_products(la: LinearisedLaplace, options: argparse.Namespace, T: Tensor, z: Tensor, y: Tensor) -> None:
    """Products of conjugate gradients for eight samples in observation space, with and without a preconditioner."""
    model = tangent_model_of(la.network, la.settings.likelihood, [(z, y)], kind="affine", observation=T).model
    ggn, draws = model.ggn(model.network_outputs), Draws(8, 0)
    noise = draws.noise(model.features.num_outputs)
    prior = replace(la.settings.prior, precision=float(la.prior_precision_))
    prior = prior.build(ggn, la.network.layers(), noise)
    for rank in (options.rank, 0):
        samples = DualCG(tolerance=1e-3, rank=rank).sample(ggn, prior, draws)
        print(f"rank {rank}: {samples.passes:.0f} products for {len(samples.value)} samples, to 1e-3")


def draw(path: Path, truth: Tensor, image: Tensor, deviation: Tensor, error: Tensor) -> None:
    panels = {
        "truth": truth,
        "reconstruction": image,
        "absolute error": error.abs(),
        "standard deviation": deviation,
    }
    grey, colour = {"vmin": 0, "vmax": 1, "cmap": "gray"}, {"vmin": 0, "vmax": float(error.abs().max())}
    _, axes = plt.subplots(1, 4, figsize=(12, 3.2), dpi=100, layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        limits = grey if title in ("truth", "reconstruction") else colour
        plt.colorbar(axis.imshow(values.reshape(SIDE, SIDE).numpy(), **limits), ax=axis, shrink=0.8)
        axis.set_title(title)
        axis.axis("off")
    plt.savefig(path)
    plt.close()


if __name__ == "__main__":
    main()
