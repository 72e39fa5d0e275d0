"""A model of the time of a product, fitted to timings of its parts, and beside it the time of the whole.

`T = s (a N/r + c ⌈N/(r b)⌉) + l + 2 (r − 1)/r · bytes/w`: arithmetic of `N` data on `r` ranks, what each batch of `b`
data takes besides (Python, and reading and writing `K` vectors of weights), the factor `s` by which ranks that share
memory slow each other down, and one sum over all ranks with latency `l` and bandwidth `w`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.scaling.measure import Timing
from benchmarks.scaling.model import ring_factor

__all__ = ["Arithmetic", "Comparison", "Ring", "arithmetic", "comparison", "ring", "rows_of"]

Row = Mapping[str, Any]
# Of the parts of a network.
_PARTS = ("alone", "together", "whole", "data_parallel", "sample_parallel", "gather")


def rows_of(ranks: Sequence[Sequence[Timing]]) -> list[dict[str, Any]]:
    """The timings of all ranks as rows: of a repetition those of the slowest rank count, and of these the median."""
    rows = []
    for same in zip(*ranks, strict=True):
        repetitions = [
            max(value for value in values if value is not None)
            for values in zip(*(timing.seconds for timing in same), strict=True)
        ]
        numbers = {key: value for key, value in vars(same[0]).items() if key != "seconds"}
        rows.append({**numbers, "seconds": median(repetitions), "repetitions": repetitions})
    return rows


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of a product on one process: `per_datum` of each datum, and `per_batch` of each batch besides."""

    per_datum: float
    per_batch: float

    def seconds(self, num_data: int, batch: int) -> float:
        return self.per_datum * num_data + self.per_batch * math.ceil(num_data / batch)


@dataclass(frozen=True)
class Ring:
    """A sum over ranks: its latency in seconds, and the bytes a second that a rank sends."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float, ranks: int) -> float:
        return 0.0 if ranks == 1 else self.latency + ring_factor(ranks) * num_bytes / self.bandwidth


def arithmetic(points: Sequence[tuple[int, float]], batch: int) -> Arithmetic:
    """By least squares of relative errors on numbers of data and seconds; no coefficient is negative."""
    data, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    per_datum, per_batch = _least_squares([data, np.ceil(data / batch)], seconds)
    return Arithmetic(per_datum, per_batch)


def ring(points: Sequence[tuple[float, float]], ranks: int) -> Ring:
    """Likewise, on bytes and seconds."""
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    latency, per_byte = _least_squares([np.ones_like(sizes), ring_factor(ranks) * sizes], seconds)
    return Ring(latency, 1 / per_byte if per_byte > 0 else math.inf)


def _least_squares(columns: Sequence[np.ndarray], seconds: np.ndarray) -> tuple[float, float]:
    # Times differ by orders of magnitude: a relative error counts the same in each.
    first, second = nnls(np.stack(columns, 1) / seconds[:, None], np.ones_like(seconds))[0]
    return float(first), float(second)


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured times of a network on the ranks that were there.

    Attributes:
        arithmetic: fitted.
        slowdown: `s`.
        ring: fitted.
        predicted: seconds of the data-parallel product, from the parts.
        measured: seconds of it, which are in no fit.
        data_parallel: efficiency, `T₁/(r T_r)`, as measured.
        sample_parallel: likewise.
        gather: seconds of collecting all samples, once in a fit.
    """

    network: str
    ranks: int
    arithmetic: Arithmetic
    slowdown: float
    ring: Ring
    predicted: float
    measured: float
    data_parallel: float
    sample_parallel: float
    gather: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1


def comparison(rows: Sequence[Row], network: str) -> Comparison:
    """What the rows of a run say about a network.

    Raises:
        ValueError: if a part is missing.
    """
    of_network = [row for row in rows if row["network"] == network]
    if missing := [part for part in _PARTS if not any(row["part"] == part for row in of_network)]:
        raise ValueError(f"The records of {network} have no rows of {missing}: run `python -m benchmarks.scaling`.")
    alone = {row["data"]: row["seconds"] for row in of_network if row["part"] == "alone"}
    one = {row["part"]: row for row in of_network}
    whole, parallel, batch = one["whole"], one["data_parallel"], one["together"]["batch"]
    ranks = parallel["ranks"]
    local = arithmetic(list(alone.items()), batch)
    slowdown = one["together"]["seconds"] / alone[batch]
    summed = ring([(row["bytes"], row["seconds"]) for row in rows if row["part"] == "all_reduce"], ranks)
    predicted = slowdown * local.seconds(parallel["data"] // ranks, batch) + summed.seconds(parallel["bytes"], ranks)
    return Comparison(
        network,
        ranks,
        local,
        slowdown,
        summed,
        predicted,
        parallel["seconds"],
        whole["seconds"] / (ranks * parallel["seconds"]),
        whole["seconds"] / (ranks * one["sample_parallel"]["seconds"]),
        one["gather"]["seconds"],
    )
