r"""How large a part of the data has to be: rows are doubled until predicted standard deviations stay where they are.

A part and its half have the same draws. They are compared at random rows `r_i = φ_iᵀL_iz_i` of a few hundred training
data, whose variance `r_i(M̂ + α)⁻¹r_iᵀ` is that of a random combination of outputs, weighted by `B`: with `σ` of the
part and `σ'` of its half, the change is `‖σ' − σ‖/‖σ‖`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.datum_rows import DatumRows
from laplace_sampling.linear_model.draws import Stream
from laplace_sampling.linear_model.random_rows import RandomRows
from laplace_sampling.linear_model.sketch import Sketch
from laplace_sampling.solvers.lapack import sum_of_squares, symmetric_eigen

__all__ = ["NUM_PROBES", "Growth", "bytes_of_rows", "grow", "rows_that_fit"]

# Random data at which a part and its half are compared. From 256 to 512 rows of 10,000 images the change was 0.15 to
# 0.24 in eleven of twelve sets of so many data, and 0.44 in one; of half as many it was 0.15 to 0.27, of twice as many
# 0.16 to 0.26, and 0.34 in one.
NUM_PROBES = 256
# Rows of the first part at most, whose double is the first that can be compared.
_FIRST = 256
# Rows whose sum of products is formed together, where they are not held.
_TOGETHER = 1024


# Parts of the memory for the probes, and for the rows that go through the network together.
_OF_PROBES, _OF_CHUNK = 1 / 8, 1 / 16


def bytes_of_rows(num_rows: int, size: int, itemsize: int) -> float:
    """Memory of rows, with factors of them, their Gram matrix and its decomposition, the probes and temporary rows."""
    # Factors are at most half as many numbers as the rows; a decomposition takes four matrices in float64.
    return (1.5 * size * itemsize * num_rows + 4 * 8 * min(num_rows, size) ** 2) / (1 - _OF_PROBES - 2 * _OF_CHUNK)


def rows_that_fit(size: int, itemsize: int, bytes_: float) -> int:
    """The number of rows whose `bytes_of_rows` are there."""
    linear, available = 1.5 * size * itemsize, bytes_ * (1 - _OF_PROBES - 2 * _OF_CHUNK)
    found = int((math.sqrt(linear**2 + 4 * 32 * available) - linear) / 64)
    return found if found < size else int((available - 4 * 8 * size**2) / linear)


@dataclass
class Growth:
    """Rows that are there, and the sketches made of them.

    Attributes:
        sequence: of the rows.
        bytes_: memory for rows and matrices.
        num_rows: rows of the last sketch.
        made: the last sketch and the one before it.
    """

    sequence: RandomRows
    bytes_: float = 2.0**33
    num_rows: int = 0
    made: list[Sketch] = field(default_factory=list)
    _rows: list[Tensor] = field(default_factory=list)
    _factored: list[DatumRows] = field(default_factory=list)  # the same rows
    _products: Tensor | None = None  # of the rows with each other
    _probed: list[Tensor] = field(default_factory=list)  # of the probes with the rows
    _vjps: int = 0

    @property
    def size(self) -> int:
        return self.sequence.ggn.size

    def __post_init__(self) -> None:
        itemsize = torch.empty((), dtype=self.sequence.ggn.dtype).element_size()
        self._held = rows_that_fit(self.size, itemsize, self.bytes_)
        rows = self.bytes_ / (self.size * itemsize)
        self._num_probes = max(1, min(NUM_PROBES, int(_OF_PROBES * rows)))
        self._together = max(1, int(_OF_CHUNK * rows))
        self._sums = 4 * 8 * self.size**2 <= self.bytes_

    @property
    def spare_bytes(self) -> float:
        """Memory that the rows leave once no more are made."""
        return self.bytes_ * (_OF_PROBES + 2 * _OF_CHUNK)

    def without_rows(self) -> "Growth":
        """The sizes of its sketches, without their rows."""
        return Growth(self.sequence, self.bytes_, self.num_rows, [sketch.without_rows() for sketch in self.made])

    def reachable(self, num_rows: int) -> int:
        """The number of rows nearest below the wanted one with which there is a sketch."""
        num_rows = min(num_rows, self.sequence.most)
        # A sum of products of rows needs none of them in memory.
        return num_rows if self._sums and num_rows > self.size else min(num_rows, self._held)

    def starting(self, most: int, max_rows: int) -> int:
        """A number of rows, `most` at most, whose doubles end at the largest part, so that its half has been made."""
        limit = self.reachable(max_rows)
        if limit == self.sequence.most:
            return self.reachable(most)  # the last part is `M` itself, and needs no half
        while limit > 1 and (limit > most or 2 * limit > self.reachable(max_rows)):
            limit //= 2
        return limit

    def following(self, max_rows: int) -> int:
        """The next number of rows: twice as many, or all; the same number if there is no larger part."""
        limit = self.reachable(max_rows)
        # A part that is compared with more than its half would seem to be more accurate than it is.
        if limit < min(2 * self.num_rows, self.sequence.most):
            return self.num_rows
        double = min(2 * self.num_rows, limit)
        # Between the rows that are held and those of which there is a sum there is nothing.
        return double if self.reachable(double) == double else min(self.size + 1, limit)

    def sketch(self, num_rows: int) -> Sketch:
        """The sketch of so many rows, more than before, which is kept together with the one before it."""
        weights = self.sequence.weights(num_rows)
        if num_rows <= min(self.size, self._held):
            self._extend(num_rows)
            found = Sketch(self._rows, weights, self._products)
            sampled = float(found.products.diagonal().sum())
        else:
            # Eigenvectors of `M̂` itself are then less work than those of the Gram matrix.
            matrix, sampled = self._sum_to(num_rows, weights)
            values, vectors = symmetric_eigen(matrix)
            found = Sketch.of_eigenvectors(values, vectors.T, num_rows)
        self.num_rows = num_rows
        found.passes = (self._vjps + min(self._num_probes, self.sequence.num_data)) / (2 * self.sequence.num_data)
        found.chance = self._chance(sampled, found)
        self.made = [*self.made[-1:], found]
        return found

    def _chance(self, sampled: float, found: Sketch) -> float:
        """`ρ`, the part of the trace that is not known but estimated: rows of weight one are sure to be drawn."""
        whole = float(found.spectrum.sum())
        return min(max(1 - sampled / whole, 0.0), 1.0) if whole > 0 and self.num_rows < self.sequence.most else 0.0

    @cached_property
    def probes(self) -> DatumRows:
        """Random rows of a few hundred random data, independent of those of the sequence."""
        sequence = replace(self.sequence, stream=Stream.SUBSET_PROBES)
        return sequence.probes(self._num_probes, self._together)

    def change(self, shifts: Float[Tensor, " A"]) -> float:
        """The largest change of predicted standard deviations from the sketch before the last one to the last one."""
        if self.num_rows == self.sequence.most:
            return 0.0  # the last one is `M` itself
        if len(self.made) < 2:
            return math.nan
        norms = self.probes.squares()
        half, whole = ((sketch, self._projected(sketch)) for sketch in self.made)
        return max(_difference(*(s.variances(norms, p, shift) for s, p in (half, whole))) for shift in shifts.tolist())

    def _projected(self, sketch: Sketch) -> Float[Tensor, "n m"]:
        """The probes in the eigenvectors of a sketch."""
        if sketch.num_rows > min(self.size, self._held):
            return sketch.project(self.probes.dense())
        self._probed += [self.probes.products(rows) for rows in self._factored[len(self._probed) :]]
        return sketch.turned(torch.cat(self._probed, 1)[:, : sketch.num_rows])

    def _extend(self, num_rows: int) -> None:
        """More rows in memory, with their products as long as these are fewer than those of the weights."""
        there = sum(len(rows) for rows in self._rows)
        new = self.sequence.rows(there, num_rows, self._together)
        self._vjps += len(new)
        if num_rows <= self.size:
            corner = new.products(new)
            if self._products is not None:
                side = torch.cat([new.products(rows) for rows in self._factored], 1)
                corner = torch.cat([torch.cat([self._products, side.T], 1), torch.cat([side, corner], 1)])
            self._products = corner
            self._factored.append(new)
        self._rows.append(new.dense())

    def _sum_to(self, num_rows: int, weights: Float[Tensor, " m"]) -> tuple[Float[Tensor, "P P"], float]:
        """`Σ_j w_j g_j g_jᵀ` of so many rows, and `Σ_j ‖g_j‖²`."""
        if num_rows == self.sequence.most:
            self._rows, self._products = [], None
            self._vjps += num_rows
            matrix = self.sequence.ggn.accumulated()
            return matrix, float(matrix.trace())
        if num_rows <= self._held:
            self._extend(num_rows)
            blocks = iter(self._rows)
        else:
            self._rows, self._products = [], None
            self._vjps += num_rows
            starts = range(0, num_rows, _TOGETHER)
            stops = (min(start + _TOGETHER, num_rows) for start in starts)
            blocks = (self.sequence.rows(a, b, self._together).dense() for a, b in zip(starts, stops, strict=True))
        sampled, start = [], 0

        def weighted() -> Iterator[Tensor]:
            nonlocal start
            for rows in blocks:
                sampled.append(float(rows.double().square().sum()))
                root = weights[start : start + len(rows)].sqrt()
                start += len(rows)
                yield root[:, None].to(rows) * rows

        return sum_of_squares(weighted(), self.size, self.sequence.ggn.device), sum(sampled)


def grow(growth: Growth, shifts: Callable[[Sketch], Float[Tensor, " A"]], tolerance: float, *, max_rows: int) -> Sketch:
    """Doubles the rows until predicted standard deviations change by less than a tolerance, or a limit is reached.

    The error of the part that is returned is less than the change, nearly always: rows that are sure to be drawn are in
    a part and its half, and both have them exactly; of the others, the two differ by as much as they are off at least.
    Of 24 fits to networks that are sure of most labels the error was 0.02 to 0.4 of the change, of classifications of
    3 to 8 classes 0.1 to 0.85.

    Args:
        growth: what has been made so far.
        shifts: the prior precisions at which parts are compared; where the precision depends on the spectrum, that of
            the present sketch.
        tolerance: of the change.
        max_rows: at most so many rows; memory may hold fewer.
    """
    if not growth.made:
        growth.sketch(growth.starting(_FIRST, max_rows))
    while True:
        sketch = growth.made[-1]
        sketch.change = growth.change(shifts(sketch))
        more = growth.following(max_rows)
        if sketch.change <= tolerance or more <= sketch.num_rows:
            return sketch
        growth.sketch(more)


def _difference(before: Tensor, after: Tensor) -> float:
    """`‖σ' − σ‖/‖σ‖` from variances."""
    old, new = before.clamp_min(0).sqrt(), after.clamp_min(0).sqrt()
    return float((old - new).norm() / new.norm().clamp_min(1e-300))
