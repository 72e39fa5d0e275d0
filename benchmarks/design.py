"""`python -m benchmarks.design [--data DIR] [--parts angles inputs picture] [--images 10] [--side 64] [--splits 10]`.

Whether measurements that `laplace_sampling.design.greedy` chooses are worth more than others of the same number.

`angles`: images of three rectangles with one direction (standard deviation 2.86°; Antorán et al. 2022), sums along
lines at 5 angles with 5 % noise, and then at 10 of 100 angles. A choice is that of the tangent of a U-Net (g-prior),
which is trained on the 5 angles, that of independent pixels of one variance, a random one, or equidistant angles. All
are reconstructed by total variation, without the network.

`picture` draws one image of `--side` pixels with its directions, and the choices among `--candidates` angles with the
seconds of a step.

`inputs`: training data of two regressions of UCI, in rounds that start from a few random ones. `DIR` has the folder
`uci` (`data/uci.py`).
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data.uci import Split, load
from laplace_sampling import Gaussian, LinearisedLaplace
from laplace_sampling.design import greedy

PILOTS, CHOSEN, NOISE = 5, (5, 10), 0.05
STEPS, WIDTH = 1000, 8
# Of the total variation, in units of the noise variance: among .3, 1, 3 and 10 the best for equidistant angles of three
# images with other seeds, with 10 and with 15 angles.
SMOOTHNESS = 3.0
SETS = ("energy", "concrete")
START, ROUNDS, IN_ROUND = 20, 5, 10


def rectangles(side: int, seed: int, finer: int = 4) -> Tensor:
    """Grey levels `[side, side]` from 0 to 1 of three rectangles, which add up where they overlap."""
    random, image = np.random.default_rng(seed), 0.0
    axis = (np.arange(side * finer) + 0.5) / (side * finer) * 2 - 1
    direction = random.uniform(0, np.pi)
    for _ in range(3):
        value, turn = random.uniform(0.5, 1), random.normal(direction, 0.05)
        (a, b), (x, y) = random.uniform(0.1, 0.8, 2), random.uniform(-0.75, 0.75, 2)
        along = (axis - x) * np.cos(turn) + (axis[:, None] - y) * np.sin(turn)
        across = (axis[:, None] - y) * np.cos(turn) - (axis - x) * np.sin(turn)
        image = image + value * ((np.abs(along) < a) & (np.abs(across) < b))
    coarse = np.asarray(image).reshape(side, finer, side, finer).mean((1, 3))
    return torch.as_tensor(coarse / coarse.max(), dtype=torch.float32)


def radon(side: int, angles: np.ndarray) -> list[Any]:
    """Sums along lines at each angle: a pixel is shared by the two detectors beside its centre."""
    axis, pixels, found = np.arange(side) - (side - 1) / 2, np.arange(side**2), []
    detectors = int(np.ceil(side * np.sqrt(2))) + 1
    for angle in angles:
        place = (axis * np.cos(angle) + axis[:, None] * np.sin(angle)).flatten() + (detectors - 1) / 2
        low = np.floor(place).astype(int)
        parts = np.concatenate([low + 1 - place, place - low]), (np.r_[low, low + 1], np.r_[pixels, pixels])
        found.append(scipy.sparse.csr_matrix(parts, shape=(detectors, side**2)).astype(np.float32))
    return found


def back_projection(T: list[Any], y: np.ndarray, side: int) -> Tensor:
    """`Tᵀ` of the filtered sums (Ram-Lak), from 0 to 1: the input of the network."""
    sums = y.reshape(len(T), -1)
    n = 2 * sums.shape[1]
    filtered = np.fft.irfft(np.fft.rfft(sums, n) * np.abs(np.fft.rfftfreq(n)), n)[:, : sums.shape[1]]
    image = torch.as_tensor(scipy.sparse.vstack(T).T @ filtered.flatten(), dtype=torch.float32)
    return ((image - image.min()) / (image.max() - image.min())).reshape(1, 1, side, side)


class UNet(nn.Module):
    """Three scales, with skips of all but the first."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()

        def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(before, after, 3, stride, padding=1), nn.LeakyReLU(0.2))

        self.first, self.down, self.deep = block(1, width), block(width, width, 2), block(width, width, 2)
        self.bottom, self.skip = block(width, width), nn.Conv2d(width, 4, 1)
        self.up, self.last = block(width + 4, width), nn.Sequential(block(width, width), nn.Conv2d(width, 1, 1))

    def forward(self, z: Tensor) -> Tensor:
        fine = self.down(self.first(z))
        coarse = F.interpolate(self.bottom(self.deep(fine)), fine.shape[2:], mode="bilinear")
        fine = F.interpolate(self.up(torch.cat([coarse, self.skip(fine)], 1)), z.shape[2:], mode="bilinear")
        return torch.sigmoid(self.last(fine))


