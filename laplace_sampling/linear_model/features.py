"""The training features `Φ`, the Jacobian of the outputs in the weights, by their products.

A mini-batch is a tensor of data indices; `None` means all data. Sums are over the data of the batch, unscaled.

`DatumRows` are the gradients of each datum, factored where a layer uses its weights once. The gradient of a linear
layer's weights at a datum is an outer product, `D_i = g_i a_iᵀ`, so that two rows have the product `⟨D_i, D_j⟩ =
(g_iᵀg_j)(a_iᵀa_j)`: `m + k` multiplications instead of `mk`. Those of other layers, as convolutions and normalisations,
are formed.

`NetworkFeatures` are those of a network, by forward- and reverse-mode products.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout, num_rows, place, take
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.likelihoods.measurement import Measurement
from laplace_sampling.networks.layers import OfOutputs, Outer, jacobian_by_layers, vjp_by_layers
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.recorded import recorded


@dataclass(frozen=True)
class DatumRows:
    """Rows `φ_iᵀu_i` of some data, `[n, P]`, without all of their numbers.

    Attributes:
        size: `P`.
        formed: the part of the rows that is no outer product, `[n, p]`.
        places: of its columns among all; `None` where it has all columns in their order.
        outer: positions of each other layer, with `g` and `a`.
    """

    size: int
    formed: Float[Tensor, "n p"]
    places: Tensor | None = None
    outer: Sequence[Outer] = ()

    @classmethod
    def of_layers(cls, size: int, layers: Sequence[Outer]) -> "DatumRows":
        """The rows of layers that hold all weights; a single row of weights is formed."""
        rows = [(index[0], g * a) for index, g, a in layers if len(index) == 1]
        n, like = len(layers[0][1]), layers[0][1]
        formed = torch.cat([like.new_empty(n, 0), *(row for _, row in rows)], 1)
        places = torch.cat([layers[0][0].new_empty(0), *(index for index, _ in rows)])
        return cls(size, formed, places, [layer for layer in layers if len(layer[0]) > 1])

    @classmethod
    def cat(cls, parts: Sequence["DatumRows"]) -> "DatumRows":
        """The rows of one part after the other; formed ones if some parts are and others are not."""
        if not all(part.like(parts[0]) for part in parts):
            parts = [cls(part.size, part.dense()) for part in parts]
        outer = [
            (of_parts[0][0], torch.cat([g for _, g, _ in of_parts]), torch.cat([a for _, _, a in of_parts]))
            for of_parts in zip(*(part.outer for part in parts), strict=True)
        ]
        return replace(parts[0], formed=torch.cat([part.formed for part in parts]), outer=outer)

    @property
    def width(self) -> int:
        """Multiplications of a product of two rows."""
        return self.formed.shape[1] + sum(g.shape[1] + a.shape[1] for _, g, a in self.outer)

    def __len__(self) -> int:
        return len(self.formed)

    def dense(self) -> Float[Tensor, "n P"]:
        """All numbers of the rows."""
        if self.places is None:
            return self.formed
        rows = self.formed.new_zeros(len(self), self.size)
        rows[:, self.places] = self.formed
        for index, g, a in self.outer:
            rows[:, index.flatten()] = (g[:, :, None] * a[:, None]).flatten(1)
        return rows

    def scaled(self, scale: Float[Tensor, " P"]) -> "DatumRows":
        """The rows times a scale of each weight."""
        first = scale[0]
        if bool((scale == first).all()):
            return replace(self, formed=self.formed * first, outer=[(i, g * first, a) for i, g, a in self.outer])
        return DatumRows(self.size, self.dense() * scale)

    def like(self, other: "DatumRows") -> bool:
        """Whether the same layers are factored."""
        return len(self.outer) == len(other.outer) and (self.places is None) == (other.places is None)

    def narrowed(self, narrow: Callable[[Tensor], Tensor]) -> "DatumRows":
        """With other columns in place of the formed ones, for products only."""
        return replace(self, formed=narrow(self.formed))

    def squares(self) -> Float[Tensor, " n"]:
        """The squared norm of each row, in float64."""
        total = torch.zeros(len(self), dtype=torch.float64, device=self.formed.device)
        # All of them in float64 would be as much memory again, twice.
        for some in self.formed.split(max(1, NUMBERS_TOGETHER // max(1, len(self.formed))), 1):
            total += some.double().square().sum(1)
        for _, g, a in self.outer:
            total = total + g.double().square().sum(1) * a.double().square().sum(1)
        return total

    def squares_of_columns(self) -> Float[Tensor, " P"]:
        """The squared norm of each column."""
        total = self.formed.new_zeros(self.size)
        total[slice(None) if self.places is None else self.places] = self.formed.square().sum(0)
        for index, g, a in self.outer:
            total[index] = g.square().T @ a.square()
        return total

    @recorded
    def products(self, other: "DatumRows") -> Float[Tensor, "n m"]:
        """The products of all rows with all rows of another one of the same network, in float64."""
        if not self.like(other):
            return inner_products(self.dense(), other.dense())
        total = inner_products(self.formed, other.formed)
        for (_, g, a), (_, h, b) in zip(self.outer, other.outer, strict=True):
            total += (g.double() @ h.double().T) * (a.double() @ b.double().T)
        return total


@dataclass(frozen=True)
class OutputRows:
    """Jacobians `φ_i` of some data, `[n, C, P]`, by layers.

    Row `c` of a linear layer that a datum uses once is an outer product, `δ_c ⊗ h`, whose `h` is that of all outputs:
    `φφᵀ = (hᵀh) δδᵀ` and `φUᵀ = δ (U h)` take `C` times fewer operations than rows.

    Attributes:
        starts: of each weight in the flat vector, by name.
        layers: that hold all weights.
    """

    starts: dict[str, int]
    layers: Sequence[OfOutputs]

    def to(self, dtype: torch.dtype) -> "OutputRows":
        """The rows in another dtype."""
        return replace(self, layers=[(layer, tuple(t.to(dtype) for t in rows)) for layer, rows in self.layers])

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Where each tensor of weights begins, with `δ` and `h`, or its formed rows, `[n, C, p]`."""
        for layer, (rows, *inputs) in self.layers:
            start, of_bias = (self.starts[name] for name in (layer.names * 2)[:2])
            with_bias = len(layer.names) > 1
            if inputs and inputs[0].shape[2] > 1:
                rows, inputs = formed(rows, inputs[0]).flatten(2), []
            elif inputs:
                rows, inputs = rows[..., 0], [inputs[0][..., 0]]
            if inputs:
                yield start, rows, inputs[0][:, :-1] if with_bias else inputs[0]
            elif with_bias:
                rows = rows.unflatten(2, (-1, layer.index.shape[2]))
                yield start, rows[..., :-1].flatten(2), None
            else:
                yield start, rows, None
            if with_bias:
                yield of_bias, rows if inputs else rows[..., -1], None

    def products(self, u: Float[Tensor, "r P"]) -> Float[Tensor, "n C r"]:
        """`φ_i u_jᵀ`."""
        total = []
        for start, rows, h in self._parts():
            if h is None:
                total.append(rows @ u[:, start : start + rows.shape[2]].T)
                continue
            m, k = rows.shape[2], h.shape[1]
            # Views, since a copy would take longer than the product for a few data.
            of_h = u[:, start : start + m * k].unflatten(1, (m, k)) @ h.T.expand(len(u), k, len(h))
            total.append(rows @ of_h.permute(2, 1, 0))
        return sum(total[1:], total[0])

    def weighted(self, w: Float[Tensor, " P"] | None = None) -> Float[Tensor, "n C C"]:
        """`φ_i diag(w) φ_iᵀ`, by default with ones."""
        total = []
        for start, rows, h in self._parts():
            if h is None:
                left = rows if w is None else rows * w[start : start + rows.shape[2]]
            else:
                m, k = rows.shape[2], h.shape[1]
                squares = h.square()
                of_h = squares.sum(1, keepdim=True) if w is None else squares @ w[start : start + m * k].reshape(m, k).T
                left = rows * of_h[:, None]
            total.append(left @ rows.mT)
        return sum(total[1:], total[0])


