r"""Covariances of the outputs of a linear last layer, for many prior precisions at once, from its inputs.

With `φ = I ⊗ hᵀ` the rows of `Φ` are mostly zeros, and are not formed. Of `M = Q diag(λ) Qᵀ` one rotation of `h` serves
all shifts, `R_i = φ_i Q`, `V_i(s) = R_i diag(1/(λ + s)) R_iᵀ`; of a Kronecker product with eigenvectors `U ⊗ V`

    V_i(s) = U diag(Σ_n (Vᵀh_i)²_n / (Λ_mn + s)) Uᵀ,

which takes `D²` operations a datum, and `C D` for each shift.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.dense_curvature import DenseCurvature
from laplace_sampling.linear_model.kronecker import Kronecker, KroneckerBlock, outer_factors
from laplace_sampling.solvers.preconditioners import Factored

if TYPE_CHECKING:
    from laplace_sampling.networks.linear_layer import LinearLayer

__all__ = ["has_head_covariances", "head_covariances"]

# Numbers of rotated rows in memory at once: 128 MiB. It bounds memory, and is not tuned.
_NUMBERS = 2**24


def has_head_covariances(curvature: Factored) -> bool:
    """Whether `head_covariances` is for a curvature."""
    if not isinstance(curvature, Kronecker):
        return isinstance(curvature, DenseCurvature)
    # A block that is one matrix row has eigenvectors of its own, as `kfac` makes them for few weights; a row for each
    # output is of targets that are missing at some of them.
    return len(curvature.blocks) == 1 and not len(curvature.rest) and curvature.blocks[0].index.shape[:2] != (1, 1)


def head_covariances(
    curvature: Factored,
    layer: "LinearLayer",
    z: Float[Tensor, "n d"],
    shifts: Float[Tensor, " A"],
    scale: Float[Tensor, " P"],
) -> Float[Tensor, "A n C C"]:
    """The blocks `φ_i S (M̂ + s)⁻¹ S φ_iᵀ` in float64 for shifts `s`, `M̂` in scaled coordinates, `S = diag(scale)`.

    Args:
        curvature: `M̂`, a `DenseCurvature` or one Kronecker block, of the weights of the layer.
        layer: a linear layer.
        z: its inputs.
        shifts: prior precisions.
        scale: of the prior.
    """
    h, scales = layer.extended(z).double(), scale[layer.index].double()
    shifts = shifts.to(h)
    if isinstance(curvature, Kronecker):
        return _of_block(curvature.blocks[0], h, scales, shifts)
    assert isinstance(curvature, DenseCurvature)
    vectors = curvature.vectors[layer.index] * scales[..., None]
    most = max(1, _NUMBERS // (len(vectors) * vectors.shape[-1]))
    return torch.cat([_of_rows(part, vectors, curvature.spectrum, shifts) for part in h.split(most)], 1)


def head_variances(
    curvature: Factored, layer: "LinearLayer", z: Float[Tensor, "n d"], shift: Float[Tensor, ""], scale: Tensor
) -> Float[Tensor, "n C"]:
    """The diagonals of `head_covariances`; of one block with many outputs without the matrices."""
    if not (isinstance(curvature, Kronecker) and curvature.blocks[0].index.shape[1] > 1):
        return head_covariances(curvature, layer, z, shift[None], scale)[0].diagonal(dim1=1, dim2=2)
    block, h, scales = curvature.blocks[0], layer.extended(z).double(), scale[layer.index].double()
    (of_outputs,), (of_inputs,) = outer_factors(scales[None])
    squares, U = ((h * of_inputs) @ block.U_A[0]).square(), of_outputs[:, None] * block.U_G[0]
    return squares @ (1 / (block.eigenvalues[0] + shift.to(h))).mT @ U.square().T


def _of_rows(h: Tensor, vectors: Float[Tensor, "C D P"], eigenvalues: Tensor, shifts: Tensor) -> Tensor:
    rows = (h @ vectors.movedim(1, 0).flatten(1)).unflatten(1, (len(vectors), -1))
    return torch.stack([rows / (eigenvalues + shift) @ rows.mT for shift in shifts])


def _of_block(block: KroneckerBlock, h: Tensor, scales: Float[Tensor, "C D"], shifts: Tensor) -> Tensor:
    if block.index.shape[1] == 1:
        inverse, variances = 1 / (block.eigenvalues[:, 0] + shifts[:, None, None]), []
        for part in h.split(max(1, _NUMBERS // scales.numel())):
            squares = ((part * scales[:, None]) @ block.U_A).square()
            variances.append(torch.einsum("cne,ace->anc", squares, inverse))
        return torch.diag_embed(torch.cat(variances, 1))
    (of_outputs,), (of_inputs,) = outer_factors(scales[None])
    squares, U = ((h * of_inputs) @ block.U_A[0]).square(), of_outputs[:, None] * block.U_G[0]
    inverse = 1 / (block.eigenvalues + shifts[:, None, None])
    return (U * (squares @ inverse.mT)[:, :, None]) @ U.T