class Pixels(nn.Module):
    """An image whose pixels are the weights: with an isotropic prior they are independent."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.zeros(1, 1, side, side))

    def forward(self, z: Tensor) -> Tensor:
        return self.image + 0 * z


def variation(image: Tensor) -> Tensor:
    return image.diff(dim=-1).abs().sum() + image.diff(dim=-2).abs().sum()


def trained(network: nn.Module, T: Any, y: Tensor, z: Tensor, sigma: float) -> nn.Module:
    """A deep image prior of the measurements and some total variation; the weights of the least loss."""
    rows, transposed = (torch.sparse_csr_tensor(*map(torch.as_tensor, (m.indptr, m.indices, m.data)), size=m.shape)
                        for m in (T, T.T.tocsr()))  # fmt: skip
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    least, best = float("inf"), network.state_dict()
    for _ in range(STEPS):
        optimiser.zero_grad()
        image = network(z)
        error = rows @ image.detach().flatten() - y
        smooth = SMOOTHNESS * sigma**2 * variation(image)
        # The gradient of ½‖Tx − y‖² by hand: a product with a sparse matrix has none of its own.
        ((transposed @ error) @ image.flatten() + smooth).backward()
        loss = 0.5 * float(error.square().sum()) + float(smooth.detach())
        if loss < least:
            least, best = loss, {name: value.clone() for name, value in network.state_dict().items()}
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
    network.load_state_dict(best)
    return network.eval()


def reconstruction(T: Any, y: np.ndarray, side: int, weight: float, steps: int = 2000) -> np.ndarray:
    """The image `x ≥ 0` of the least `½‖Tx − y‖² + λ TV(x)`, by the primal-dual method (Chambolle & Pock 2011)."""
    difference = scipy.sparse.csr_matrix(np.diff(np.eye(side), axis=0))
    eye = scipy.sparse.eye(side)
    D = scipy.sparse.vstack([scipy.sparse.kron(eye, difference), scipy.sparse.kron(difference, eye)]).tocsr()
    scale = float(scipy.sparse.linalg.norm(T, 2))
    K = scipy.sparse.vstack([T / scale, D]).tocsr()  # two parts of about one norm
    step = 1 / np.sqrt(1 + 8)
    x, dual = np.zeros(side**2), np.zeros(len(y) + 2 * side * (side - 1))
    ahead = x
    for _ in range(steps):
        dual = dual + step * (K @ ahead)
        of_data, of_edges = dual[: len(y)], dual[len(y) :]
        of_data = (of_data - step * y / scale) / (1 + step / scale**2)
        dual = np.concatenate([of_data, of_edges.clip(-weight, weight)])
        new = (x - step * (K.T @ dual)).clip(0)
        ahead, x = 2 * new - x, new
    return x


def evenly(num: int, candidates: int) -> list[int]:
    return [round(k * candidates / num) for k in range(num)]


@dataclass(frozen=True)
class Scan:
    """An image with the sums along lines of all candidates, and a network that is trained on those of the pilots."""

    truth: np.ndarray
    T: list[Any]
    y: np.ndarray
    sigma: float
    pilots: list[int]
    z: Tensor
    network: nn.Module

    @classmethod
    def of(cls, side: int, seed: int, candidates: int) -> "Scan":
        torch.manual_seed(seed)
        truth = rectangles(side, seed).flatten().numpy()
        T = radon(side, np.arange(candidates) * np.pi / candidates)
        clean = np.stack([rows @ truth for rows in T])
        sigma = NOISE * float(np.abs(clean).mean())
        y = (clean + sigma * np.random.default_rng(seed).standard_normal(clean.shape)).astype(np.float32)
        pilots = evenly(PILOTS, candidates)
        z = back_projection([T[k] for k in pilots], y[pilots], side)
        seen, flat = scipy.sparse.vstack([T[k] for k in pilots]).tocsr(), torch.as_tensor(y[pilots].flatten())
        return cls(truth, T, y, sigma, pilots, z, trained(UNet(), seen, flat, z, sigma))

    @property
    def side(self) -> int:
        return round(len(self.truth) ** 0.5)

    @property
    def rest(self) -> list[int]:
        return [number for number in range(len(self.T)) if number not in self.pilots]

    def fitted(self, model: nn.Module, prior: str) -> LinearisedLaplace:
        seen = scipy.sparse.vstack([self.T[k] for k in self.pilots]).tocsr()
        likelihood = Gaussian(1 / self.sigma**2, learn=False, observe=seen)
        la = LinearisedLaplace(model, likelihood, prior=prior, method="exact")
        y = torch.as_tensor(self.y[self.pilots].flatten())[None]
        return la.fit_hyperparameters([(self.z, y)], criterion="evidence", progress=False)

    def reconstructed(self, chosen: list[int]) -> np.ndarray:
        rows, values = scipy.sparse.vstack([self.T[k] for k in chosen]).tocsr(), self.y[chosen].flatten()
        return reconstruction(rows, values, self.side, SMOOTHNESS * self.sigma**2)

    def psnr(self, image: np.ndarray) -> float:
        return -10 * np.log10(np.mean((image - self.truth) ** 2))


def of_image(side: int, seed: int, candidates: int) -> Iterator[tuple[str, int, float]]:
    """Ways to choose, numbers of angles, and the PSNR of the reconstruction."""
    scan = Scan.of(side, seed, candidates)

    def by(model: nn.Module, prior: str, criterion: str) -> list[int]:
        rest = scan.rest
        design = greedy(scan.fitted(model, prior), [scan.T[k] for k in rest], CHOSEN[-1], criterion)
        return [rest[k] for k in design.chosen]

    ways = {f"g-prior, {criterion}": by(scan.network, "g-prior", criterion) for criterion in ("eig", "ese")}
    ways["isotropic, ese"] = by(Pixels(side), "isotropic", "ese")
    ways["random"] = np.random.default_rng(seed).permutation(scan.rest).tolist()
    for num in CHOSEN:
        ways_here = {name: scan.pilots + order[:num] for name, order in ways.items()}
        ways_here["equidistant"] = evenly(PILOTS + num, candidates)
        for name, chosen in ways_here.items():
            yield name, PILOTS + num, scan.psnr(scan.reconstructed(chosen))


def picture(side: int, seed: int, candidates: int, file: Path) -> None:
    """Draws an image, which angles are chosen, and what is reconstructed from these and from equidistant ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num, scan = CHOSEN[-1], Scan.of(side, seed, candidates)
    rest, start = scan.rest, time.perf_counter()
    la = scan.fitted(scan.network, "g-prior")
    fitted = time.perf_counter()
    design = greedy(la, [scan.T[k] for k in rest], num, "ese", num_samples=1000)
    seconds = time.perf_counter() - fitted
    ways = {"chosen": scan.pilots + [rest[k] for k in design.chosen], "equidistant": evenly(PILOTS + num, candidates)}
    _, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
    images = {"truth": scan.truth} | {name: scan.reconstructed(angles) for name, angles in ways.items()}
    for axis, (name, image) in zip(axes, images.items(), strict=False):
        axis.imshow(image.reshape(side, side), cmap="gray", vmin=0, vmax=1)
        axis.set(title=name if name == "truth" else f"{name}: {scan.psnr(image):.1f} dB", xticks=[], yticks=[])
    degrees = {name: np.sort(angles) * 180 / candidates for name, angles in ways.items()}
    for height, (name, values) in enumerate(degrees.items()):
        axes[3].eventplot(values, lineoffsets=height, linelengths=0.8, colors=["#0072B2", "#D55E00"][height])
        axes[3].text(0, height + 0.42, name)
    axes[3].set(title="angles in degrees", xlim=(-5, 180), ylim=(-0.6, 1.7), yticks=[])
    plt.savefig(file, dpi=100)
    plt.close()
    print(f"{side} × {side} pixels, {candidates} candidates: fit {fitted - start:.0f} s, {num} choices {seconds:.0f} s")
    print(", ".join(f"{name} {scan.psnr(image):.1f} dB" for name, image in images.items() if name != "truth"))


