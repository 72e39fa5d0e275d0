r"""The Gram matrix `K = Φ A⁻¹ Φᵀ` of the tangent kernel, `[N·C, N·C]`, in float64 and in blocks of rows.

Row `(i, c)` is output `c` of datum `i`; the outputs of a datum are adjacent. The Jacobian is never held in full: a
block of its rows is multiplied with the others, which are computed again for every block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import BLOCK_BYTES, Features, row_blocks
from laplace_sampling.solvers.recorded import recorded


@recorded
def gram(
    features: Features, variance: Float[Tensor, " P"], *, block_bytes: float = BLOCK_BYTES
) -> Float[Tensor, "NC NC"]:
    r"""`K = Φ diag(v) Φᵀ`, symmetric to the last bit.

    Args:
        features: `Φ`.
        variance: `v`, the prior variance of each weight, in the units of the weights squared.
        block_bytes: memory for rows of the Jacobian: half of it for the block that is held, half for the others.
    """
    n = features.num_data * features.num_outputs
    K = torch.empty(n, n, dtype=torch.float64, device=features.device)
    for held, rows in _scaled_rows(features, variance, block_bytes):
        K[held, held] = rows @ rows.T
        for columns, others in _scaled_rows(features, variance, block_bytes, held.stop // features.num_outputs):
            block = rows @ others.T
            K[held, columns], K[columns, held] = block, block.T
            del block
        # A product and its transpose differ in the last bit; in place, as a block may be the whole matrix.
        corner = K[held, held]
        corner.add_(corner.T.clone()).div_(2)
    return K


def _scaled_rows(
    features: Features, variance: Float[Tensor, " P"], block_bytes: float, start: int = 0
) -> Iterator[tuple[slice, Float[Tensor, "m P"]]]:
    """Rows of `Φ diag(v)^{1/2}` from a datum on, in blocks of half of the memory, and which rows they are."""
    root = variance.double().sqrt()
    for first, rows in row_blocks(features, block_bytes / 2, start):
        yield slice(first, first + len(rows)), rows * root  # a copy: dense features give their own matrix


@dataclass(frozen=True)
class KernelMatrix:
    """`K` at `α = 1`, built when it is first needed.

    Args:
        features: `Φ`.
        variance: `v`, the diagonal of `A₁⁻¹`.
    """

    features: Features
    variance: Float[Tensor, " P"]

    @cached_property
    def matrix(self) -> Float[Tensor, "NC NC"]:
        return gram(self.features, self.variance)


def cross_gram(
    left: Features, right: Features, variance: Float[Tensor, " P"], *, block_bytes: float = BLOCK_BYTES
) -> Float[Tensor, "MC NC"]:
    r"""`Φ_left diag(v) Φ_rightᵀ`; the arguments are those of `gram`."""
    sizes = [f.num_data * f.num_outputs for f in (left, right)]
    K = torch.empty(*sizes, dtype=torch.float64, device=left.device)
    for held, rows in _scaled_rows(left, variance, block_bytes):
        for columns, others in _scaled_rows(right, variance, block_bytes):
            K[held, columns] = rows @ others.T
    return K


def gram_blocks(
    features: Features, variance: Float[Tensor, " P"], *, block_bytes: float = BLOCK_BYTES
) -> Float[Tensor, "N C C"]:
    """The blocks `φ_i diag(v) φ_iᵀ` on the diagonal, one a datum."""
    num_outputs = features.num_outputs
    limit = max(1, int(block_bytes / (8 * features.size * num_outputs)))
    root = variance.double().sqrt()
    batches = torch.arange(features.num_data).split(min(limit, features.batch_size))
    scaled = (features.rows(batch).double() * root for batch in batches)
    return torch.cat([rows @ rows.mT for rows in scaled])


@recorded
def transposed(features: Features, u: Float[Tensor, "K N C"]) -> Float[Tensor, "K P"]:
    """`Φᵀu`, in float64."""
    total = torch.zeros(len(u), features.size, dtype=torch.float64, device=features.device)
    with features.summing(total):
        for batch in features.own_chunks():
            total += features.vjp(u[:, batch].to(features.dtype), batch)
    return total


def size_of(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB where it is small."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.3g} MiB"
