"""Dense algebra that overwrites a Gram matrix: by LAPACK on a CPU, by torch elsewhere.

torch copies its arguments and takes up to three times their memory. With LAPACK the matrix itself is the limit of what
fits in memory, which for exact methods is the number of observations.
"""

from collections.abc import Iterable

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue]
from scipy.linalg.lapack import dpotrf, dpotrs  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from laplace_sampling.solvers.recorded import recorded

# The condition of `H` up to which a Cholesky factor of it has six digits left: a definition.
_MOST_CONDITION = 1e10


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

    On a CPU by BLAS's `syrk`, which computes one triangle: `m P²` operations, half of those of a general product.
    """
    total = torch.zeros(size, size, dtype=torch.float64, device=device)
    for block in blocks:
        rows = block.double()
        if device.type != "cpu":
            total.addmm_(rows.T, rows)
        else:
            # Both transposes are in Fortran's order, and `total` itself is overwritten.
            dsyrk(1.0, rows.contiguous().numpy().T, beta=1.0, c=total.numpy().T, lower=1, overwrite_c=1)
    if device.type == "cpu":
        _mirror_(total)
    return total


def _mirror_(G: Float[Tensor, "n n"]) -> None:
    """Copies the upper triangle, the one that LAPACK writes, to the lower one."""
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
    if G.device.type != "cpu":
        return torch.cholesky_solve(right, torch.linalg.cholesky(G))
    return torch.from_numpy(np.ascontiguousarray(dpotrs(_cholesky_(G), right.numpy(), lower=1)[0]))


def _cholesky_(G: Float[Tensor, "n n"]) -> np.ndarray:
    """A Cholesky factor in the lower triangle of the transpose, which is in Fortran's order."""
    factor, failed = dpotrf(G.numpy().T, lower=1, clean=0, overwrite_a=1)
    if failed:
        raise FloatingPointError("A Gram matrix with noise is not finite, or not positive definite.")
    return factor


def accurate_factor(matrix: Tensor, precision: Tensor) -> Tensor | None:
    """The Cholesky factor of `M + A`; `None` where the sum of both has lost its digits."""
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(precision))
    diagonal = factor.diagonal()
    lost = bool(failed) or not float(diagonal.max() / diagonal.min()) ** 2 <= _MOST_CONDITION
    return None if lost else factor
