"""A reconstruction from few angles, and a standard deviation for each of its pixels.

    python examples/tomography.py --picture tomography.png      # a drawn phantom, 64 × 64 pixels from 20 angles
    python examples/tomography.py --tooth DIR/ct/tooth.h5       # a real sinogram, 128 × 128 pixels

A U-Net that has seen no other image is trained until its output explains the measurements (a deep image prior; Ulyanov
et al., 2018). Its input is the filtered back-projection. The linearised Laplace approximation then tells how far the
weights, and with them each pixel, could move without the measurements noticing (Antorán et al., 2022; "Bayesian
experimental design with the linearised deep image prior"). The script prints how well that agrees with the true errors.
"""

import argparse
import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from scipy.ndimage import maximum_filter, minimum_filter
from scipy.sparse.linalg import lsqr
from scipy.stats import spearmanr
from torch import Tensor, nn

from laplace_sampling import Gaussian, LinearisedLaplace, RegressionPrediction, residual_precision


def projector(side: int, angles: np.ndarray, detectors: int, centre: float | None = None) -> Any:
    """Sums along parallel lines, `[angles · detectors, side²]`: a pixel is shared by the two bins beside its shadow."""
    offsets = np.arange(side) - (side - 1) / 2
    middle = (detectors - 1) / 2 if centre is None else centre
    place = np.cos(angles)[:, None, None] * offsets + np.sin(angles)[:, None, None] * offsets[:, None] + middle
    low = np.floor(place).astype(int)
    pixel = np.broadcast_to(np.arange(side**2).reshape(side, side), place.shape)
    row = np.arange(len(angles))[:, None, None] * detectors
    bins, weights = np.stack([low, low + 1]), np.stack([low + 1 - place, place - low])
    seen = (bins >= 0) & (bins < detectors) & (weights > 0)
    entries = weights[seen], ((row + bins)[seen], np.stack([pixel, pixel])[seen])
    return scipy.sparse.csr_matrix(entries, (len(angles) * detectors, side**2), dtype=np.float32)


@dataclass
class Measured:
    """Measurements `y = T x + noise` at some angles, and at others that the network is not trained on."""

    truth: np.ndarray  # [side, side], its maximum about 1
    T: Any
    y: np.ndarray
    num_angles: int
    T_held: Any
    y_held: np.ndarray
    noise: float | None  # standard deviation of the measurements, if known
    pixel_noise: float  # variance of the truth's own noise


def phantom(side: int, num_angles: int, noise: float, seed: int) -> Measured:
    """Ellipses of random grey levels inside a rim, and the sums along lines with Gaussian noise."""
    random, grid = np.random.default_rng(seed), np.linspace(-1, 1, 4 * side)
    image = np.zeros((4 * side, 4 * side))

    def ellipse(x: float, y: float, a: float, b: float, turn: float) -> np.ndarray:
        u, v = grid - x, grid[:, None] - y
        return ((math.cos(turn) * u + math.sin(turn) * v) / a) ** 2 + (
            (math.cos(turn) * v - math.sin(turn) * u) / b
        ) ** 2 <= 1

    image[ellipse(0, 0, 0.69, 0.92, 0)], image[ellipse(0, 0, 0.64, 0.86, 0)] = 1.0, 0.3
    for _ in range(8):
        x, y = random.uniform(-0.4, 0.4), random.uniform(-0.55, 0.55)
        image[ellipse(x, y, *random.uniform(0.05, 0.22, 2), random.uniform(0, np.pi))] = random.uniform(0.1, 0.9)
    truth = image.reshape(side, 4, side, 4).mean((1, 3)).astype(np.float32)
    both, detectors = np.arange(2 * num_angles) * np.pi / (2 * num_angles), math.ceil(side * math.sqrt(2))
    T, T_held = (projector(side, angles, detectors) for angles in (both[::2], both[1::2]))
    sigma = noise * float(np.abs(T @ truth.ravel()).mean())
    y, y_held = (
        (M @ truth.ravel() + sigma * random.standard_normal(M.shape[0])).astype(np.float32) for M in (T, T_held)
    )
    return Measured(truth, T, y, num_angles, T_held, y_held, sigma, 1e-6)


