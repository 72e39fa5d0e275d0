"""The training features `Φ`, the Jacobian of the outputs in the weights, by their products.

A mini-batch is a tensor of data indices; `None` means all data. Sums are over the data of the batch, unscaled.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.likelihoods.measurement import Measurement
from laplace_sampling.linear_model.datum_rows import DatumRows
from laplace_sampling.solvers.recorded import recorded

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
        """`φ_i` as dense rows: for methods that hold the Jacobian, or a part of it."""

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
        # A VJP for each measurement: often there are far fewer of them than outputs.
        eye = torch.eye(self.num_outputs, dtype=self.dtype, device=self.device)
        return torch.stack([self.vjp(eye[:, None], datum) for datum in batch.split(1)])


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
    eye = torch.eye(num_outputs, dtype=features.dtype, device=features.device)
    for datum in range(start, features.num_data):
        for first in range(0, num_outputs, most):
            # A VJP of a unit vector is a row: `features.rows` would hold all outputs of the datum.
            rows = features.vjp(eye[first : first + most, None], torch.tensor([datum]))
            yield datum * num_outputs + first, rows.double()
