"""The generalised Gauss-Newton matrix `M = Σᵢ φᵢᵀ Bᵢ φᵢ` of a linear model, by its products."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import SeededNoise
from laplace_sampling.linear_model.features import BLOCK_BYTES, DatumRows, Features, ScaledFeatures
from laplace_sampling.solvers.dense import DenseCurvature, as_number
from laplace_sampling.solvers.lapack import sum_of_squares
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.recorded import recorded


def first_of(rows: Float[Tensor, "N ..."]) -> Tensor:
    """The row of the first datum, to half of its digits, by which whoever records calls tells them apart.

    Roundings of products depend on how many processes share out the data.
    """
    return rows[:1].to(torch.float32 if rows.dtype == torch.float64 else torch.bfloat16)


@dataclass(frozen=True)
class GGN(Operator):
    """`M = Σᵢ φᵢᵀ B(fᵢ) φᵢ`, the curvature taken at given outputs `f`, `[N, C]` (thesis ch. 2, `M = ΦᵀBΦ`).

    Attributes:
        features: `Φ`.
        likelihood: of the curvature `B`.
        outputs: `f`.
        targets: for likelihoods whose curvature depends on them, for instance on labels that are ignored.
        held: keeps `M` in full, for dense algebra on few weights.
    """

    # Random signs for each trace, where there are more outputs. For confident outputs of 10 classes the error of
    # `sizes` was 5 %, with half as many signs 11 %, with twice as many 3 %; they only choose which data are sampled
    # more often.
    _SIGNS = 32

    features: Features
    likelihood: Likelihood
    outputs: Float[Tensor, "N C"] = field(compare=False)
    targets: Tensor | None = field(default=None, compare=False)
    held: "HeldCurvature | None" = field(default=None, compare=False)

    def key(self) -> tuple[Any, ...]:
        """Tells a recorder products of this curvature from those of others (`solvers.recorded`)."""
        return (first_of(self.outputs), self.likelihood.noise_precisions())

    def _targets(self, batch: Tensor) -> Tensor | None:
        return None if self.targets is None else self.targets[batch]

    def outputs_of(self, batch: Tensor) -> Float[Tensor, "n C"]:
        """`f` of some data."""
        return self.outputs[batch]

    def is_at(self, outputs: Tensor) -> bool:
        """Whether the curvature is taken at some outputs."""
        return self.outputs is outputs or torch.equal(self.outputs, outputs)

    @property
    def like(self) -> Features:
        return self.features

    @property
    def num_rows(self) -> int:
        return self.num_data * self.features.num_outputs

    def matmul(self, v: Tensor, batch: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self._all(v) if batch is None else self._product(v, batch, weights)

    @recorded
    def _all(self, v: Tensor) -> Tensor:
        return self._product(v, torch.arange(self.num_data), None)

    def _product(self, v: Tensor, batch: Tensor, weights: Tensor | None) -> Tensor:
        total = torch.zeros_like(v)
        own = None if weights is None else weights[self.features.own(batch)]
        start = 0  # weights are in the order of the batch
        with self.features.summing(total):
            for chunk in self.features.own_chunks(batch):
                scale = None if own is None else own[start : start + len(chunk)]
                curvature = partial(self._curvature, batch=chunk, weights=scale)
                total += self.features.ggn(v, chunk, curvature)
                start += len(chunk)
        return total

    def _curvature(self, u: Tensor, batch: Tensor, weights: Tensor | None) -> Tensor:
        """`w_i B_i u`."""
        product = self.likelihood.curvature(self.outputs_of(batch), u, self._targets(batch))
        return product if weights is None else product * weights.to(product)[:, None]

    def sizes(self) -> Tensor:
        """`Tr Bᵢ`; estimates by random signs where there are many outputs."""
        # Data differ more in the curvature of the loss than in their features, which would take a VJP each.
        return self._of_roots(lambda squares: squares.sum(-1).double())

    def root_sizes(self) -> Float[Tensor, "N C"]:
        """`‖Lᵢe_k‖²` of each column of a root of `Bᵢ`, in float32; estimates as those of `sizes`."""
        return self._of_roots(lambda squares: squares.float())

    def _of_roots(self, reduced: Callable[[Float[Tensor, "n C"]], Tensor]) -> Tensor:
        """What is made of the squared norms of the columns of roots, of all data."""
        num_outputs = self.outputs.shape[1]
        # `E[(Lᵀz)_k²] = ‖Le_k‖²` for random signs `z`, and the sum over all unit vectors is that norm itself.
        along = torch.eye(num_outputs)[:, None]
        if num_outputs > self._SIGNS:
            signs = (
                torch.randint(2, (self._SIGNS, 1, num_outputs), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
            )
            along = signs / math.sqrt(self._SIGNS)
        found = [reduced(torch.zeros(0, num_outputs))]
        together = max(1, BLOCK_BYTES // (16 * len(along) * num_outputs))
        for chunk in torch.arange(self.num_data).split(together):
            f = self.outputs_of(chunk)
            roots = self.likelihood.root_transpose(f, along.to(f).expand(-1, *f.shape), self._targets(chunk))
            found.append(reduced(roots.square().sum(0)).cpu())
        return torch.cat(found)

    @recorded
    def root_matmul(self, noise: SeededNoise, batch: Tensor | None = None) -> Float[Tensor, "K P"]:
        """`Σᵢ φᵢᵀ Lᵢ z_i` for white `z`, a draw of `N(0, M)`, by one VJP for each datum and sample."""
        total = torch.zeros(noise.num_samples, self.size, device=self.device, dtype=self.dtype)
        with self.features.summing(total):
            for chunk in self.features.own_chunks(batch):
                white = noise(chunk).to(self.device, self.dtype)
                cotangent = self.likelihood.root(self.outputs_of(chunk), white, self._targets(chunk))
                total += self.features.vjp(cotangent, chunk)
        return total

    def random_rows(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        return self.rows_along(batch, torch.randn(len(batch), self.outputs.shape[1], generator=generator)).dense()

    def rows_along(self, batch: Tensor, directions: Float[Tensor, "n C"]) -> DatumRows:
        """`φ_iᵀ L_i z_i` of each datum of a batch for given `z`, `L_iL_iᵀ = B_i`: one VJP of each."""
        f = self.outputs_of(batch)
        return self.features.datum_rows(self.likelihood.root(f, directions.to(f), self._targets(batch)), batch)

    def root_rows(self) -> Iterator[Tensor]:
        return self._root_rows(self.features.chunks())

    def _root_rows(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        num_data = max(1, BLOCK_BYTES // (16 * self.features.num_outputs * self.size))
        for chunk in (part for batch in chunks for part in batch.split(num_data)):
            f, y = self.outputs_of(chunk), self._targets(chunk)
            # The root acts on the outputs: as the last axis they lie together in memory, which is faster.
            rows = self.features.rows(chunk).permute(2, 0, 1)
            yield self.likelihood.root_transpose(f, rows.contiguous(), y).flatten(1).T

    def matrix(self) -> Float[Tensor, "P P"] | None:
        held = self.dense()
        return None if held is None else held.matrix

    def dense(self) -> DenseCurvature | None:
        """`M` in full with what was once computed of it, where it is held for whoever asks again."""
        if self.held is None:
            return None
        features, scale = self.features, None
        if isinstance(features, ScaledFeatures):
            features, scale = features.features, features.scale
        return self.held.of(replace(self, features=features), scale)

    def dense_curvature(self) -> DenseCurvature:
        """`M` in full, by `accumulated`.

        Raises:
            FloatingPointError: if it contains NaN or infinity.
        """
        # A pass is a JVP and a VJP of all data.
        return DenseCurvature.of(self.accumulated(), self.features.num_outputs / 2)

    def diagonal(self) -> Float[Tensor, " P"]:
        """`diag(M)`, exactly, by `C` VJPs for each datum."""
        matrix = self.matrix()
        return self._diagonal() if matrix is None else matrix.diagonal().clone()

    @recorded
    def _diagonal(self) -> Float[Tensor, " P"]:
        total = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        with self.features.summing(total):
            columns, together = torch.eye(self.outputs.shape[1]), max(1, BLOCK_BYTES // (16 * self.size))
            for chunk in (part for batch in self.features.own_chunks() for part in batch.split(together)):
                for column in columns:
                    total += self.rows_along(chunk, column.expand(len(chunk), -1)).squares_of_columns()
        return total

    @recorded
    def trace(self) -> float:
        """`Tr M`, exactly, by `C` VJPs for each datum."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with self.features.summing(total):
            for rows in self._root_rows(self.features.own_chunks()):
                total += rows.double().square().sum()
        return float(total)

    @recorded
    def accumulated(self) -> Float[Tensor, "P P"]:
        """`M` in float64 in one pass over its rows, which are in the dtype of the network.

        A datum takes `C` VJPs, and `C·P²` operations for the products of its rows.
        """
        with self.features.processes.counting(self.features.counts), self.features.local_only():
            total = sum_of_squares(self._root_rows(self.features.own_chunks()), self.size, self.device)
        self.features.processes.sum(total)
        return total


