r"""The curvature of a linear last layer from its inputs `h`, where `φ = I ⊗ h`: no product with the network.

`M = Σ_i B_i ⊗ h_i h_iᵀ` is accumulated as it is for few weights. For a Gaussian likelihood `B_i = diag(b)` is the same
for all data whose targets are there, so that `M = diag(b) ⊗ Σ_i h_i h_iᵀ` itself is a Kronecker product: one
decomposition of `[D, D]` serves any number of outputs; where data have targets at some of their outputs
only, each output has one. Other likelihoods have, with the eigenvectors `U` and `V` of the partial traces of `M`, the
diagonal of `M` in these coordinates,

    G = Σ_i ‖h_i‖² B_i,        A = Σ_i Tr(B_i) h_i h_iᵀ,

    M̂ = (U ⊗ V) diag(Λ) (U ⊗ V)ᵀ,     Λ = Σ_i diag(Uᵀ B_i U) ⊗ (Vᵀ h_i)²,

as `curvature.kronecker` (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored
eigenbasis"), but with exact sums over all outputs in place of random ones.

Covariances of its outputs are computed for many prior precisions at once. With `φ = I ⊗ hᵀ` the rows of `Φ` are mostly
zeros, and are not formed. Of `M = Q diag(λ) Qᵀ` one rotation of `h` serves all shifts, `R_i = φ_i Q`, `V_i(s) = R_i
diag(1/(λ + s)) R_iᵀ`; of a Kronecker product with eigenvectors `U ⊗ V`

    V_i(s) = U diag(Σ_n (Vᵀh_i)²_n / (Λ_mn + s)) Uᵀ,

which takes `D²` operations a datum, and `C D` for each shift.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.kronecker import Kronecker, KroneckerBlock, outer_factors
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import Features, NetworkFeatures, SomeFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.networks.last_layer import LinearLayer
from laplace_sampling.solvers.dense import DenseCurvature
from laplace_sampling.solvers.lapack import batched_eigen
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.recorded import recorded

# Weights up to which `M` is accumulated and decomposed: on 10,000 images and 10 classes 850 weights take 0.6 s and
# 2,570 take 7, where a training epoch of LeNet takes 1.4 s and one of a CNN 4.4. At half LeNet has Kronecker factors,
# too, at twice the CNN has none and its fit takes an epoch and a half more; log losses, each at the precision that its
# own curvature chooses, change by 0.001 and by 0.0001.
_MOST_WEIGHTS = 1500


def head_curvature(ggn: GGN, scale: Float[Tensor, " P"] | None = None) -> Curvature:
    """`diag(s) M diag(s)` of a linear last layer if `is_exact`; else its `M̂`.

    Args:
        ggn: `M`, of the features of a linear layer.
        scale: `s`, by default ones.
    """
    if _is_product(ggn) or not is_exact(ggn):
        return head_kronecker(ggn, scale)
    found = DenseCurvature.of(head_matrix(ggn), 0.0)
    return found if scale is None else found.congruent(scale)


def is_exact(ggn: GGN) -> bool:
    """Whether `head_curvature` is `M` itself."""
    return _is_product(ggn) or ggn.size <= _MOST_WEIGHTS


def _is_product(ggn: GGN) -> bool:
    """Whether `M` is a Kronecker product."""
    return isinstance(ggn.likelihood, Gaussian) and not ggn.likelihood.partly


def head_kronecker(ggn: GGN, scale: Float[Tensor, " P"] | None = None) -> Kronecker:
    """`diag(s) M diag(s)` for a Gaussian likelihood, else its `M̂`, in float64; arguments as in `head_curvature`.

    It takes `head_operations` for `D` inputs of `C` outputs, and no product. A softmax, whose curvature is a diagonal
    minus the square of a vector, needs no `[N, C, C]`.

    Raises:
        ValueError: for a scale that is not a product of one factor for each output and one for each input.
    """
    layer = head_of(ggn.features)
    assert layer is not None
    nothing = torch.zeros(0, dtype=torch.long, device=ggn.device)
    index = layer.index[None]
    scales = torch.ones(index.shape, dtype=torch.float64, device=ggn.device) if scale is None else scale.double()[index]
    (of_outputs,), (of_inputs,) = outer_factors(scales)
    G, A = partial_traces_of_head(ggn, of_outputs, of_inputs)
    (g, U_G), (a, U_A) = batched_eigen(G), batched_eigen(A)
    if _is_product(ggn):
        eigenvalues = g.clamp_min(0)[:, None] * a.clamp_min(0) / G.trace()
    else:
        eigenvalues = _corrected(ggn, of_outputs[:, None] * U_G, of_inputs[:, None] * U_A)
    return Kronecker([KroneckerBlock(index, U_G[None], U_A[None], eigenvalues[None])], nothing, nothing.double(), 0.0)


@recorded
def partial_traces_of_head(
    ggn: GGN, of_outputs: Float[Tensor, " C"] | float = 1.0, of_inputs: Float[Tensor, " D"] | float = 1.0
) -> tuple[Float[Tensor, "C C"], Float[Tensor, "D D"]]:
    """`G` and `A` of a linear layer, for scales of its outputs and of its inputs."""
    layer = head_of(ggn.features)
    assert layer is not None
    G, A = (torch.zeros(n, n, dtype=torch.float64, device=ggn.device) for n in layer.index.shape)
    with ggn.features.summing(G, A):
        for h, parts, B in _inputs_and_curvatures(ggn):
            scaled = h * of_inputs
            norms = scaled.square().sum(1)
            if parts is not None:
                d, v = parts
                G += torch.diag(norms @ d) - (v * norms[:, None]).T @ v
                diagonal = d - v.square()
            else:
                G += torch.einsum("n,nce->ce", norms, B)
                diagonal = B.diagonal(dim1=1, dim2=2)
            A += (scaled.T * (diagonal * of_outputs**2).sum(1)) @ scaled
    scales = of_outputs * torch.ones(len(G)).to(G)
    return scales[:, None] * G * scales, A


@recorded
def _corrected(ggn: GGN, of_outputs: Float[Tensor, "C C"], of_inputs: Float[Tensor, "D D"]) -> Float[Tensor, "C D"]:
    """`Λ` for two bases in their columns."""
    total = torch.zeros(len(of_outputs), len(of_inputs), dtype=torch.float64, device=ggn.device)
    with ggn.features.summing(total):
        for h, parts, product in _inputs_and_curvatures(ggn, of_outputs):
            if parts is not None:
                d, v = parts
                diagonal = d @ of_outputs.square() - (v @ of_outputs).square()
            else:
                diagonal = (product * of_outputs).sum(1)
            total += diagonal.T @ (h @ of_inputs).square()
    return total


def head_of(features: Features) -> LinearLayer | None:
    """The linear layer that the outputs of a network are those of, if features are of its weights."""
    if isinstance(features, NetworkFeatures) and isinstance(features.network, LinearLayer):
        return features.network
    return None


def head_inputs(features: Features, batch: Tensor) -> tuple[LinearLayer, Float[Tensor, "n d"]] | None:
    """The linear layer and its inputs for a batch, by a run of the network where they are not kept; or `None`."""
    if isinstance(features, SomeFeatures):
        return head_inputs(features.features, features.some[batch])
    if not isinstance(features, NetworkFeatures):
        return None
    if isinstance(features.network, LinearLayer):
        return features.network, features.inputs(batch)[0]
    if isinstance(getattr(features.network, "head", None), LinearLayer):  # of a `LastLayer`
        *_, head, z = features.network.evaluate_with_inputs(features.inputs(batch)[0])  # pyright: ignore
        return (head, z) if isinstance(head, LinearLayer) else None
    return None


@recorded
def head_matrix(ggn: GGN) -> Float[Tensor, "P P"]:
    """`M` in float64, in one pass over the inputs of a linear layer.

    It takes `N C (C + 1) D²` operations for `D` inputs of `C` outputs, `C` times fewer than products of rows of `Φ`.
    """
    layer = head_of(ggn.features)
    assert layer is not None
    num_outputs, num_inputs = layer.index.shape
    total = torch.zeros(num_outputs, num_inputs, num_outputs, num_inputs, dtype=torch.float64, device=ggn.device)
    with ggn.features.summing(total):
        for h, B in inputs_and_blocks(ggn):
            for c in range(num_outputs):
                # With all later outputs together it is one product of matrices.
                weighted = (B[:, c, c:, None] * h[:, None]).flatten(1)
                total[c, :, c:] += (h.T @ weighted).unflatten(1, (num_outputs - c, num_inputs))
    return _in_flat_order(_mirrored(total), layer.index)


def inputs_and_blocks(
    ggn: GGN, vectors: Float[Tensor, "C C"] | None = None
) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n C C"]]]:
    """`h_i` and `B_i` of parts of the data, or `B_i` times the columns of a matrix, in float64; inside of `summing`.

    The features must be those of a linear layer.
    """
    features, layer = ggn.features, head_of(ggn.features)
    assert isinstance(features, NetworkFeatures)
    assert layer is not None
    most = max(1, NUMBERS_TOGETHER // features.num_outputs**2)
    for chunk in (part for batch in features.own_chunks() for part in batch.split(most)):
        f = ggn.outputs_of(chunk).double()
        rows = torch.eye(f.shape[1], dtype=f.dtype, device=f.device) if vectors is None else vectors.T
        columns = ggn.likelihood.curvature(f, rows[:, None].expand(-1, *f.shape), ggn._targets(chunk))
        yield layer.extended(features.inputs(chunk)[0]).double(), columns.movedim(0, 2)


def _inputs_and_curvatures(
    ggn: GGN, vectors: Float[Tensor, "C C"] | None = None
) -> Iterator[tuple[Float[Tensor, "n D"], tuple[Tensor, Tensor] | None, Float[Tensor, "n C C"]]]:
    """`h_i` of parts of the data, with `d` and `v` of `B_i = diag(d) − vvᵀ`, or else with `inputs_and_blocks`."""
    features, layer = ggn.features, head_of(ggn.features)
    assert isinstance(features, NetworkFeatures)
    assert layer is not None
    for batch in features.own_chunks():
        f = ggn.outputs_of(batch).double()
        parts = ggn.likelihood.diagonal_and_vector(f, ggn._targets(batch))
        if parts is None:
            break
        yield layer.extended(features.inputs(batch)[0]).double(), parts, f
    else:
        return
    for h, B in inputs_and_blocks(ggn, vectors):
        yield h, None, B


def head_operations(features: Features, num_vectors: float) -> float:
    """Operations of `head_curvature` for labels, and of turning vectors by its eigenvectors."""
    N, C, P = features.num_data, features.num_outputs, features.size
    D = P / C
    if P <= _MOST_WEIGHTS:
        return 1.0 * N * C * (C + 1) * D**2 + 9.0 * P**3 + 4.0 * num_vectors * P**2
    sums = 2.0 * N * (3 * C**2 + 2 * D**2 + C * D)
    return sums + 9.0 * (C**3 + D**3) + 4.0 * num_vectors * C * D * (C + D)


def _mirrored(total: Float[Tensor, "C D C D"]) -> Float[Tensor, "C D C D"]:
    """Copies the blocks above the diagonal to those below."""
    for c in range(len(total)):
        total[c + 1 :, :, c] = total[c, :, c + 1 :].permute(1, 2, 0)
    return total


def _in_flat_order(total: Float[Tensor, "C D C D"], index: Float[Tensor, "C D"]) -> Float[Tensor, "P P"]:
    """Returns the matrix with its rows and columns at their positions in a flat vector."""
    order = index.flatten().argsort()
    return total.reshape(len(order), len(order))[order][:, order]


def has_head_covariances(curvature: Curvature) -> bool:
    """Whether `head_covariances` is for a curvature."""
    if not isinstance(curvature, Kronecker):
        return isinstance(curvature, DenseCurvature)
    # A block that is one matrix row has eigenvectors of its own, as `kfac` makes them for few weights.
    return len(curvature.blocks) == 1 and not len(curvature.rest) and curvature.blocks[0].index.shape[1] > 1


def head_covariances(
    curvature: Curvature,
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
    most = max(1, NUMBERS_TOGETHER // (len(vectors) * vectors.shape[-1]))
    return torch.cat([_of_rows(part, vectors, curvature.spectrum, shifts) for part in h.split(most)], 1)


def head_variances(
    curvature: Curvature, layer: "LinearLayer", z: Float[Tensor, "n d"], shift: Float[Tensor, ""], scale: Tensor
) -> Float[Tensor, "n C"]:
    """The diagonals of `head_covariances`; of one block with many outputs without the matrices."""
    if not isinstance(curvature, Kronecker):
        return head_covariances(curvature, layer, z, shift[None], scale)[0].diagonal(dim1=1, dim2=2)
    block, h, scales = curvature.blocks[0], layer.extended(z).double(), scale[layer.index].double()
    (of_outputs,), (of_inputs,) = outer_factors(scales[None])
    squares, U = ((h * of_inputs) @ block.U_A[0]).square(), of_outputs[:, None] * block.U_G[0]
    return squares @ (1 / (block.eigenvalues[0] + shift.to(h))).mT @ U.square().T


def _of_rows(h: Tensor, vectors: Float[Tensor, "C D P"], eigenvalues: Tensor, shifts: Tensor) -> Tensor:
    rows = (h @ vectors.movedim(1, 0).flatten(1)).unflatten(1, (len(vectors), -1))
    return torch.stack([rows / (eigenvalues + shift) @ rows.mT for shift in shifts])


def _of_block(block: KroneckerBlock, h: Tensor, scales: Float[Tensor, "C D"], shifts: Tensor) -> Tensor:
    (of_outputs,), (of_inputs,) = outer_factors(scales[None])
    squares, U = ((h * of_inputs) @ block.U_A[0]).square(), of_outputs[:, None] * block.U_G[0]
    inverse = 1 / (block.eigenvalues + shifts[:, None, None])
    return (U * (squares @ inverse.mT)[:, :, None]) @ U.T
