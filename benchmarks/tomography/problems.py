"""Images with measurements from few angles: letters and digits, phantoms, and a tooth that was measured from many."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import maximum_filter, minimum_filter
from scipy.sparse.linalg import lsqr

from benchmarks.data.glyphs import masters
from benchmarks.data.image_sets import pixels
from benchmarks.tomography.projector import back_projected, projector

LETTERS, DIGITS = "RSgEk", (0, 2, 3, 5, 8)
# The tooth of `exchange/data`: bins of the detector, angles over a half turn, and the bin of the centre of rotation,
# where the last projection is the mirror image of the first.
_BINS, _ANGLES, _CENTRE = 640, 181, 295.5
# The object is what is brighter than this part of the maximum; edges are where neighbours differ by as much.
_BRIGHT, _EDGE = 0.1, 0.2
# Steps of LSQR for the reconstruction from all angles: more of them fit its noise.
_LSQR = 30


@dataclass(frozen=True)
class Problem:
    """Measurements `y = T x + noise` of an image, others of it from angles in between, and the truth `x`.

    Attributes:
        name: of the image.
        truth: `[side, side]`, with a maximum of about one.
        T: a sparse matrix `[angles · detectors, side²]`, the angles spread evenly over a half turn.
        y: measurements, flat.
        angles: their angles, in radians.
        held_T: of other angles.
        held_y: measurements at those.
        noise: standard deviation of the measurements' noise; `None` where it is not known.
        pixel_noise: variance of the truth's own noise; 1e-6 for what was drawn.
    """

    name: str
    truth: np.ndarray
    T: Any
    y: np.ndarray
    angles: np.ndarray
    held_T: Any
    held_y: np.ndarray
    noise: float | None
    pixel_noise: float = 1e-6

    @property
    def side(self) -> int:
        return len(self.truth)

    @cached_property
    def regions(self) -> dict[str, np.ndarray]:
        """Which pixels are of the object, of its edges, and outside of both."""
        object_ = self.truth > _BRIGHT
        edges = maximum_filter(self.truth, 3) - minimum_filter(self.truth, 3) > _EDGE
        return {"object": object_, "edges": edges, "outside": ~(object_ | edges)}

    @cached_property
    def rough(self) -> np.ndarray:
        """Filtered back-projection."""
        return back_projected(self.T, self.y, len(self.angles))

    def left_out(self, fold: int, folds: int) -> "Problem":
        """The problem without every `folds`-th angle, which are the others."""
        bins = len(self.y) // len(self.angles)
        out = np.arange(len(self.angles)) % folds == fold
        rows = np.repeat(out, bins)
        kept = {"T": self.T[~rows], "y": self.y[~rows], "angles": self.angles[~out]}
        held = {"held_T": self.T[rows], "held_y": self.y[rows]}
        return Problem(self.name, self.truth, **kept, **held, noise=self.noise, pixel_noise=self.pixel_noise)


def measured(name: str, truth: np.ndarray, num_angles: int, noise: float, seed: int) -> Problem:
    """Simulated measurements, with noise of a part of the mean absolute line sum."""
    side = len(truth)
    detectors = int(np.ceil(side * 2**0.5))
    both = np.arange(2 * num_angles) * np.pi / (2 * num_angles)
    matrices = [projector(side, angles, detectors) for angles in (both[::2], both[1::2])]
    clean = [T @ truth.ravel() for T in matrices]
    sigma, random = noise * float(np.abs(clean[0]).mean()), np.random.default_rng(seed)
    y, held_y = ((c + sigma * random.standard_normal(len(c))).astype(np.float32) for c in clean)
    return Problem(name, truth, matrices[0], y, both[::2], matrices[1], held_y, sigma)


def letter(index: int) -> np.ndarray:
    """Grey levels `[28, 28]` of a letter in one of five fonts."""
    fonts = ("DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSans.ttf", "STIXGeneralBol.ttf", "DejaVuSansMono.ttf")
    ink = masters(112, LETTERS[index], (fonts[index],))[0, 0]
    return ink.reshape(28, 4, 28, 4).mean((1, 3)).numpy()


def digit(index: int, data: Path | None) -> np.ndarray:
    """Grey levels `[28, 28]`: of MNIST where its folder is given, else those of scikit-learn, eight pixels enlarged."""
    if data is not None:
        return pixels(data / "images", "MNIST", 5)[index, 0].numpy()
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = torch.as_tensor(images[np.nonzero(labels == DIGITS[index])[0][0]].reshape(1, 1, 8, 8) / 16)
    large = torch.nn.functional.interpolate(small, size=(24, 24), mode="bicubic").clamp(0, 1)
    return np.pad(large[0, 0].numpy().astype(np.float32), 2)


def phantom(side: int, seed: int) -> np.ndarray:
    """Ellipses and rectangles of random grey levels in a large ellipse, with a rim as of a skull."""
    random, grid = np.random.default_rng(seed), np.linspace(-1, 1, 4 * side)
    image = np.zeros((4 * side, 4 * side), np.float32)

    def inside(x: float, y: float, a: float, b: float, turn: float, power: int) -> np.ndarray:
        across, down = grid - x, grid[:, None] - y
        u, v = np.cos(turn) * across + np.sin(turn) * down, np.cos(turn) * down - np.sin(turn) * across
        return np.abs(u / a) ** power + np.abs(v / b) ** power <= 1

    image[inside(0, 0, 0.69, 0.92, 0, 2)] = 1.0
    image[inside(0, 0, 0.64, 0.86, 0, 2)] = 0.3
    for number in range(8):
        x, y = random.uniform(-0.4, 0.4), random.uniform(-0.55, 0.55)
        a, b = random.uniform(0.05, 0.22, 2)
        image[inside(x, y, a, b, random.uniform(0, np.pi), 2 if number % 2 else 50)] = random.uniform(0.1, 0.9)
    return image.reshape(side, 4, side, 4).mean((1, 3))


def tooth(file: Path, side: int, num_angles: int) -> Problem:
    """The first slice of the tooth from some of 181 angles; the truth is LSQR of all, its noise that of halves.

    Raises:
        ValueError: if the side is no divisor of the detector's 640 bins.
    """
    import h5py

    if _BINS % side:
        raise ValueError(f"The side must divide {_BINS}, but is {side}.")
    with h5py.File(file) as data:
        parts: Any = data["exchange"]
        counts, white, dark = (np.asarray(parts[name][:, 0]) for name in ("data", "data_white", "data_dark"))
    sums = -np.log((counts - dark.mean(0)) / (white.mean(0) - dark.mean(0)))
    width = _BINS // side
    sinogram = sums.reshape(_ANGLES, side, width).mean(2)
    angles, centre = np.arange(_ANGLES) * np.pi / _ANGLES, (_CENTRE - (width - 1) / 2) / width
    T = projector(side, angles, side, centre)
    rows = np.arange(len(angles) * side).reshape(len(angles), side)

    def solved(which: np.ndarray) -> np.ndarray:
        chosen = rows[which].ravel()
        return lsqr(T[chosen], sinogram.ravel()[chosen], iter_lim=_LSQR)[0].reshape(side, side)

    everything = np.arange(_ANGLES)
    truth, halves = solved(everything), [solved(everything[start::2]) for start in (0, 1)]
    unit = float(truth.max())
    noise = float(np.mean((halves[0] - halves[1]) ** 2)) / (4 * unit**2)
    few = np.round(np.arange(num_angles) * _ANGLES / num_angles).astype(int)
    others = np.setdiff1d(everything, few)
    y = (sinogram / unit).astype(np.float32)
    parts = T[rows[few].ravel()], y[few].ravel(), angles[few], T[rows[others].ravel()], y[others].ravel()
    return Problem(f"tooth {side}", (truth / unit).astype(np.float32), *parts, noise=None, pixel_noise=noise)