def tooth(file: Path, side: int, num_angles: int) -> Measured:
    """Slice 0 of a tooth, 181 angles over a half turn and 640 bins; all angles give the image that is called true."""
    import h5py

    with h5py.File(file) as data:
        parts: Any = data["exchange"]
        counts, white, dark = (np.asarray(parts[name][:, 0]) for name in ("data", "data_white", "data_dark"))
    sums = -np.log((counts - dark.mean(0)) / (white.mean(0) - dark.mean(0)))
    num, width = len(sums), sums.shape[1] // side
    sinogram, angles = sums.reshape(num, side, width).mean(2), np.arange(num) * np.pi / num
    # The axis of rotation falls on bin 295.5, where the last projection is the mirror image of the first.
    T = projector(side, angles, side, centre=(295.5 - (width - 1) / 2) / width)
    rows = np.arange(num * side).reshape(num, side)

    def solved(which: np.ndarray) -> np.ndarray:
        return lsqr(T[rows[which].ravel()], sinogram[which].ravel(), iter_lim=30)[0].reshape(side, side)

    truth, halves = solved(np.arange(num)), [solved(np.arange(start, num, 2)) for start in (0, 1)]
    unit = float(truth.max())
    pixel_noise = float(np.mean((halves[0] - halves[1]) ** 2)) / (4 * unit**2)
    few = np.round(np.arange(num_angles) * num / num_angles).astype(int)
    others, y = np.setdiff1d(np.arange(num), few), (sinogram / unit).astype(np.float32)
    taken = T[rows[few].ravel()], y[few].ravel(), num_angles, T[rows[others].ravel()], y[others].ravel()
    return Measured((truth / unit).astype(np.float32), *taken, noise=None, pixel_noise=pixel_noise)


def back_projection(data: Measured) -> Tensor:
    """Filtered back-projection, `[1, 1, side, side]`."""
    sums = data.y.reshape(data.num_angles, -1)
    n, side = 2 * sums.shape[1], len(data.truth)
    filtered = np.fft.irfft(np.fft.rfft(sums, n) * np.fft.rfftfreq(n), n)[:, : sums.shape[1]]
    image = np.pi / data.num_angles * (data.T.T @ filtered.ravel())
    return torch.as_tensor(image, dtype=torch.float32).reshape(1, 1, side, side)


class UNet(nn.Module):
    """Three scales with skips. A sigmoid at the end says that a background of exactly zero is certain."""

    def __init__(self, width: int = 16, sigmoid: bool = True) -> None:
        super().__init__()

        def block(before: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, width, 3, stride, padding=1), nn.GroupNorm(4, width), nn.LeakyReLU(0.2)
            )

        self.first, self.sigmoid = block(1), sigmoid
        self.down = nn.ModuleList(nn.Sequential(block(width, 2), block(width)) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(block(width + 4), block(width)) for _ in range(2))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        x, finer = self.first(z), []
        for down, skip in zip(self.down, self.skips, strict=True):
            finer.append(skip(x))
            x = down(x)
        for up in self.up:
            fine = finer.pop()
            x = up(torch.cat([F.interpolate(x, size=fine.shape[-2:], mode="bilinear"), fine], 1))
        return self.last(x).sigmoid() if self.sigmoid else self.last(x)


def train(net: nn.Module, z: Tensor, data: Measured, smoothness: float, steps: int) -> nn.Module:
    """Minimises `mean (T f(z) − y)² + smoothness · TV(f(z))`, and keeps the weights of the smallest loss."""
    coo = data.T.tocoo()
    places = np.stack([coo.row, coo.col])
    T = torch.sparse_coo_tensor(places, coo.data, coo.shape, check_invariants=True).coalesce()
    y, least, best = torch.as_tensor(data.y), float("inf"), net.state_dict()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        image = net(z)
        variation = image.diff(dim=-1).abs().sum() + image.diff(dim=-2).abs().sum()
        loss = (torch.sparse.mm(T, image.reshape(-1, 1))[:, 0] - y).square().mean() + smoothness * variation
        if loss.item() < least:
            least, best = loss.item(), copy.deepcopy(net.state_dict())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    net.load_state_dict(best)
    return net.eval()