def of_split(data: Split, seed: int) -> Iterator[tuple[str, int, float]]:
    """Ways to choose, numbers of training data, and the root mean squared error on test data."""
    mean, sd, offset, unit = data.x.mean(0), data.x.std(0), data.y.mean(), data.y.std()
    x, x_test = (torch.as_tensor((a - mean) / np.where(sd > 0, sd, 1)).float() for a in (data.x, data.x_test))
    y, y_test = (torch.as_tensor((a - offset) / unit)[:, None].float() for a in (data.y, data.y_test))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).tolist()

    def next_by_variance(network: nn.Module, chosen: list[int]) -> list[int]:
        rest = [k for k in order if k not in set(chosen)]
        la = LinearisedLaplace(network, "regression").fit_hyperparameters([(x[chosen], y[chosen])], progress=False)
        return [rest[k] for k in greedy(la, x[rest], IN_ROUND, "variance", targets=x).chosen]

    ways: dict[str, Callable[[nn.Module, list[int]], list[int]]] = {
        "variance": next_by_variance,
        "random": lambda network, chosen: order[len(chosen) :][:IN_ROUND],
    }
    for name, choose in ways.items():
        chosen = order[:START]
        for number in range(ROUNDS + 1):
            network = regressor(x[chosen], y[chosen], seed)
            with torch.no_grad():
                yield name, len(chosen), unit * float((network(x_test) - y_test).square().mean().sqrt())
            if number < ROUNDS:
                chosen = chosen + choose(network, chosen)


