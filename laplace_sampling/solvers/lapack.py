"""Dense algebra that overwrites a Gram matrix.

torch copies its arguments and takes up to three times their memory. Here the matrix itself is the limit of what fits in
memory, which for exact methods is the number of observations. Products and Cholesky factors go block by block: with
some numbers of threads the OpenBLAS of scipy ends the process in `syrk` and `potrf` of more than 15,000 rows.
"""

from collections.abc import Iterable

import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.recorded import recorded

# The condition of `H` up to which a Cholesky factor of it has six digits left: a definition.
_MOST_CONDITION = 1e10
# Columns of a block. Half and twice change times by about a tenth.
_BLOCK = 512


def check_finite(K: Float[Tensor, "n n"]) -> None:
    """Raise if a Gram matrix has NaN or infinity in it."""
    if not bool(K.isfinite().all()):
        raise FloatingPointError(
            "The Gram matrix of the tangent kernel is not finite: the Jacobian of the model contains NaN or infinity."
        )


@recorded
def symmetric_eigen(K: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues, rising and not negative, and eigenvectors of a positive semi-definite matrix, which is overwritten.

    On a CPU by LAPACK's `syevr`, which takes the memory of one more matrix; torch's routine takes three.
    """
    check_finite(K)
    if K.device.type != "cpu":
        values, vectors = torch.linalg.eigh(K)
    else:
        # The transpose of a matrix in C's order is in Fortran's, which LAPACK takes without a copy.
        eigenvalues, columns = scipy.linalg.eigh(
            K.numpy().T, overwrite_a=True, check_finite=False, driver="evr" if len(K) > 1 else "ev"
        )
        values, vectors = torch.from_numpy(eigenvalues), torch.from_numpy(columns)
    # Rounding makes small eigenvalues of a semi-definite matrix negative.
    return values.clamp_min(0), vectors


@recorded
def sum_of_squares(blocks: Iterable[Float[Tensor, "m P"]], size: int, device: torch.device) -> Float[Tensor, "P P"]:
    """`Σ RᵀR` over blocks of rows `R` of any precision, each product and the sum in float64.

    Only blocks on the diagonal and to the right of it are computed: of many columns half of a general product.
    """
    total = torch.zeros(size, size, dtype=torch.float64, device=device)
    for block in blocks:
        rows = block.double()
        for start in range(0, size, _BLOCK):
            total[start : start + _BLOCK, start:].addmm_(rows[:, start : start + _BLOCK].T, rows[:, start:])
    _mirror_(total)
    return total


def _mirror_(G: Float[Tensor, "n n"]) -> None:
    """Copies the upper triangle to the lower one."""
    # A few rows at a time, to need no second matrix.
    for rows in torch.arange(len(G)).split(512):
        first, last = int(rows[0]), int(rows[-1]) + 1
        corner = G[first:last, first:last].triu()
        G[first:last, first:last] = corner + corner.triu(1).T
        G[last:, first:last] = G[first:last, last:].T


@recorded
def batched_eigen(matrices: Float[Tensor, "*q n n"]) -> tuple[Float[Tensor, "*q n"], Float[Tensor, "*q n n"]]:
    """Eigenvalues, rising, and eigenvectors of symmetric matrices, by torch's own routine.

    In float32 its divide and conquer does not converge for some matrices whose eigenvalues span more than the
    precision: these are taken in float64.
    """
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        if matrices.dtype == torch.float64:
            raise
        values, vectors = (part.to(matrices.dtype) for part in torch.linalg.eigh(matrices.double()))
    return values, vectors


@recorded
def solve_(G: Float[Tensor, "n n"], right: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """`G⁻¹ right` of a positive definite matrix, which is overwritten."""
    _cholesky_(G)
    found = right.clone()
    starts = range(0, len(G), _BLOCK)
    for start in starts:
        block = slice(start, start + _BLOCK)
        part = found[block] - G[block, :start] @ found[:start]
        found[block] = torch.linalg.solve_triangular(G[block, block], part, upper=False)
    for start in reversed(starts):
        block, end = slice(start, start + _BLOCK), start + _BLOCK
        part = found[block] - G[end:, block].T @ found[end:]
        found[block] = torch.linalg.solve_triangular(G[block, block].T, part, upper=True)
    return found


def _cholesky_(G: Float[Tensor, "n n"]) -> None:
    """The Cholesky factor in the lower triangle; what is above blocks on the diagonal stays as it was."""
    for start in range(0, len(G), _BLOCK):
        end = start + _BLOCK
        columns = G[start:, start:end]
        columns.addmm_(G[start:, :start], G[start:end, :start].T, alpha=-1)
        factor, failed = torch.linalg.cholesky_ex(columns[:_BLOCK])
        if failed:
            raise FloatingPointError("A Gram matrix with noise is not finite, or not positive definite.")
        columns[:_BLOCK] = factor
        columns[_BLOCK:] = torch.linalg.solve_triangular(factor.T, columns[_BLOCK:], upper=True, left=False)


def accurate_factor(matrix: Tensor, precision: Tensor) -> Tensor | None:
    """The Cholesky factor of `M + A`; `None` where the sum of both has lost its digits."""
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(precision))
    diagonal = factor.diagonal()
    lost = bool(failed) or not float(diagonal.max() / diagonal.min()) ** 2 <= _MOST_CONDITION
    return None if lost else factor
