r"""A sequence of rows of a GGN, of which every beginning estimates `M` without bias, and the last is `M` itself.

A row is `g_ik = φ_iᵀL_i e_k`, datum `i` and column `k` of a root of its curvature, `L_iL_iᵀ = B_i`, so that all `N·C`
of them are `M = Σ_ik g_ik g_ikᵀ`. Of a softmax, it is the gradient of the loss at label `k`, times `√p_k`.

Rows are drawn without replacement by priority sampling (Duffield, Lund and Thorup 2007, "Priority sampling for
estimation of arbitrary subset sums"): with sizes `s_ik = ‖L_i e_k‖²` and uniform `u_ik` the order is that of falling
`s_ik/u_ik`, and the first `m` have the weights `max(1, τ/s_ik)`, `τ` being the priority of the next one. These are
unbiased for every `m`, and one at the end.

Which rows are drawn is all that is random. Random combinations `φ_iᵀL_i z` of all columns would be a second source of
error, and one that a part shares with its half where a datum has weight one: of classifiers that are sure of most data
the few others, which decide, are in both, and comparing the two would say next to nothing of the error.

How large a part of the data has to be: rows are doubled until predicted standard deviations stay where they are.

A part and its half have the same draws. They are compared at random rows `r_i = φ_iᵀL_iz_i` of a few hundred training
data, whose variance `r_i(M̂ + α)⁻¹r_iᵀ` is that of a random combination of outputs, weighted by `B`: with `σ` of the
part and `σ'` of its half, the change is `‖σ' − σ‖/‖σ‖`.

Samples of the posterior of a sketch, and one sketch for all precisions and noise levels of a fit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.closed_form import FactoredSampler
from laplace_sampling.curvature.low_rank import LowRank, Sketch
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.datum_rows import DatumRows
from laplace_sampling.linear_model.draws import Draws, SeededNoise, Stream
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.solvers.lapack import sum_of_squares, symmetric_eigen
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.solver import Minimum, Objective, Solution

# Data whose rows are computed together, at most: temporary copies are of these only.
_TOGETHER = 256


@dataclass(frozen=True)
class RandomRows:
    """The sequence of rows of `M` for a seed; a row is one VJP of one datum.

    A part of the rows is contained in a larger part.

    Attributes:
        ggn: `M`.
        seed: of the order.
        stream: orders of other streams are independent.
    """

    # The part of the mean size that every row has besides its own: sizes are those of the curvature of the loss, and
    # features differ, too. With 1,000 rows of 10,000 images (Fashion-MNIST, a LeNet of 3,206 weights, three seeds)
    # standard deviations had an error of 6.8 %, at half 7.2 %, at twice 6.9 %, with all data alike 8.4 %.
    _LEAST_SIZE = 0.1

    ggn: GGN
    seed: int
    stream: int = 0

    @property
    def num_data(self) -> int:
        return self.ggn.num_data

    @property
    def num_outputs(self) -> int:
        return self.ggn.features.num_outputs

    @property
    def most(self) -> int:
        """The number of rows with which the estimate is `M` itself, `N·C`."""
        return self.num_data * self.num_outputs

    @cached_property
    def _uniform_noise(self) -> SeededNoise:
        # Uniform by the normal distribution, so that they have the keys of all other noise.
        return SeededNoise(1, self.num_outputs, self.seed, 2 * self.stream)

    def _uniform(self, data: Tensor) -> Float[Tensor, "n C"]:
        return torch.special.ndtr(self._uniform_noise(data)[0].double()).clamp(1e-12, 1 - 1e-12)

    @cached_property
    def _priorities(self) -> Float[Tensor, " NC"]:
        """`s_ik/u_ik`, in units of the mean size; as many numbers as the outputs."""
        sizes = self.ggn.root_sizes().clamp_min(0)
        mean = float(sizes.mean(dtype=torch.float64))
        usable = mean > 0 and math.isfinite(mean)
        sizes = sizes.div_(mean).add_(self._LEAST_SIZE) if usable else torch.ones_like(sizes)
        for data in torch.arange(self.num_data).split(max(1, NUMBERS_TOGETHER // self.num_outputs)):
            sizes[data] = (sizes[data] / self._uniform(data)).to(sizes)
        return sizes.flatten()

    def _first(self, num_rows: int) -> Tensor:
        """The numbers `iC + k` of the first rows, in their order."""
        priorities = self._priorities
        largest = priorities[:0]
        for some in priorities.split(max(NUMBERS_TOGETHER, num_rows)):
            largest = torch.cat([largest, some])
            largest = largest.topk(min(num_rows, len(largest))).values
        # Those of equal priorities in the order of their numbers, so that a larger part begins with a smaller one.
        numbers = (priorities >= largest[-1]).nonzero().flatten()
        return numbers[priorities[numbers].sort(descending=True, stable=True).indices[:num_rows]]

    def _split(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Data and columns of rows."""
        return numbers.div(self.num_outputs, rounding_mode="floor"), numbers % self.num_outputs

    def num_seen(self, num_rows: int) -> int:
        """How many data the first rows are of."""
        return self.num_data if num_rows == self.most else len(self._split(self._first(num_rows))[0].unique())

    def weights(self, num_rows: int) -> Float[Tensor, " m"]:
        """The weights of the first `m` rows, of which at least one and at most `most` may be asked for."""
        if num_rows == self.most:
            return torch.ones(num_rows, dtype=torch.float64)
        numbers = self._first(num_rows + 1)
        of_rows, following = self._priorities[numbers].double().split([num_rows, 1])
        data, columns = self._split(numbers[:num_rows])
        sizes = of_rows * self._uniform(data).gather(1, columns[:, None])[:, 0]
        return (following / sizes).clamp_min(1.0)

    def rows(self, start: int, stop: int, together: int = _TOGETHER) -> DatumRows:
        """The rows from number `start` on, without weights, in the dtype of the network.

        At most so many data go through the network `together`.
        """
        data, columns = self._split(self._first(stop)[start:])
        return self._rows(data, torch.nn.functional.one_hot(columns, self.num_outputs), together)

    def probes(self, num: int, together: int = _TOGETHER) -> DatumRows:
        """`φ_iᵀL_i z_i` with random signs `z_i` of some random data, whatever their sizes are."""
        data = self._uniform(torch.arange(self.num_data))[:, 0].argsort(stable=True)[:num]
        signs = SeededNoise(1, self.num_outputs, self.seed, 2 * self.stream + 1)(data)[0].sign()
        return self._rows(data, signs, together)

    def _rows(self, data: Tensor, directions: Float[Tensor, "n C"], together: int) -> DatumRows:
        together = max(1, min(together, _TOGETHER, self.ggn.features.batch_size))
        splits = zip(data.split(together), directions.split(together), strict=True)
        parts = (self.ggn.rows_along(some, along) for some, along in splits)
        first = next(parts)
        if 2 * first.formed.shape[1] <= first.size:
            return DatumRows.cat([first, *parts])
        # Factors would save less than half of the products. Rows that are formed whole are in memory only once.
        rows = first.formed.new_empty(len(data), first.size)
        filled = 0
        for part in chain([first], parts):
            rows[filled : filled + len(part)] = part.dense()
            filled += len(part)
        return DatumRows(first.size, rows)


