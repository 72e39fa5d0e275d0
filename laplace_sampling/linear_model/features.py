"""The training features `Φ` and the generalised Gauss-Newton matrix `M = Σᵢ φᵢᵀ Bᵢ φᵢ`, by their products.

A mini-batch is a tensor of data indices; `None` means all data. Sums are over the data of the batch, unscaled.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout, num_rows, place, take
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.operator import Operator

__all__ = [
    "GGN",
    "DenseFeatures",
    "DerivedFeatures",
    "Features",
    "NetworkFeatures",
    "ScaledFeatures",
    "WhiteNoise",
]


# `u ↦ Bu` of a batch, `[K, n, C]` both.
Curvature = Callable[[Tensor], Tensor]

# Numbers of the Jacobian in memory at once where it is needed row by row, and of random signs.
_BLOCK, _SIGNS = 2**24, 2**18


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
        return self.vjp(curvature(self.jvp(v, batch)), batch)

    @abstractmethod
    def vjp_each(self, u: Float[Tensor, "n C"], batch: Tensor) -> Float[Tensor, "n P"]:
        """`φ_iᵀ u_i` of each datum of a batch by itself."""

    @abstractmethod
    def rows(self, batch: Tensor) -> Float[Tensor, "n C P"]:
        """`φ_i` in full: for the exact method only."""

    def chunks(self, batch: Tensor | None = None) -> Iterator[Tensor]:
        """The indices of a batch, by default of all data, in pieces that fit the network."""
        indices = torch.arange(self.num_data) if batch is None else batch
        yield from indices.split(self.batch_size)

    def in_chunks(self, most: int) -> "Features":
        """The same features, at most so many data at a time."""
        other = copy.copy(self)
        other.batch_size = max(1, min(self.batch_size, most))
        return other

    def in_float64(self) -> "Features":
        """The same features computed in float64, where they can be."""
        return self

    def outputs(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K N C"]:
        """`φ_i v_k` for all data."""
        return torch.cat([self.jvp(v, batch) for batch in self.chunks()], dim=1)


class DerivedFeatures(Features):
    """Features that are made from others, on the same device and of the same dtype."""

    features: Features

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def dtype(self) -> torch.dtype:
        return self.features.dtype

    def in_float64(self) -> Features:
        other = copy.copy(self)
        other.features = self.features.in_float64()
        return other


class NetworkFeatures(Features):
    """`Φ` of a network on its training data, by forward- and reverse-mode products.

    Args:
        network: the linearised network.
        data: the training data.
        layout: of the outputs of a datum; outputs of a batch that is padded less are widened to it, with zeros.
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

    def in_float64(self) -> Features:
        if self.dtype == torch.float64:
            return self
        other = copy.copy(self)
        try:
            other.network = self.network.in_float64()
            computed = other.network(other.inputs(torch.tensor([0]))[0]).dtype
        except Exception:  # a network may hold anything: one that cannot be copied or computes in its own dtype
            return self
        return other if computed == torch.float64 else self

    def inputs(self, batch: Tensor) -> tuple[Any, Layout]:
        """The inputs, and the layout of the outputs that the network gives for them."""
        x = place(self.data.inputs(batch), self.device, self.dtype)
        return x, self.network.evaluate(x)[1] if self.data.ragged else self.layout

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        x, own = self.inputs(batch)
        return own.widen(self.network.jvp(x, v), self.layout)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        x, own = self.inputs(batch)
        return self.network.vjp(x, self.layout.narrow(u, own))

    def ggn(self, v: Tensor, batch: Tensor, curvature: Curvature) -> Tensor:
        x, own = self.inputs(batch)
        if own == self.layout:
            return self.network.ggn(x, v, curvature)
        return self.network.ggn(x, v, lambda u: self.layout.narrow(curvature(own.widen(u, self.layout)), own))

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        x, own = self.inputs(batch)
        return self.network.vjp_each(x, self.layout.narrow(u, own))

    def rows(self, batch: Tensor) -> Tensor:
        x, own = self.inputs(batch)
        rows = self.network.jacobian(x)
        return rows if own == self.layout else own.widen(rows.mT, self.layout).mT


class DenseFeatures(Features):
    """`Φ` held in memory, `[N, C, P]`: the exact method, and solvers tested without a network."""

    def __init__(self, matrix: Float[Tensor, "N C P"], batch_size: int | None = None) -> None:
        self.matrix = matrix
        self.num_data, self.num_outputs, self.size = matrix.shape
        self.batch_size = batch_size or self.num_data

    @classmethod
    def of(cls, features: Features, dtype: torch.dtype = torch.float64) -> "DenseFeatures":
        return cls(torch.cat([features.rows(batch).to(dtype) for batch in features.chunks()]))

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def rows(self, batch: Tensor) -> Tensor:
        # A pass over all data in order is a view, not a copy.
        full = len(batch) == self.num_data and bool((batch[1:] > batch[:-1]).all())
        return self.matrix if full else self.matrix[batch.to(self.device)]

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
        self.features, self.scale = features, scale.to(features.device, features.dtype)
        self.num_data, self.num_outputs = features.num_data, features.num_outputs
        self.size, self.batch_size = features.size, features.batch_size

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.features.jvp(v * self.scale, batch)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp(u, batch) * self.scale

    def ggn(self, v: Tensor, batch: Tensor, curvature: Curvature) -> Tensor:
        return self.features.ggn(v * self.scale, batch, curvature) * self.scale

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp_each(u, batch) * self.scale

    def rows(self, batch: Tensor) -> Tensor:
        return self.features.rows(batch) * self.scale