def formed(g: Float[Tensor, "n C m T"], a: Float[Tensor, "n k T"]) -> Float[Tensor, "n C m k"]:
    """The rows of a layer that each datum uses `T` times."""
    return (g.flatten(1, 2) @ a.mT).unflatten(1, g.shape[1:3])


def inner_products(left: Float[Tensor, "n p"], right: Float[Tensor, "m p"]) -> Float[Tensor, "n m"]:
    """`left rightᵀ` in float64.

    Where the data decide, a variance is the difference of much larger numbers: products in float32 would leave an error
    of `10⁻⁷` of the prior's variance, in a test 1 % of a posterior's that is 10⁻⁵ of it.
    """
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    width = max(1, NUMBERS_TOGETHER // max(1, len(left), len(right)))
    for a, b in zip(left.split(width, 1), right.split(width, 1), strict=True):
        total.addmm_(a.double(), b.double().T)
    return total


# `u ↦ Bu` of a batch, `[K, n, C]` both.
Curvature = Callable[[Tensor], Tensor]


# Bytes of a block of rows of the Jacobian. On 400 data of 10 outputs and 12,000 weights, half and twice as many changed
# the time by less than 10 %.
BLOCK_BYTES = 2**28


class Features(ABC):
    """`Φ`, the Jacobian of the outputs on the training data in the weights, `[N, C, P]`, as products.

    `products` counts JVPs and VJPs in units of one datum and one vector.
    """

    num_data: int
    num_outputs: int
    size: int
    batch_size: int

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def jvp(self, v: Float[Tensor, "K P"], batch: Tensor) -> Float[Tensor, "K n C"]:
        """`φ_i v_k` for the data of a batch."""

    @abstractmethod
    def vjp(self, u: Float[Tensor, "K n C"], batch: Tensor) -> Float[Tensor, "K P"]:
        """`Σ_i φ_iᵀ u_ki` over the data of a batch."""

    def ggn(self, v: Float[Tensor, "K P"], batch: Tensor, curvature: Curvature) -> Float[Tensor, "K P"]:
        """`Σ_i φ_iᵀ B_i φ_i v_k` over the data of a batch, `curvature` being `u ↦ Bu`."""
        # A network overrides this: one forward pass then serves both products.
        return self.vjp(curvature(self.jvp(v, batch)), batch)

    @abstractmethod
    def vjp_each(self, u: Float[Tensor, "n C"], batch: Tensor) -> Float[Tensor, "n P"]:
        """`φ_iᵀ u_i` of each datum of a batch, not summed."""

    def datum_rows(self, u: Float[Tensor, "n C"], batch: Tensor) -> DatumRows:
        """`φ_iᵀ u_i` of each datum of a batch, by layers of the network where that is possible."""
        return DatumRows(self.size, self.vjp_each(u, batch))

    @abstractmethod
    def rows(self, batch: Tensor) -> Float[Tensor, "n C P"]:
        """`φ_i` of the data of a batch, all its numbers: for methods that hold the Jacobian, or a part of it."""

    def rows_by_layers(self, batch: Tensor) -> OutputRows | None:
        """`φ_i` of the data of a batch, by layers of a network whose weights are all in layers."""
        return None

    def rows_of(self, datum: int, outputs: slice) -> Float[Tensor, "c P"]:
        """Some rows of a `φ_i`, by VJPs of unit vectors."""
        places = torch.arange(self.num_outputs)[outputs, None, None]
        units = torch.zeros(len(places), 1, self.num_outputs).scatter_(2, places, 1)
        return self.vjp(units.to(self.device, self.dtype), torch.tensor([datum]))

    def chunks(self, batch: Tensor | None = None) -> Iterator[Tensor]:
        """The indices of a batch, by default of all data, in parts of at most `batch_size`."""
        indices = torch.arange(self.num_data) if batch is None else batch
        yield from indices.split(self.batch_size)

    @property
    def processes(self) -> Processes:
        """The processes that share out the data."""
        return ALONE

    @property
    def collective(self) -> bool:
        """Whether each product takes all processes."""
        return False

    @property
    def counts(self) -> MutableMapping[str, int]:
        """The counts of products, if there are any."""
        return {}

    def own(self, batch: Tensor) -> Tensor | slice:
        """Where in a batch the data of this process are."""
        return slice(None)

    @property
    def num_observations(self) -> int:
        """`N·C`."""
        return self.num_data * self.num_outputs

    def own_chunks(self, batch: Tensor | None = None) -> Iterator[Tensor]:
        """`chunks` of those data of a batch that are the part of this process, inside of `summing`."""
        indices = torch.arange(self.num_data) if batch is None else batch
        own = indices[self.own(indices)]
        if self.collective:
            yield from self.processes.even_pieces(own, len(indices), self.batch_size)
        else:
            yield from self.chunks(own) if len(own) else ()

    @contextmanager
    def summing(self, *totals: Tensor) -> Iterator[None]:
        """Sums over the data of a batch, which begin with zero: inside over `own_chunks`, afterwards over all.

        This is all that methods and solvers need to know of several processes.
        """
        with self.processes.counting(self.counts), self.local_only():
            yield
        self.processes.sum(*totals)

    def local_only(self) -> AbstractContextManager[None]:
        """Inside, each process works on its own data, unless each product takes all of them."""
        return nullcontext() if self.collective else self.processes.local_only()

    def by_datum(
        self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dim: int, dtype: torch.dtype
    ) -> Tensor:
        """A function of batches on all data, in chunks, each in the process whose data they are.

        Args:
            function: from indices to one row for each, along an axis.
            shape: of the result.
            dim: the axis of the data.
            dtype: of the result.
        """
        # Filled, since the parts of several processes are summed.
        result = torch.zeros(shape, dtype=dtype, device=self.device)
        with self.summing(result):
            for chunk in self.own_chunks():
                result.index_copy_(dim, chunk.to(self.device), function(chunk).to(dtype))
        return result

    def in_chunks(self, batch_size: int) -> "Features":
        """Returns the features with at most `batch_size` data at a time."""
        # A shallow copy: features of different batch size share data and matrices.
        other = copy.copy(self)
        other.batch_size = max(1, min(self.batch_size, batch_size))
        return other

    def in_float64(self) -> "Features":
        """Returns the features computed in float64 where that is possible, else these."""
        return self

    @recorded
    def outputs(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K N C"]:
        """`φ_i v_k` for all data."""
        shape = (len(v), self.num_data, self.num_outputs)
        return self.by_datum(lambda batch: self.jvp(v, batch), shape, 1, self.dtype)


class DerivedFeatures(Features):
    """`T Φ_D S`: features made from others by linear maps, on the same device and in the same dtype.

    A subclass overrides what differs from the identity: the data `D`, the map `S` of weights, which is symmetric, the
    map `T` of outputs, and its transpose.
    """

    def __init__(self, features: Features, num_data: int, num_outputs: int) -> None:
        self.features, self.num_data, self.num_outputs = features, num_data, num_outputs
        self.size, self.batch_size = features.size, features.batch_size

    def of_data(self, batch: Tensor) -> Tensor:
        """The indices of a batch among the data of the other features."""
        return batch

    def of_weights(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K P"]:
        """`S v`."""
        return v

    def of_outputs(self, f: Float[Tensor, "K n D"], batch: Tensor) -> Float[Tensor, "K n C"]:
        """`T f`."""
        return f

    def to_outputs(self, u: Float[Tensor, "*K n C"], batch: Tensor) -> Float[Tensor, "*K n D"]:
        """`Tᵀu`."""
        return u

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def dtype(self) -> torch.dtype:
        return self.features.dtype

    @property
    def processes(self) -> Processes:
        return self.features.processes

    @property
    def collective(self) -> bool:
        return self.features.collective

    @property
    def counts(self) -> MutableMapping[str, int]:
        return self.features.counts

    def own(self, batch: Tensor) -> Tensor | slice:
        return self.features.own(self.of_data(batch))

    def in_float64(self) -> Features:
        other = copy.copy(self)
        other.features = self.features.in_float64()
        return other

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.of_outputs(self.features.jvp(self.of_weights(v), self.of_data(batch)), batch)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.of_weights(self.features.vjp(self.to_outputs(u, batch), self.of_data(batch)))

    def ggn(self, v: Tensor, batch: Tensor, curvature: Curvature) -> Tensor:
        def of_others(f: Tensor) -> Tensor:
            return self.to_outputs(curvature(self.of_outputs(f, batch)), batch)

        return self.of_weights(self.features.ggn(self.of_weights(v), self.of_data(batch), of_others))

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.of_weights(self.features.vjp_each(self.to_outputs(u, batch), self.of_data(batch)))

    def datum_rows(self, u: Tensor, batch: Tensor) -> DatumRows:
        return self.features.datum_rows(self.to_outputs(u, batch), self.of_data(batch))

    def rows(self, batch: Tensor) -> Tensor:
        return self.of_weights(self.features.rows(self.of_data(batch)))


class DenseFeatures(Features):
    """`Φ` held in memory, `[N, C, P]`: for the exact method, and for tests of solvers without a network.

    Args:
        matrix: `Φ`.
        batch_size: data that are taken together, by default all.
        precision: in which the rows were computed, by default that of the matrix.
    """

    def __init__(
        self, matrix: Float[Tensor, "N C P"], batch_size: int | None = None, precision: torch.dtype | None = None
    ) -> None:
        self.matrix, self.precision = matrix, precision or matrix.dtype
        self.num_data, self.num_outputs, self.size = matrix.shape
        self.batch_size = batch_size or self.num_data

    @classmethod
    def of(cls, features: Features, dtype: torch.dtype = torch.float64) -> "DenseFeatures":
        shape = (features.num_data, features.num_outputs, features.size)
        matrix = features.by_datum(lambda batch: features.rows(batch).to(dtype), shape, 0, dtype)
        return cls(matrix, precision=features.dtype)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def rows(self, batch: Tensor) -> Tensor:
        # A pass over all data in order gets the matrix itself: indexing would copy it for each product.
        is_all = len(batch) == self.num_data and bool((batch[1:] > batch[:-1]).all())
        return self.matrix if is_all else self.matrix[batch.to(self.device)]

    def rows_of(self, datum: int, outputs: slice) -> Tensor:
        return self.matrix[datum, outputs]

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        rows = self.rows(batch)
        return (v @ rows.flatten(0, 1).T).reshape(len(v), len(batch), self.num_outputs)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return u.flatten(1) @ self.rows(batch).flatten(0, 1)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return (u[:, None] @ self.rows(batch))[:, 0]


class ScaledFeatures(DerivedFeatures):
    """`Φ diag(s)`: the features in coordinates where the prior is isotropic within its groups."""

    def __init__(self, features: Features, scale: Float[Tensor, " P"]) -> None:
        super().__init__(features, features.num_data, features.num_outputs)
        self.scale = scale.to(features.device, features.dtype)

    def of_weights(self, v: Tensor) -> Tensor:
        return v * self.scale

    def datum_rows(self, u: Tensor, batch: Tensor) -> DatumRows:
        return super().datum_rows(u, batch).scaled(self.scale)


class WeightedFeatures(DerivedFeatures):
    """`R^{-1/2}Φ`: each row `φ_ic` has its own weight.

    Args:
        features: `Φ`.
        weights: `R^{-1/2}`, `[N, C]`.
    """

    def __init__(self, features: Features, weights: Float[Tensor, "N C"]) -> None:
        super().__init__(features, features.num_data, features.num_outputs)
        self.weights = weights.to(features.device, features.dtype)

    def of_outputs(self, f: Tensor, batch: Tensor) -> Tensor:
        return f * self.weights[batch]

    def to_outputs(self, u: Tensor, batch: Tensor) -> Tensor:
        return u * self.weights[batch]

    def rows(self, batch: Tensor) -> Tensor:
        return super().rows(batch) * self.weights[batch][..., None]


class ObservedFeatures(DerivedFeatures):
    """`TΦ`: the features of linear measurements of each datum, `[N, m, P]` (thesis eq. 7.1, 7.5–7.6)."""

    def __init__(self, features: Features, measurement: Measurement) -> None:
        super().__init__(features, features.num_data, measurement.shape[0])
        self.measurement = measurement

    def of_outputs(self, f: Tensor, batch: Tensor) -> Tensor:
        return self.measurement.apply(f)

    def to_outputs(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.measurement.adjoint(u)

    def rows(self, batch: Tensor) -> Tensor:
        # A VJP for each measurement: often there are far fewer of them than outputs. A few at a time, for each takes a
        # vector of all outputs.
        parts = torch.arange(self.num_outputs).split(max(1, NUMBERS_TOGETHER // self.features.num_outputs))
        rows = [self.rows_of(int(datum), slice(int(p[0]), int(p[-1]) + 1)) for datum in batch for p in parts]
        return torch.cat(rows).reshape(len(batch), self.num_outputs, self.size)


class SomeFeatures(DerivedFeatures):
    """The rows of `Φ` that belong to some data.

    Args:
        features: `Φ`.
        some: indices of the data.
    """

    def __init__(self, features: Features, some: Tensor) -> None:
        super().__init__(features, len(some), features.num_outputs)
        self.some = some

    def of_data(self, batch: Tensor) -> Tensor:
        return self.some[batch]

    def rows_by_layers(self, batch: Tensor) -> OutputRows | None:
        return self.features.rows_by_layers(self.of_data(batch))


def some_of(features: Features, num: int, seed: int | None) -> Tensor:
    """Indices of a random part of the data, in order, or of the first ones."""
    if seed is None:
        return torch.arange(num)
    chosen = torch.randperm(features.num_data, generator=torch.Generator().manual_seed(seed))[:num]
    return chosen.sort().values


def row_blocks(features: Features, block_bytes: float = BLOCK_BYTES, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows of `Φ`, `[m, P]` in float64, each with the index of its first row; from datum `start` on.

    A block holds whole data, or some outputs of one datum where the Jacobian of a datum is larger than a block.
    """
    most = max(1, int(block_bytes / (8 * features.size)))
    num_outputs, num_data = features.num_outputs, most // features.num_outputs
    if num_data:
        for first in range(start, features.num_data, num_data):
            block = torch.arange(first, min(first + num_data, features.num_data))
            rows = [features.rows(batch).flatten(0, 1).double() for batch in features.chunks(block)]
            yield first * num_outputs, rows[0] if len(rows) == 1 else torch.cat(rows)
        return
    for datum in range(start, features.num_data):
        for first in range(0, num_outputs, most):
            yield datum * num_outputs + first, features.rows_of(datum, slice(first, first + most)).double()


class NetworkFeatures(Features):
    """`Φ` of a network on its training data, by forward- and reverse-mode products.

    Args:
        network: linearised network.
        data: training data.
        layout: layout of the outputs of a datum; the outputs of a batch with less padding are widened to it by zeros.
    """

    def __init__(self, network: Linearisation, data: TrainingData, layout: Layout) -> None:
        self.network, self.data, self.layout = network, data, layout
        self.num_data, self.num_outputs = data.num_data, layout.size
        self.size, self.batch_size = network.num_parameters, data.batch_size

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def processes(self) -> Processes:
        return self.data.processes

    @property
    def collective(self) -> bool:
        return self.processes.size > 1 and self.network.shell.mesh is not None

    @property
    def counts(self) -> MutableMapping[str, int]:
        return self.network.products

    def own(self, batch: Tensor) -> Tensor | slice:
        if self.processes.size == 1:
            return slice(None)
        if self.collective:
            part = self.processes.part(len(batch))
            return slice(part.start, part.stop)
        part = self.data.part
        return (batch >= part.start) & (batch < part.stop)

    def in_float64(self) -> Features:
        if self.dtype == torch.float64:
            return self
        other = copy.copy(self)
        other.network = in_float64_at(self.network, self.inputs(torch.tensor([0]))[0])
        return self if other.network is self.network else other

    def inputs(self, batch: Tensor) -> tuple[Any, Layout]:
        """The inputs, and the layout of the outputs that the network gives for them."""
        # Only ragged data need a forward pass for the layout, which depends on the padding of each batch.
        x = place(self.data.inputs(batch), self.device, self.dtype)
        return x, self.network.evaluate(x)[1] if self.data.ragged else self.layout

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        return layout.widen(self.network.jvp(x, v), self.layout)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        return self.network.vjp(x, self.layout.narrow(u, layout))

    def ggn(self, v: Tensor, batch: Tensor, curvature: Curvature) -> Tensor:
        x, layout = self.inputs(batch)
        if layout == self.layout:
            return self.network.ggn(x, v, curvature)
        return self.network.ggn(x, v, lambda u: self.layout.narrow(curvature(layout.widen(u, self.layout)), layout))

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        return self.network.vjp_each(x, self.layout.narrow(u, layout))

    def datum_rows(self, u: Tensor, batch: Tensor) -> DatumRows:
        # Layers are those of a whole network, not of some of its weights or a head.
        if type(self.network).vjp_each is Linearisation.vjp_each:
            x, layout = self.inputs(batch)
            layers = vjp_by_layers(self.network, x, self.layout.narrow(u, layout))
            if layers is not None:
                return DatumRows.of_layers(self.size, layers)
        return super().datum_rows(u, batch)

    def rows_by_layers(self, batch: Tensor) -> OutputRows | None:
        network = self.network
        # As for `datum_rows`; outputs of several shapes are widened.
        if type(network).vjp_each is not Linearisation.vjp_each or self.data.ragged:
            return None
        layers = jacobian_by_layers(network, self.inputs(batch)[0])
        if layers is None:
            return None
        ends = itertools.accumulate(network.shell.sizes, initial=0)
        return OutputRows(dict(zip(network.names, ends, strict=False)), layers)

    def rows(self, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        rows = self.network.jacobian(x)
        return rows if layout == self.layout else layout.widen(rows.mT, self.layout).mT


def in_float64_at(network: Linearisation, x: Any, copied: Linearisation | None = None) -> Linearisation:
    """Returns a copy of the network in float64, or the network itself if that fails or gives no float64 outputs.

    It runs the copy once, and treats any error of the copying or of the run as a failure.

    Args:
        network: the linearised network.
        x: inputs to try it at; one datum is enough.
        copied: the result of `network.in_float64()`, if it has been made already.
    """
    try:
        other = copied or network.in_float64()
        computed = other(place(x, other.device, other.dtype)).dtype
    except Exception:  # some networks cannot be copied, or compute in a dtype of their own
        return network
    return other if computed == torch.float64 else network


def features_at(
    network: Linearisation, x: Any, batch_size: int | None = None, layout: Layout | None = None
) -> NetworkFeatures:
    """The features `φ(x)` of a network at inputs without targets, `[N, ...]`.

    Args:
        network: linearised network.
        x: inputs as the network takes them.
        batch_size: number of inputs that go through the network together, by default all.
        layout: layout of the outputs, if it is known; else one input goes through the network.
    """
    layout = layout or network.evaluate(take(x, slice(1)))[1]
    return NetworkFeatures(network, TrainingData.unlabelled(x, batch_size or num_rows(x)), layout)