def regressor(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        optimiser.zero_grad()
        decay = sum(p.square().sum() for p in network.parameters())
        (F.mse_loss(network(x), y, reduction="sum") + 0.02 * decay).backward()
        optimiser.step()
        schedule.step()
    return network.eval()


def table(title: str, against: str, runs: list[list[tuple[str, int, float]]]) -> None:
    """Means over the runs, and of the paired difference from one way with its standard error."""
    numbers = {(name, num): np.array([dict(((n, k), v) for n, k, v in run)[name, num] for run in runs])
               for name, num, _ in runs[0]}  # fmt: skip
    print(f"\n{title}, {len(runs)} runs\n| way | number | mean | minus {against} |\n|---|---|---|---|")
    for (name, num), values in numbers.items():
        gain = values - numbers[against, num]
        error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else float("nan")
        print(f"| {name} | {num} | {values.mean():.3f} | {gain.mean():+.3f} ± {error:.3f} |")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with `uci`")
    parser.add_argument("--parts", nargs="+", choices=("angles", "inputs", "picture"), default=("angles", "inputs"))
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--candidates", type=int, default=100, help="angles to choose from")
    parser.add_argument("--file", type=Path, default=Path("design.png"), help="of the picture")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if "angles" in options.parts:
        runs = [list(of_image(options.side, seed, options.candidates)) for seed in range(options.images)]
        table(f"PSNR in dB of {options.side} × {options.side} pixels", "equidistant", runs)
    if "picture" in options.parts:
        picture(options.side, 0, options.candidates, options.file)
    if "inputs" in options.parts and options.data is not None:
        for name in SETS:
            runs = [list(of_split(load(options.data / "uci" / name, k), k)) for k in range(options.splits)]
            table(f"{name}: test RMSE", "random", runs)


if __name__ == "__main__":
    main()