class HeldCurvature:
    """`M` of the last linear model that asked for it, and `diag(s) M diag(s)` for the last `s`."""

    def __init__(self) -> None:
        self._ggn: GGN | None = None
        self._scale: Tensor | None = None
        self._plain: DenseCurvature | None = None
        self._scaled: DenseCurvature | None = None

    def of(self, ggn: GGN, scale: Float[Tensor, " P"] | None) -> DenseCurvature:
        """`diag(s) M diag(s)`; `M` is accumulated unless it, or a multiple of it, is held."""
        factor = None if self._ggn is None else _ratio(ggn, self._ggn)
        if factor is None or self._plain is None or self._scaled is None:
            self._plain = self._scaled = None  # its memory is free before another one is made
            self._plain = ggn.dense_curvature()
        else:
            self._plain, self._scaled = self._plain.times(factor), self._scaled.times(factor)
        if self._scaled is None or not _same(scale, self._scale):
            self._scaled = self._plain if scale is None else self._plain.congruent(scale)
        self._ggn, self._scale = ggn, scale
        return self._scaled


def _ratio(ggn: GGN, held: GGN) -> float | None:
    """The number by which `M` differs from one of the same features, if there is one that is known."""
    likelihood, other = ggn.likelihood, held.likelihood
    if likelihood.quadratic and other.quadratic:
        precisions, others = likelihood.noise_precisions(), other.noise_precisions()
        assert precisions is not None
        assert others is not None
        return as_number((precisions / others).reshape(-1))
    return 1.0 if likelihood is other and ggn.is_at(held.outputs) else None


def _same(scale: Tensor | None, other: Tensor | None) -> bool:
    return scale is other or (scale is not None and other is not None and torch.equal(scale, other))