# Random data at which a part and its half are compared. From 256 to 512 rows of 10,000 images the change was 0.15 to
# 0.24 in eleven of twelve sets of so many data, and 0.44 in one; of half as many it was 0.15 to 0.27, of twice as many
# 0.16 to 0.26, and 0.34 in one.
NUM_PROBES = 256


# Rows of the first part at most, whose double is the first that can be compared.
_FIRST = 256


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
            starts = range(0, num_rows, 4 * _TOGETHER)
            stops = (min(start + 4 * _TOGETHER, num_rows) for start in starts)
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


@dataclass
class Part:
    """The part of the data that stands for all of them, in the scaled coordinates of a prior.

    Where the curvature is another one, its rows are computed anew, for the same data and draws; a noise precision that
    all outputs share is a factor.

    Attributes:
        growth: what the sketch was made by.
        sketch: of the GGN of `growth`.
        tolerance: of its change.
        num_samples: as many eigenvectors are kept at least, since they take no more memory than the samples.
    """

    # The error of half of a part, by what the other half changes: that, and the error of the whole, which was 0.29 to
    # 0.62 of it (`grow`).
    _OF_HALF = 1.6
    # Eigenvectors that are left out change standard deviations by this part of the tolerance, or a few times as much at
    # inputs unlike the training data. With a third of it posteriors are a third larger.
    _CUT = 1 / 30
    # Eigenvectors that are kept at least where memory allows: fewer would save little, and are less accurate.
    _FEWEST = 64

    growth: Growth
    sketch: Sketch
    tolerance: float
    num_samples: int = 1

    @property
    def ggn(self) -> GGN:
        """The GGN that the sketch estimates, scaled."""
        return self.growth.sequence.ggn

    def of(self, ggn: GGN, prior: GaussianPrior) -> LowRank:
        """The curvature of an unscaled GGN, corrected for the precision of the prior, as accurate as that needs."""
        factor = _multiple(ggn, self.ggn)
        if factor is None:
            self._restart(ggn, prior)
            self._take(self.growth.sketch(self.sketch.num_rows))
            factor = 1.0
        sketch, alpha = self.sketch.times(factor), overall_precision(prior)
        spare = self.growth.spare_bytes
        least = max(self.num_samples, min(self._FEWEST, int(spare / (ggn.size * ggn.dtype.itemsize))))
        limits = (self._CUT * self.tolerance, self.tolerance, least, spare)
        if len(prior.names) > 1:
            return sketch.at(alpha).low_rank(prior.spread().double(), *limits)
        return sketch.low_rank(alpha, *limits)

    def without_rows(self) -> "Part":
        """What a later fit needs of it: how many rows were enough, and their eigenvalues."""
        return replace(self, growth=self.growth.without_rows(), sketch=self.sketch.without_rows())

    def grow(self, ggn: GGN, prior: GaussianPrior, max_rows: int) -> None:
        """Lets the part grow at the precision of a prior, unless the change is below the tolerance there."""
        factor = _multiple(ggn, self.ggn)
        if factor is None:
            self._restart(ggn, prior)
        shift = torch.tensor([overall_precision(prior) / (factor or 1.0)], dtype=torch.float64)
        self._take(grow(self.growth, lambda _: shift, self.tolerance, max_rows=max_rows), judged=True)

    def continued(
        self, growth: Growth, prior: GaussianPrior, likelihood: Likelihood, alpha: float, max_rows: int
    ) -> Sketch:
        """The sketch of a changed network by as many rows as were enough, and the change that is expected of it.

        Args:
            growth: of the changed network.
            prior: of the fit that this part was made for, and so is `likelihood`.
            likelihood: with the noise precision.
            alpha: the prior precision at which standard deviations are predicted.
            max_rows: at most so many rows.
        """
        rows, change = self._enough()
        if not growth.made:
            growth.sketch(growth.reachable(min(rows, max_rows)))
        sketch = growth.made[-1]
        factor = _multiple(replace(self.ggn, likelihood=likelihood), self.ggn) or 1.0
        before = self.sketch.dimension(overall_precision(prior) / factor)
        # The rows act as `c = 1 − γ/m` says.
        sketch.change = change * sketch.dimension(alpha) / before * rows / sketch.num_rows
        return sketch

    def _enough(self) -> tuple[int, float]:
        """Rows, and how much they change standard deviations: half of those that are there if that was seen."""
        made, sketch = self.growth.made, self.sketch
        off = self._OF_HALF * sketch.change
        if len(made) > 1 and sketch.num_rows < self.growth.sequence.most and off <= self.tolerance:
            return made[0].num_rows, off
        return sketch.num_rows, sketch.change

    def _restart(self, ggn: GGN, prior: GaussianPrior) -> None:
        old = self.growth.sequence
        scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
        self.growth = Growth(RandomRows(scaled, old.seed, old.stream), self.growth.bytes_)

    def _take(self, new: Sketch, judged: bool = False) -> None:
        if not judged:
            new.change = self.sketch.change
        self.sketch = new