class WhiteNoise(ABC):
    """Standard normal noise that belongs to data: the same numbers for a datum in whatever batch it comes."""

    num_samples: int

    @abstractmethod
    def __call__(self, batch: Tensor) -> Float[Tensor, "K n C"]: ...

    @abstractmethod
    def parts(self, rows: int) -> "Sequence[WhiteNoise]":
        """The same noise, at most so many samples at a time."""


@dataclass(frozen=True)
class GGN(Operator):
    """`M = Σᵢ φᵢᵀ B(fᵢ) φᵢ`, the curvature taken at given outputs `f`, `[N, C]` (thesis ch. 2, `M = ΦᵀBΦ`).

    `targets` are for likelihoods whose curvature depends on them, as by labels that are ignored.
    """

    features: Features
    likelihood: Likelihood
    outputs: Float[Tensor, "N C"]
    targets: Tensor | None = None

    def _targets(self, batch: Tensor) -> Tensor | None:
        return None if self.targets is None else self.targets[batch]

    @property
    def like(self) -> Features:
        return self.features

    def matmul(self, v: Tensor, batch: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        total = torch.zeros_like(v)
        start = 0
        for chunk in self.features.chunks(batch):
            scale = None if weights is None else weights[start : start + len(chunk)]
            total += self.features.ggn(v, chunk, lambda u, chunk=chunk, scale=scale: self._curvature(u, chunk, scale))
            start += len(chunk)
        return total

    def _curvature(self, u: Tensor, batch: Tensor, weights: Tensor | None) -> Tensor:
        """`w_i B_i u`."""
        product = self.likelihood.curvature(self.outputs[batch], u, self._targets(batch))
        return product if weights is None else product * weights.to(product)[:, None]

    def sizes(self) -> Tensor:
        """`Tr Bᵢ` by random signs: features differ less between data than the curvature of the loss does."""
        signs = torch.randint(2, (32, 1, self.outputs.shape[1]), generator=torch.Generator().manual_seed(0)) * 2 - 1
        traces = []
        for chunk in torch.arange(len(self.outputs)).split(max(1, _SIGNS // (32 * self.outputs.shape[1]))):
            f = self.outputs[chunk]
            roots = self.likelihood.root_transpose(f, signs.to(f).expand(-1, *f.shape), self._targets(chunk))
            traces.append(roots.square().sum(-1).mean(0))
        return torch.cat(traces).double().cpu()

    def root_matmul(self, noise: WhiteNoise, batch: Tensor | None = None) -> Float[Tensor, "K P"]:
        """`Σᵢ φᵢᵀ Lᵢ z_i` for white `z`: a draw of `N(0, M)`, one VJP a datum and sample."""
        total = None
        for chunk in self.features.chunks(batch):
            white = noise(chunk).to(self.device, self.dtype)
            cotangent = self.likelihood.root(self.outputs[chunk], white, self._targets(chunk))
            part = self.features.vjp(cotangent, chunk)
            total = part if total is None else total + part
        assert total is not None
        return total

    def random_rows(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        f = self.outputs[batch]
        white = torch.randn(f.shape, generator=generator).to(f)
        return self.features.vjp_each(self.likelihood.root(f, white, self._targets(batch)), batch)

    def root_rows(self) -> Iterator[Tensor]:
        few = max(1, _BLOCK // (self.features.num_outputs * self.size))
        for chunk in (part for batch in self.features.chunks() for part in batch.split(few)):
            f, y = self.outputs[chunk], self._targets(chunk)
            rows = self.features.rows(chunk).permute(2, 0, 1)  # the root acts on C, and is fast along memory
            yield self.likelihood.root_transpose(f, rows.contiguous(), y).flatten(1).T

    def diagonal(self) -> Float[Tensor, " P"]:
        """`diag(M)`, exactly, by `C` VJPs a datum."""
        total = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        for rows in self.root_rows():
            total += (rows**2).sum(0)
        return total

    def trace(self) -> float:
        """`Tr M`, exactly, by `C` VJPs a datum."""
        return sum(float(rows.double().square().sum()) for rows in self.root_rows())


# Bytes that blocks of rows of the Jacobian take.
BLOCK_BYTES = 2**28


def features_at(
    network: Linearisation, x: Any, batch_size: int | None = None, layout: Layout | None = None
) -> NetworkFeatures:
    """The features `φ(x)` of a network at inputs without targets, `[N, ...]`.

    Args:
        network: the linearised network.
        x: inputs as the network takes them.
        batch_size: inputs that go through the network together, by default all.
        layout: of the outputs, where it is known; else the network is asked.
    """
    layout = layout or network.evaluate(take(x, slice(1)))[1]
    return NetworkFeatures(network, TrainingData.unlabelled(x, batch_size or num_rows(x)), layout)


def row_blocks(features: Features, block_bytes: float = BLOCK_BYTES, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows of `Φ`, `[m, P]` in float64, each with the index of its first row; from datum `start` on.

    A block is of whole data, or of some outputs of one datum where the Jacobian of a datum is larger than a block.
    """
    num_outputs = features.num_outputs
    limit = max(1, int(block_bytes / (8 * features.size)))
    if start == features.num_data:
        return
    if num_outputs <= limit:
        data = torch.arange(start, features.num_data)
        for block in data.split(limit // num_outputs):
            rows = [features.rows(batch).flatten(0, 1).double() for batch in features.chunks(block)]
            yield int(block[0]) * num_outputs, rows[0] if len(rows) == 1 else torch.cat(rows)
        return
    eye = torch.eye(num_outputs, dtype=features.dtype, device=features.device)
    for datum in range(start, features.num_data):
        for part in torch.arange(num_outputs).split(limit):
            rows = features.vjp(eye[part.to(eye.device), None], torch.tensor([datum]))
            yield datum * num_outputs + int(part[0]), rows.double()
