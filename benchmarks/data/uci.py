"""UCI data sets with the standard splits of the literature, from a folder that is not part of the project.

The folder has one for each small data set: `data.txt`, a row an example; `index_features.txt` and `index_target.txt`,
its columns; `index_train_K.txt` and `index_test_K.txt`, its rows. Large ones have a folder of their own: `data.csv.gz`,
with the target in the last column, and `test_mask.csv.gz`, a column a split, 1 for the rows of its test set.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SETS = ("concrete", "energy", "wine-quality-red", "yacht")
LARGE_SETS = ("kin40k", "bike", "keggdirected")
# Of the data on both sides of a gap, the part that is for tests: that of the standard splits.
_TEST = 0.1


@dataclass(frozen=True)
class Split:
    """Data in original units."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(folder: Path, split: int) -> Split:
    """One of the splits of a data set."""
    x, y = _table(folder)
    train, test = (_indices(folder, f"{part}_{split}") for part in ("train", "test"))
    return Split(x[train], y[train], x[test], y[test])


def load_large(folder: Path, split: int) -> Split:
    """One of the splits of a large data set."""
    data = np.loadtxt(folder / "data.csv.gz", delimiter=",", ndmin=2)
    test = np.loadtxt(folder / "test_mask.csv.gz", delimiter=",", ndmin=2)[:, split] > 0
    return Split(data[~test, :-1], data[~test, -1], data[test, :-1], data[test, -1])


def load_gap(folder: Path, number: int) -> tuple[Split, np.ndarray, np.ndarray]:
    """A split without the middle third of one input, and the inputs and targets of that third (Foong et al. 2019).

    The number gives the input, by which the data are sorted. A tenth of the outer two thirds is the test set.
    """
    x, y = _table(folder)
    order = np.argsort(x[:, number % x.shape[1]], kind="stable")
    low, middle, high = np.array_split(order, 3)
    outer = np.random.default_rng(number).permutation(np.concatenate([low, high]))
    test, train = np.split(outer, [round(_TEST * len(outer))])
    return Split(x[train], y[train], x[test], y[test]), x[middle], y[middle]


def _table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    data = np.loadtxt(folder / "data.txt")
    return data[:, _indices(folder, "features")], data[:, int(_indices(folder, "target")[0])]


def _indices(folder: Path, name: str) -> np.ndarray:
    return np.loadtxt(folder / f"index_{name}.txt", dtype=int, ndmin=1)
