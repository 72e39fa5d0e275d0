r"""The Gram matrix `K = Φ A⁻¹ Φᵀ` of the tangent kernel, `[N·C, N·C]`, in float64 and in blocks of rows.

Row `(i, c)` is output `c` of datum `i`; the outputs of a datum are adjacent. The Jacobian is never held in full: a
block of its rows is multiplied with the rest either row by row, which computes these rows again for every block, or by
Jacobian-vector products, whichever takes fewer floating-point operations, as counted on one datum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import BLOCK_BYTES, DenseFeatures, Features, row_blocks
from laplace_sampling.networks.resources import Operations
from laplace_sampling.solvers.recorded import recorded

# An operation of a Jacobian-vector product, one of many small products, counts as so many of one large product. Tuned
# on timings of small networks; five networks of 1 to 60 outputs take the same products at half and at twice this.
_JVP_WEIGHT = 4.0


@recorded
def gram(
    features: Features,
    variance: Float[Tensor, " P"],
    *,
    products: str = "auto",
    block_bytes: float = BLOCK_BYTES,
) -> Float[Tensor, "NC NC"]:
    r"""`K = Φ diag(v) Φᵀ`, symmetric to the last bit.

    Args:
        features: `Φ`.
        variance: `v`, the prior variance of each weight, in the units of the weights squared.
        products: `"rows"`, contraction of rows of the Jacobian; `"jvp"`, Jacobian-vector products; `"auto"`, the one of
            fewer floating-point operations.
        block_bytes: memory for rows of the Jacobian: half of it for the block that is held, half for the others.
    """
    products = _choose(features, products, block_bytes)
    n = features.num_data * features.num_outputs
    K = torch.empty(n, n, dtype=torch.float64, device=features.device)
    root = variance.double().sqrt()
    for first, rows in row_blocks(features, block_bytes / 2):
        held = slice(first, first + len(rows))
        rows = rows * root  # a copy: dense features give their own matrix
        for columns, block in _row_products(features, rows, root, products, block_bytes, first, held):
            K[held, columns] = block
            K[columns, held] = block.T
            del block
        # A product and its transpose differ in the last bit; in place, as a block may be the whole matrix.
        corner = K[held, held]
        corner.add_(corner.T.clone()).div_(2)
    return K


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
    left: Features,
    right: Features,
    variance: Float[Tensor, " P"],
    *,
    products: str = "auto",
    block_bytes: float = BLOCK_BYTES,
) -> Float[Tensor, "MC NC"]:
    r"""`Φ_left diag(v) Φ_rightᵀ`; the arguments are those of `gram`."""
    products = _choose(right, products, block_bytes)
    sizes = [f.num_data * f.num_outputs for f in (left, right)]
    K = torch.empty(*sizes, dtype=torch.float64, device=left.device)
    root = variance.double().sqrt()
    for first, rows in row_blocks(left, block_bytes / 2):
        rows = rows * root
        for columns, block in _row_products(right, rows, root, products, block_bytes, 0, None):
            K[first : first + len(rows), columns] = block
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


def gram_flops(features: Features, block_bytes: float = BLOCK_BYTES) -> dict[str, float]:
    """Floating-point operations of both ways to the Gram matrix, from those of one datum.

    `"rows"`: `N·r·(1 + (g − 1)/2) + (N·C)²·P·(1 + 1/g)` with `r` for the Jacobian of a datum and `g` blocks;
    `"jvp"`: `N·r + ½ N²·C·j` with `j` for a JVP of one datum and vector. `gram` takes an operation of the latter for
    four, as they are many small products.
    """
    datum = torch.tensor([0])
    num_rows = features.num_data * features.num_outputs
    v = torch.ones(3, features.size, dtype=features.dtype, device=features.device)
    # The first product of several vectors, which are not zero, tries several ways, which must not be counted.
    features.jvp(v, datum)
    # The forward pass is shared by the vectors of a call.
    jvp = _count(lambda: features.jvp(v, datum)) - _count(lambda: features.jvp(v[:2], datum))
    eye = torch.eye(min(2, features.num_outputs), features.num_outputs, dtype=features.dtype, device=features.device)
    rows = _count(lambda: features.vjp(eye[:, None], datum)) / len(eye) * features.num_outputs
    blocks = -(-num_rows // max(1, int(block_bytes / 2 / (8 * features.size))))
    return {
        "rows": features.num_data * rows * (1 + (blocks - 1) / 2) + (1 + 1 / blocks) * num_rows**2 * features.size,
        "jvp": features.num_data * rows + 0.5 * num_rows * features.num_data * jvp,
    }


def _choose(features: Features, products: str, block_bytes: float) -> str:
    if products not in ("auto", "rows", "jvp"):
        raise ValueError(f'`products={products!r}` is not known; use "auto", "rows" or "jvp".')
    if products != "auto":
        return products
    if isinstance(features, DenseFeatures):
        return "rows"
    flops = gram_flops(features, block_bytes)
    return "rows" if flops["rows"] <= _JVP_WEIGHT * flops["jvp"] else "jvp"


def _count(call: Callable[[], Tensor]) -> float:
    with Operations() as counter:
        call()
    return counter.count


def _row_products(
    features: Features,
    rows: Float[Tensor, "m P"],
    root: Float[Tensor, " P"],
    products: str,
    block_bytes: float,
    first: int,
    held: slice | None,
) -> Iterator[tuple[slice, Float[Tensor, "m k"]]]:
    """Products of rows, scaled by `root`, with those of `features` from row `first` on, and the columns they are."""
    num_outputs = features.num_outputs
    datum = first // num_outputs
    if products == "jvp":
        tangents = (rows * root).to(features.dtype)
        for batch in features.chunks(torch.arange(datum, features.num_data)):
            start = int(batch[0]) * num_outputs
            yield slice(start, start + len(batch) * num_outputs), features.jvp(tangents, batch).flatten(1).double()
        return
    if held is not None:
        yield held, rows @ rows.T
        datum = held.stop // num_outputs
    for start, others in row_blocks(features, block_bytes / 2, datum):
        yield slice(start, start + len(others)), rows @ (others * root).T


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
