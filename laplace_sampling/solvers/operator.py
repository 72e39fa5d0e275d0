"""Matrices as solvers see them: by their products, whatever they are made of.

A mini-batch is a tensor of data indices; `None` means all data. Sums are over the data of the batch, unscaled.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.placement import normal


class Operator(ABC):
    """A symmetric positive semi-definite matrix `Σᵢ Mᵢ` of size `P`, a sum over data."""

    @property
    def like(self) -> Any:
        """An object with the same data, size, device and dtype; a subclass defines it, or else these four."""
        raise NotImplementedError(f"{type(self).__name__} has no `like`.")

    @property
    def num_data(self) -> int:
        return self.like.num_data

    @property
    def size(self) -> int:
        return self.like.size

    @property
    def num_rows(self) -> int:
        """The number of rows of `root_rows`."""
        return self.like.num_rows

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @abstractmethod
    def matmul(
        self, v: Float[Tensor, "K P"], batch: Tensor | None = None, weights: Float[Tensor, " n"] | None = None
    ) -> Float[Tensor, "K P"]:
        """`Σ_{i∈batch} w_i Mᵢ v_k`, by default with weights of one."""

    def sizes(self) -> Float[Tensor, " N"]:
        """Rough sizes of the contributions `Mᵢ`, up to a common factor, for drawing data by them; makes no product."""
        return torch.ones(self.num_data, dtype=torch.float64)

    def random_rows(self, batch: Tensor, generator: torch.Generator) -> Float[Tensor, "n P"]:
        """A random row `g_i` of each datum of a batch, with `E[g_i g_iᵀ] = Mᵢ`: half a product a datum."""
        raise NotImplementedError(f"{type(self).__name__} has no `random_rows`, which `SVRG` needs.")

    def scaled(self, w: Float[Tensor, " P"]) -> "Operator":
        """`WMW`, `W = diag(w)`."""
        return Congruent(self, lambda v: v * w)

    def matrix(self) -> Float[Tensor, "P P"] | None:
        """`M` in full, in float64, where it is held for whoever asks again."""
        return None

    def root_rows(self) -> Iterator[Float[Tensor, "m P"]]:
        """Blocks of rows of a matrix `R` with `RᵀR = M`: for dense algebra only."""
        raise NotImplementedError(f"{type(self).__name__} has no `root_rows`.")


@dataclass(frozen=True)
class Congruent(Operator):
    """`R M R` for a symmetric `R`."""

    operator: Operator
    root: Callable[[Tensor], Tensor]

    @property
    def like(self) -> Operator:
        return self.operator

    def matmul(self, v: Tensor, batch: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        # Operators that are used without weights need not take any.
        extra = () if weights is None else (weights,)
        return self.root(self.operator.matmul(self.root(v), batch, *extra))

    def sizes(self) -> Tensor:
        return self.operator.sizes()

    def random_rows(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        return self.root(self.operator.random_rows(batch, generator))

    def root_rows(self) -> Iterator[Tensor]:
        for rows in self.operator.root_rows():
            yield self.root(rows)


def make_dense(operator: Operator) -> Float[Tensor, "P P"]:
    """`M` in full, in float64, from its products: for tests and small problems."""
    eye = torch.eye(operator.size, dtype=operator.dtype, device=operator.device)
    return operator.matmul(eye).double()


def largest_eigenvalue(
    operator: Operator, batch: Tensor, weights: Float[Tensor, " n"], iterations: int, generator: torch.Generator
) -> float:
    """The largest eigenvalue of `Σ_{i∈batch} w_i Mᵢ` by power iteration.

    It is a lower bound. The norm converges twice as fast as the vector, so that few iterations give a step size.
    """
    v = normal(1, operator.size, seed=generator, dtype=operator.dtype, device=operator.device)
    norm = v.norm()
    for _ in range(iterations):
        v = operator.matmul(v / norm.clamp_min(tiny(v)), batch, weights)
        norm = v.norm()
    return float(norm)


def largest_of_batches(
    operator: Operator, batches: Sequence[tuple[Tensor, Tensor]], iterations: int, generator: torch.Generator
) -> tuple[float, float]:
    """The largest eigenvalue among some estimates of `M`, and the passes that it took.

    Args:
        operator: `M`.
        batches: indices and weights of some data for each estimate.
        iterations: of power iteration, for each of them.
        generator: of the start vectors.

    Raises:
        FloatingPointError: if it is not finite.
    """
    largest = max(largest_eigenvalue(operator, *batch, iterations, generator) for batch in batches)
    if not math.isfinite(largest):
        raise FloatingPointError(
            f"The largest curvature of the problem was estimated as {largest}: the Jacobian products of the model "
            "contain NaN or infinity."
        )
    return largest, iterations * sum(len(indices) for indices, _ in batches) / operator.num_data


def row_products(a: Float[Tensor, "K P"], b: Float[Tensor, "K P"]) -> Float[Tensor, " K"]:
    """`⟨a_k, b_k⟩` in float64."""
    if a.dtype == torch.float64:
        return torch.linalg.vecdot(a, b)
    # A row at a time, so that no stack is copied to float64.
    return torch.stack([torch.dot(x.double(), y.double()) for x, y in zip(a, b, strict=True)])


def geometric_mean(values: Tensor) -> float:
    """`exp(mean(log(values)))` in float64; the value itself, without rounding, where all are equal."""
    first = values.flatten()[0]
    return float(first) if bool((values == first).all()) else float(values.double().log().mean().exp())


def tiny(t: Tensor) -> float:
    """The smallest positive normal number: a floor for denominators that may be zero."""
    return torch.finfo(t.dtype).tiny