def report(data: Measured, pred: RegressionPrediction, b: float) -> None:
    """Compares errors with standard deviations: in the object, at its edges and outside, and at other angles."""
    mean, stddev = pred.mean[0, 0].numpy(), pred.stddev[0, 0].numpy()
    error, total = data.truth - mean, np.sqrt(stddev**2 + data.pixel_noise)
    inside = data.truth > 0.1
    edges = maximum_filter(data.truth, 3) - minimum_filter(data.truth, 3) > 0.2
    truth = torch.as_tensor(data.truth)[None, None]
    pixels = float(pred.log_likelihood(truth, pixel_noise=data.pixel_noise))
    patches = float(pred.log_likelihood(truth, patch=(10, 10), pixel_noise=data.pixel_noise))
    constant = -0.5 * math.log(2 * math.pi * math.e * float((error**2).mean()))
    two = sum(
        -0.5 * math.log(2 * math.pi * math.e * (error[part] ** 2).mean()) * part.mean() for part in (inside, ~inside)
    )
    print(f"PSNR {10 * math.log10(float(data.truth.max()) ** 2 / float((error**2).mean())):.1f} dB")
    print(f"log-likelihood of a pixel {pixels:.2f}, in patches of 10 × 10 {patches:.2f}")
    print(f"  with the best constant standard deviation {constant:.2f}, with one in and one outside of it {two:.2f}")
    rank: Any = spearmanr(stddev[inside], np.abs(error[inside]))
    print(f"rank correlation of error and standard deviation in the object {rank.statistic:.2f}")
    regions = {"the object": inside, "edges": edges, "the rest": ~(inside | edges)}
    held = [f"{(np.abs(error) <= 1.645 * total)[part].mean():.0%} of {name}" for name, part in regions.items()]
    seen = data.T_held @ inside.ravel() > 0
    samples = pred.deviations[:, 0, 0].flatten(1).numpy().T
    spread = np.sqrt(((data.T_held @ samples) ** 2).mean(1) + 1 / b)
    angles = (np.abs(data.y_held - data.T_held @ mean.ravel()) <= 1.645 * spread)[seen].mean()
    print(f"90% intervals hold {', '.join(held)}; {angles:.0%} of measurements from other angles")


def draw(path: Path, data: Measured, pred: RegressionPrediction) -> None:
    """Truth, reconstruction, error and standard deviation; and how large errors are where standard deviations are."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean, stddev = pred.mean[0, 0].numpy(), pred.stddev[0, 0].numpy()
    error = np.abs(data.truth - mean)
    most = float(np.quantile(error, 0.995))
    panels = {"truth": data.truth, "reconstruction": mean, "absolute error": error, "standard deviation": stddev}
    _, axes = plt.subplots(1, 5, figsize=(14, 2.9), dpi=100, layout="constrained")
    for number, (axis, (title, values)) in enumerate(zip(axes, panels.items(), strict=False)):
        limits = {"vmin": 0, "vmax": 1, "cmap": "gray"} if number < 2 else {"vmin": 0, "vmax": most, "cmap": "viridis"}
        drawn = axis.imshow(values, **limits)
        axis.set(title=title, xticks=[], yticks=[])
        if number % 2:
            plt.colorbar(drawn, ax=axis, shrink=0.8)
    # Pixels in ten groups by their standard deviation; on the line it is as large as the error.
    groups = np.array_split(np.argsort(stddev.ravel()), 10)
    said, seen = (
        [float(np.sqrt((values.ravel()[group] ** 2).mean())) for group in groups] for values in (stddev, error)
    )
    axes[4].plot([0, max(said + seen)], [0, max(said + seen)], "k:", linewidth=1)
    axes[4].plot(said, seen, "o-", markersize=4)
    axes[4].set(title="error by standard deviation", xlabel="standard deviation", ylabel="root mean square error")
    plt.savefig(path)
    plt.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tooth", type=Path, metavar="FILE", help="an HDF5 file with `exchange/data`; needs h5py")
    parser.add_argument("--side", type=int, help="of the image; 64, or 128 for the tooth")
    parser.add_argument("--angles", type=int, default=20)
    parser.add_argument("--noise-level", type=float, default=0.05, help="of a phantom, relative to its mean sum")
    parser.add_argument("--noise", choices=("known", "residuals", "held-out"), default="residuals")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--prior", default="g-prior")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    if options.tooth:
        data = tooth(options.tooth, options.side or 128, options.angles)
    else:
        data = phantom(options.side or 64, options.angles, options.noise_level, options.seed)
    if options.noise == "known" and data.noise is None:
        parser.error("nobody knows the noise of the tooth: --noise residuals, or held-out")

    z = back_projection(data)
    net = train(UNet(sigmoid=not options.tooth), z, data, 1e-3 if options.tooth else 3e-4, options.steps)
    y, y_held = torch.as_tensor(data.y)[None], torch.as_tensor(data.y_held)[None]
    if data.noise is not None and options.noise == "known":
        b = 1 / data.noise**2
    elif options.noise == "residuals":
        b = residual_precision(net, [(z, y)], observe=data.T)
    else:
        b = residual_precision(net, [(z, y_held)], observe=data.T_held)

    la = LinearisedLaplace(net, Gaussian(b, observe=data.T), prior=options.prior, num_samples=options.samples)
    la.fit_hyperparameters([(z, y)], progress=False)
    print(la)
    pred = la.predict(z)  # pred.mean and pred.stddev are images, pred.samples joint draws of them
    report(data, pred, b)
    if options.picture:
        draw(options.picture, data, pred)


if __name__ == "__main__":
    main()