def _multiple(ggn: GGN, other: GGN) -> float | None:
    """`c` with `B = c B'`, if it is known that there is one."""
    family, before = ggn.likelihood, other.likelihood
    if isinstance(family, Gaussian) and isinstance(before, Gaussian):
        ratios = family.noise_precisions() / before.noise_precisions()
        return float(ratios.flatten()[0]) if bool((ratios == ratios.flatten()[0]).all()) else None
    return 1.0 if ggn.is_at(other.outputs) else None


@dataclass(frozen=True)
class SketchSampler(FactoredSampler):
    """Samples of the posterior of a sketch; the mode by conjugate gradients on all data, preconditioned by it.

    Args:
        part: the sketch.
    """

    part: Part = field(kw_only=True)

    def curvature(self, ggn: GGN, prior: GaussianPrior) -> LowRank:
        return self.part.of(ggn, prior)

    def sample(self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Tensor | None = None) -> Solution:
        """Samples of the posterior of the sketch, and `γ` from its eigenvalues."""
        if len(prior.names) > 1:
            return super().sample(ggn, prior, draws, init)
        curvature, alpha = self.curvature(ggn, prior), overall_precision(prior)
        value = curvature.solve_root(draws.prior(ggn.size).to(ggn.device, ggn.dtype), alpha)
        no_error = torch.zeros(len(value), dtype=torch.float64, device=ggn.device)
        # The whole diagonal would take as long as the sketch itself; the trace is known, and a sum over samples is not
        # needed.
        traces = torch.full_like(no_error, curvature.dimension(alpha))
        leverage = value * curvature.matmul(value)
        return Solution(value, value, no_error, leverage, 0.0, converged=True, error=no_error, traces=traces)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        held, alpha = self.held, float(objective.precision.mean())
        solver = replace(self.mode, preconditioner=self.part.sketch.low_rank(alpha, 1e-2) if held is None else held)
        return solver.minimise(objective, init, description=description)
