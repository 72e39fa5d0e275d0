r"""Covariances of outputs with a curvature in closed form, from the rows of the Jacobian by layers.

With `δ_c ⊗ h` for row `c` in a linear layer and the prior precision `s`,

    LowRank:    V = ((hᵀh) δδᵀ − q (Λ + s)⁻¹ qᵀ)/s,     q = δ (F h),
    Kronecker:  V = δ̃ diag(Σ_n h̃_n²/(Λ_mn + s)) δ̃ᵀ,     δ̃ = δ U_G,  h̃ = U_Aᵀ h,
    Jacobi:     V = δ diag(Σ_n h_n²/(d_mn + s)) δᵀ,

summed over layers. No row of `P` numbers is formed; convolutions and normalisations have rows of their own weights.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.kronecker import Kronecker, KroneckerBlock
from laplace_sampling.curvature.low_rank import LowRank
from laplace_sampling.linear_model.features import OutputRows
from laplace_sampling.networks.layers import OfOutputs
from laplace_sampling.solvers.preconditioners import Curvature, Jacobi


def has_covariances_by_layers(curvature: Curvature, spread: Float[Tensor, " P"], scale: Float[Tensor, " P"]) -> bool:
    """Whether `covariances_by_layers` may be there: of one prior precision without scales, or of a diagonal."""
    if isinstance(curvature, Jacobi):
        return True
    known = isinstance(curvature, LowRank) or (isinstance(curvature, Kronecker) and not len(curvature.rest))
    return known and bool((spread == spread[0]).all()) and bool((scale == scale[0]).all())


def covariances_by_layers(
    curvature: Curvature, rows: OutputRows, spread: Float[Tensor, " P"], scale: Float[Tensor, " P"]
) -> Float[Tensor, "n C C"] | None:
    """`φ_i S (M̂ + A)⁻¹ S φ_iᵀ` in float64; `None` for a Kronecker product of other layers.

    Args:
        curvature: `M̂`, in scaled coordinates.
        rows: `φ_i`.
        spread: `A` in scaled coordinates.
        scale: `S`.
    """
    if isinstance(curvature, Jacobi):
        weights = scale.double().square() / (curvature.diagonal + spread)
        return rows.weighted(weights.to(rows.layers[0][1][0])).double()
    s = float(spread[0])
    if isinstance(curvature, LowRank):
        # The difference of the two terms is as accurate as these, for which the rank was chosen.
        rows = rows.to(curvature.factor.dtype)
        q = rows.products(curvature.factor).double()
        found = (rows.weighted().double() - (q / (curvature.leading + s)) @ q.mT) / s
    else:
        assert isinstance(curvature, Kronecker)
        found = 0.0
        for layer, of_layer in rows.layers:
            index = layer.index.flatten()
            blocks = curvature.blocks_in(of_layer[0].dtype)
            block = next((b for b in blocks if torch.equal(b.index.flatten(), index)), None)
            if block is None:
                return None
            found = found + _of_block(block, (layer, of_layer), s).double()
        assert isinstance(found, Tensor)
    return found * float(scale[0]) ** 2


def _of_block(block: KroneckerBlock, rows: OfOutputs, s: float) -> Float[Tensor, "n C C"]:
    layer, (left, *inputs) = rows
    U_G, U_A, inverse = block.U_G, block.U_A, 1 / (block.eigenvalues + s)
    if inputs and block.index.shape == layer.index.shape:
        turned, squares = left @ U_G[0], (inputs[0] @ U_A[0]).square()
        return (turned * (squares @ inverse[0].T)[:, None]) @ turned.mT
    m, k = layer.index.shape[1:]
    if inputs and block.index.shape[1] == 1:  # a block that is not factored
        of_h = inputs[0] @ U_A.reshape(m, k, -1).movedim(1, 0).flatten(1)
        turned = left @ of_h.unflatten(1, (m, -1))
        return (turned * inverse[0, 0]) @ turned.mT
    if inputs:
        left = (left[..., None] * inputs[0][:, None, None]).flatten(2)
    turned = left.unflatten(2, block.index.shape)
    # One product of matrices for all data.
    turned = (turned.reshape(-1, U_A.shape[1]) @ U_A[0]).view_as(turned) if len(U_A) == 1 else turned @ U_A
    turned = U_G.mT @ turned if U_G.shape[1] > 1 else turned * U_G
    return (turned * inverse).flatten(2) @ turned.flatten(2).mT
