"""Parallel beams as a sparse matrix, and filtered back-projection."""

from typing import Any

import numpy as np
import scipy.sparse as sp


def projector(side: int, angles: np.ndarray, detectors: int, centre: float | None = None) -> sp.csr_matrix:
    """`T`, `[angles · detectors, side²]`: each pixel goes to the two detector bins next to its shadow, by distance.

    Args:
        side: of the image, whose pixels are as wide as the detector's bins.
        angles: in radians.
        detectors: number of bins.
        centre: the bin that the centre of rotation, the centre of the image, falls on; by default the middle.
    """
    centre = (detectors - 1) / 2 if centre is None else centre
    offsets = np.arange(side) - (side - 1) / 2
    shadow = np.cos(angles)[:, None, None] * offsets + np.sin(angles)[:, None, None] * offsets[:, None] + centre
    left = np.floor(shadow).astype(int)
    rows, columns, weights = [], [], []
    for bins, weight in ((left, left + 1 - shadow), (left + 1, shadow - left)):
        angle, row, column = np.nonzero((bins >= 0) & (bins < detectors) & (weight > 0))
        rows.append(angle * detectors + bins[angle, row, column])
        columns.append(row * side + column)
        weights.append(weight[angle, row, column])
    entries = np.concatenate(weights).astype(np.float32), (np.concatenate(rows), np.concatenate(columns))
    return sp.csr_matrix(entries, shape=(len(angles) * detectors, side**2))


def back_projected(T: Any, y: np.ndarray, num_angles: int) -> np.ndarray:
    """Filtered back-projection `[side, side]` of angles that are spread evenly over a half turn."""
    sinogram = y.reshape(num_angles, -1)
    length = 2 * sinogram.shape[1]
    filtered = np.fft.irfft(np.fft.rfft(sinogram, length) * np.fft.rfftfreq(length), length)[:, : sinogram.shape[1]]
    side = round(T.shape[1] ** 0.5)
    return (np.pi / num_angles * (T.T @ filtered.ravel())).reshape(side, side).astype(np.float32)
