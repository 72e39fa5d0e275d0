r"""Covariances of outputs with a curvature in closed form, from the rows of the Jacobian by layers.

With `δ_c ⊗ h` for row `c` in a linear layer and the prior precision `s`,

    LowRank:    V = ((hᵀh) δδᵀ − q (Λ + s)⁻¹ qᵀ)/s,     q = δ (F h),
    Kronecker:  V = δ̃ diag(Σ_n h̃_n²/(Λ_mn + s)) δ̃ᵀ,     δ̃ = δ U_G,  h̃ = U_Aᵀ h,
                with sums δ̃_t ⊗ h̃_t in place of δ̃ ⊗ h̃ where a datum uses the layer at few positions t,
    Jacobi:     V = δ diag(Σ_n h_n²/(d_mn + s)) δᵀ,

summed over layers. No row of `P` numbers is formed; normalisations, and convolutions at many positions, have rows of
their own weights.
"""

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.kronecker import Kronecker, KroneckerBlock
from laplace_sampling.curvature.low_rank import LowRank
from laplace_sampling.linear_model.features import OutputRows, formed
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.layers import OfOutputs
from laplace_sampling.solvers.preconditioners import Curvature, Jacobi


def has_covariances_by_layers(curvature: Curvature, prior: GaussianPrior) -> bool:
    """Whether `covariances_by_layers` may be there: of one prior precision without scales, or of a diagonal."""
    if isinstance(curvature, Jacobi):
        return True
    known = isinstance(curvature, LowRank) or (isinstance(curvature, Kronecker) and not len(curvature.rest))
    return known and prior.is_even


def covariances_by_layers(
    curvature: Curvature, rows: OutputRows, prior: GaussianPrior
) -> Float[Tensor, "n C C"] | None:
    """`φ_i S (M̂ + A)⁻¹ S φ_iᵀ` in float64; `None` for a Kronecker product of other layers.

    Args:
        curvature: `M̂`, in scaled coordinates.
        rows: `φ_i`.
        prior: `A` and `S`.
    """
    spread, scale = prior.spread(), prior.scale
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
            block = curvature.inverse_at(layer.index, s, of_layer[0].dtype)
            if block is None:
                return None
            found = found + _of_block(block, (layer, of_layer)).double()
        assert isinstance(found, Tensor)
    return found * float(scale[0]) ** 2


def _of_block(block: KroneckerBlock, rows: OfOutputs) -> Float[Tensor, "n C C"]:
    """`φ_i (M̂ + s)⁻¹ φ_iᵀ` in the weights of a block of the inverse."""
    layer, (left, *inputs) = rows
    U_G, U_A, inverse = block.U_G, block.U_A, block.eigenvalues
    if inputs and block.index.shape == layer.index.shape:
        turned, of_inputs = (left.mT @ U_G[0]).mT, (inputs[0].mT @ U_A[0]).mT
        if of_inputs.shape[2] > 1:
            turned = formed(turned, of_inputs)
            return (turned * inverse[0]).flatten(2) @ turned.flatten(2).mT
        turned, squares = turned[..., 0], of_inputs[..., 0].square()
        return (turned * (squares @ inverse[0].T)[:, None]) @ turned.mT
    m, k = layer.index.shape[1:]
    if inputs and inputs[0].shape[2] == 1 and block.index.shape[1] == 1:  # a block that is not factored
        # Views, since a copy would take longer than the product for a few data.
        turned = left[..., 0] @ (inputs[0][..., 0] @ U_A.reshape(m, k, -1)).movedim(1, 0)
        return (turned * inverse[0, 0]) @ turned.mT
    if inputs:
        left = formed(left, inputs[0]).flatten(2)
    turned = left.unflatten(2, block.index.shape)
    # One product of matrices for all data.
    turned = (turned.reshape(-1, U_A.shape[1]) @ U_A[0]).view_as(turned) if len(U_A) == 1 else turned @ U_A
    turned = U_G.mT @ turned if U_G.shape[1] > 1 else turned * U_G
    return (turned * inverse).flatten(2) @ turned.flatten(2).mT
