"""UCI data sets with the standard splits of the literature, from a folder that is not part of the project.

The folder has one for each data set: `data.txt`, a row an example; `index_features.txt` and `index_target.txt`, its
columns; `index_train_K.txt` and `index_test_K.txt`, its rows.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["SETS", "Split", "load"]

SETS = ("concrete", "energy", "wine-quality-red", "yacht")


@dataclass(frozen=True)
class Split:
    """Data in original units."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(folder: Path, split: int) -> Split:
    """One of the splits of a data set."""
    data = np.loadtxt(folder / "data.txt")

    def indices(name: str) -> np.ndarray:
        return np.loadtxt(folder / f"index_{name}.txt", dtype=int, ndmin=1)

    columns, target = indices("features"), int(indices("target")[0])
    train, test = indices(f"train_{split}"), indices(f"test_{split}")
    return Split(data[train][:, columns], data[train, target], data[test][:, columns], data[test, target])
