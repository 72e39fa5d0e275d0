r"""Eigenvalue-corrected Kronecker factors (EKFAC): `M̂ = (U_G ⊗ U_A) diag(Λ) (U_G ⊗ U_A)ᵀ` for the weights of a layer,
in whose eigenvectors every function of `M̂ + s I` is elementwise.

With the gradients `D_i`, `[m, k]`, of a layer's weights along a random output `φ_iᵀ L z_i` of each datum, `E[z zᵀ] =
I`, a layer's block of `M` is `E[Σ_i vec(D_i) vec(D_i)ᵀ]`. Its partial traces, and its diagonal in the Kronecker product
of two bases, are sums over the same gradients:

    G = Σ_i D_i D_iᵀ,        A = Σ_i D_iᵀ D_i,        Λ = Σ_i (U_Gᵀ D_i U_A)².

The places at which a layer uses its weights are summed within `D_i`, not taken as data of their own.

The eigenvectors are those of the partial traces `G` and `A` of the layer's block of `M`; `Λ` is the diagonal of that
block in their basis (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored
eigenbasis"). One pass over some of the data finds the eigenvectors, one over all
finds `Λ`. Each takes a forward pass of a datum, and a VJP for each random output `L z_i` that stands for all outputs:
sums of squares of these are unbiased, and over many data they average out.

Layers of few weights and normalisations have the block itself instead of factors, all other weights its diagonal. A
test finds out which operations make up the gradient of a weight: where their `Σ_it g_it a_itᵀ` is not the gradient, as
where it is used elsewhere too, and where the data are not along one axis, it is one of the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.low_rank import LowRank
from laplace_sampling.linear_model.draws import SeededNoise
from laplace_sampling.linear_model.features import Features, NetworkFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.networks.filters import FilterNetwork
from laplace_sampling.networks.layers import Layer, LayerRun, Pair, layers_of
from laplace_sampling.networks.random_weights import Subnetwork
from laplace_sampling.solvers.dense import DenseCurvature
from laplace_sampling.solvers.lapack import batched_eigen
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.preconditioners import Curvature, Jacobi
from laplace_sampling.solvers.recorded import recorded


def partial_traces(pair: Pair) -> tuple[Float[Tensor, "q m m"], Float[Tensor, "q k k"]]:
    """`G` and `A` of some data, in float64."""
    g, a = pair
    m, k, places = g.shape[2], a.shape[2], g.shape[3]
    # Whichever is cheaper: places are multiplied by places, or the gradients are formed.
    if places**2 * (m + k) + places * (m**2 + k**2) <= m * k * (places + m + k):
        return _summed("nqmt,nqlt->qml", g @ (a.mT @ a), g), _summed("nqkt,nqlt->qkl", a @ (g.mT @ g), a)
    G, A = 0.0, 0.0
    for of_outputs, of_inputs in _split(g, a):
        D = of_outputs @ of_inputs.mT
        G, A = G + _summed("nqmk,nqlk->qml", D, D), A + _summed("nqmk,nqml->qkl", D, D)
    assert isinstance(G, Tensor)
    assert isinstance(A, Tensor)
    return G, A


def squares(pair: Pair, left: Float[Tensor, "q m m"], right: Float[Tensor, "q k k"]) -> Float[Tensor, "q m k"]:
    """`Σ_i (leftᵀ D_i right)²` of some data, in float64."""
    g, a = pair
    left, right = left.to(g), right.to(a)
    m, k, places = g.shape[2], a.shape[2], g.shape[3]
    # Whichever is cheaper: the places are turned, or the gradients.
    early = places * (m**2 + k**2) <= m * k * (m + k)
    if early:
        g, a = torch.einsum("nqmt,qmj->nqjt", g, left), torch.einsum("nqkt,qkl->nqlt", a, right)
    if early and places == 1:
        return _summed("nqm,nqk->qmk", g[..., 0].square(), a[..., 0].square())
    total = torch.zeros(g.shape[1], m, k, dtype=torch.float64, device=g.device)
    for of_outputs, of_inputs in _split(g, a):
        D = of_outputs @ of_inputs.mT
        if not early:
            # One product of all data for each group, not one for each datum.
            D = torch.einsum("nqjk,qkl->nqjl", torch.einsum("nqmk,qmj->nqjk", D, left), right)
        total += D.square_().sum(0)
    return total


def _summed(equation: str, left: Tensor, right: Tensor) -> Tensor:
    # Data of one batch are summed in their own precision, batches in float64.
    return torch.einsum(equation, left, right).double()


def _split(g: Tensor, a: Tensor) -> list[Pair]:
    """The data in parts whose gradients fit in memory."""
    most = max(1, NUMBERS_TOGETHER // (g.shape[1] * g.shape[2] * a.shape[2]))
    return list(zip(g.split(most), a.split(most), strict=True))


# Before the names of the tensors of `M̂` in a file.
CURVATURE = "curvature."


# The tensors of a block, in the order of its arguments.
_PARTS = ("index", "U_G", "U_A", "eigenvalues")


# Added to the eigenvalues: one number, or one for each weight.
Shift = float | Tensor


@dataclass(frozen=True)
class KroneckerBlock:
    """`(U_G ⊗ U_A) diag(Λ) (U_G ⊗ U_A)ᵀ` for the weights of one layer, or the same for each of its groups.

    Attributes:
        index: positions of the weights in the flat vector, a matrix `[m, k]` for each of `q` groups.
        U_G: orthonormal columns, for the outputs.
        U_A: the same for the inputs.
        eigenvalues: `Λ`.
    """

    index: Tensor
    U_G: Float[Tensor, "q m m"]
    U_A: Float[Tensor, "q k k"]
    eigenvalues: Float[Tensor, "q m k"]

    def shift(self, shift: Shift) -> float:
        """The shift of this block, one number: the eigenvectors are those of `M̂ + s I` for no other shift."""
        if not isinstance(shift, Tensor) or shift.dim() == 0:
            return float(shift)
        shifts = shift[self.index].flatten()
        if not bool((shifts == shifts[0]).all()):
            raise ValueError(
                "Kronecker-factored curvature takes one prior precision for the weights of a layer: use "
                'prior="isotropic", "layerwise" or "g-prior".'
            )
        return float(shifts[0])

    def turned(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K q m k"]:
        """The coordinates of `v_k` in the eigenvectors."""
        # Without forming a Kronecker product, which has (mk)² entries.
        return self.U_G.mT.to(v) @ v[..., self.index] @ self.U_A.to(v)

    def apply(self, f: Callable[[Tensor], Tensor], v: Float[Tensor, "K P"]) -> Float[Tensor, "K q m k"]:
        """`f(M̂) v_k` at these positions."""
        # In the precision of the vectors: where many outputs share a layer, this is most of a sample's cost.
        return self.U_G.to(v) @ (self.turned(v) * f(self.eigenvalues).to(v)) @ self.U_A.mT.to(v)

    def diagonal(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "q m k"]:
        """The diagonal of `f(M̂)`."""
        # Entries of the diagonal are `Σ_jk U_ij² f(λ_jk) V_lk²`: the squares suffice.
        return self.U_G**2 @ f(self.eigenvalues) @ (self.U_A**2).mT

    def congruent(self, w: Float[Tensor, " P"]) -> "KroneckerBlock":
        """`W M̂ W`, exactly for one number a block or rows; else its diagonal in the basis of its partial traces."""
        scales = w[self.index].to(self.U_G)
        if bool((scales == scales.flatten()[0]).all()):
            return replace(self, eigenvalues=self.eigenvalues * scales**2)
        of_outputs, of_inputs = (
            s[..., None] * U for s, U in zip(outer_factors(scales), (self.U_G, self.U_A), strict=True)
        )
        # Partial traces of `W M̂ W`: the lengths of the scaled vectors of the other side weigh the eigenvalues.
        G = (self.eigenvalues @ of_inputs.square().sum(1)[..., None])[..., 0]
        A = (of_outputs.square().sum(1)[:, None] @ self.eigenvalues)[:, 0]
        U_G = batched_eigen((of_outputs * G[:, None]) @ of_outputs.mT)[1]
        U_A = batched_eigen((of_inputs * A[:, None]) @ of_inputs.mT)[1]
        eigenvalues = (U_G.mT @ of_outputs) ** 2 @ self.eigenvalues @ ((U_A.mT @ of_inputs) ** 2).mT
        return KroneckerBlock(self.index, U_G, U_A, eigenvalues)


def outer_factors(scales: Float[Tensor, "q m k"]) -> tuple[Float[Tensor, "q m"], Float[Tensor, "q k"]]:
    """The factors of scales that are a product of one for each output and one for each input.

    Raises:
        ValueError: if they are not.
    """
    of_outputs, of_inputs = scales[..., 0] / scales[:, :1, 0], scales[:, 0]
    if not torch.allclose(of_outputs[..., None] * of_inputs[:, None], scales, rtol=1e-4):
        raise ValueError(
            "Kronecker-factored curvature takes a prior whose scales are a product of one factor for each output "
            'and one for each input of a layer: use prior="isotropic", "layerwise" or "g-prior".'
        )
    return of_outputs, of_inputs


class Kronecker(Curvature):
    """`M̂` of a block for each layer, and a diagonal for the weights that are in no block.

    Args:
        blocks: one for each layer.
        rest: positions of the other weights in the flat vector.
        diagonal: diagonal of `M̂` there.
        passes: the passes that it took, as in a `Preconditioner`.

    Attributes:
        num_factored: number of weights in blocks.
    """

    def __init__(self, blocks: list[KroneckerBlock], rest: Tensor, diagonal: Tensor, passes: float) -> None:
        self.blocks, self.rest, self.diagonal, self.passes = blocks, rest, diagonal, passes
        self.num_factored = sum(block.index.numel() for block in blocks)
        self.size = self.num_factored + len(rest)
        # Of the last shift and dtype, with the positions that were asked for.
        self._inverse = (math.nan, torch.float64), dict[int, tuple[Tensor, KroneckerBlock | None]]()

    def inverse_at(self, index: Tensor, shift: float, dtype: torch.dtype) -> KroneckerBlock | None:
        """The block of `(M̂ + s)⁻¹` with weights at these positions; `None` if there is none.

        It is kept: for one datum, finding and converting it would take longer than a product.
        """
        if self._inverse[0] != (shift, dtype):
            self._inverse = (shift, dtype), {}
        known = self._inverse[1]
        if id(index) not in known or known[id(index)][0] is not index:
            flat = index.flatten()
            found = next((block for block in self.blocks if torch.equal(block.index.flatten(), flat)), None)
            if found is not None:
                parts = (found.U_G, found.U_A, 1 / (found.eigenvalues + shift))
                found = KroneckerBlock(found.index, *(t.to(dtype) for t in parts))
            known[id(index)] = index, found
        return known[id(index)][1]

    def _apply(self, v: Tensor, f: Callable[[Tensor, Shift], Tensor], shift: Shift = 0.0) -> Tensor:
        """`f(M̂, s) v_k`, where `f` acts on eigenvalues."""
        out = torch.empty_like(v)
        for block in self.blocks:
            block_shift = block.shift(shift)
            out[:, block.index] = block.apply(lambda t, s=block_shift: f(t, s), v).to(v)
        out[:, self.rest] = v[:, self.rest] * f(self.diagonal, self._shift_of_rest(shift)).to(v)
        return out

    def _diagonal(self, f: Callable[[Tensor, Shift], Tensor], shift: Shift) -> Tensor:
        """The diagonal of `f(M̂, s)`."""
        out = torch.empty(self.size, dtype=torch.float64, device=self.rest.device)
        for block in self.blocks:
            block_shift = block.shift(shift)
            out[block.index] = block.diagonal(lambda t, s=block_shift: f(t, s))
        out[self.rest] = f(self.diagonal, self._shift_of_rest(shift)).to(out)
        return out

    def _shift_of_rest(self, shift: Shift) -> Shift:
        return shift[self.rest] if isinstance(shift, Tensor) and shift.dim() else shift

    def solve(self, v: Tensor, shift: Shift) -> Tensor:
        return self._apply(v, lambda t, s: 1 / (t + s), shift)

    def solve_root(self, v: Tensor, shift: Shift) -> Tensor:
        return self._apply(v, lambda t, s: (t + s) ** -0.5, shift)

    def matmul(self, v: Tensor) -> Tensor:
        return self._apply(v, lambda t, s: t)

    def variance(self, shift: Shift) -> Tensor:
        return self._diagonal(lambda t, s: 1 / (t + s), shift)

    def leverage(self, shift: Shift) -> Tensor:
        return self._diagonal(lambda t, s: t / (t + s), shift)

    def eigenvalues(self) -> Tensor:
        return torch.cat([*(block.eigenvalues.reshape(-1) for block in self.blocks), self.diagonal])

    def congruent(self, w: Tensor) -> "Kronecker":
        blocks = [block.congruent(w) for block in self.blocks]
        return Kronecker(blocks, self.rest, self.diagonal * w[self.rest].to(self.diagonal) ** 2, self.passes)

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """`φ_i (M̂ + s_a)⁻¹ φ_iᵀ`: rows are turned once, and products of their pairs serve all shifts."""
        # Elementwise products are as many numbers as there are pairs of outputs.
        most = max(1, 2 * NUMBERS_TOGETHER // max(1, rows[0].numel() * (rows.shape[1] + 1)))
        return torch.cat([self._covariances(part, shifts) for part in rows.split(most)], dim=1)

    def _covariances(self, rows: Tensor, shifts: Tensor) -> Tensor:
        turned = torch.cat([*(block.turned(rows).flatten(-3) for block in self.blocks), rows[..., self.rest]], dim=-1)
        first, second = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
        inverse = 1 / (self.eigenvalues()[:, None] + shifts.to(self.eigenvalues()))
        pairs = (turned[:, first] * turned[:, second] @ inverse.to(turned)).double().movedim(-1, 0)
        blocks = pairs.new_empty(len(shifts), len(rows), rows.shape[1], rows.shape[1])
        blocks[..., first, second] = blocks[..., second, first] = pairs
        return blocks

    def tensors(self) -> dict[str, Tensor]:
        # Names are flat, as files hold a dictionary of tensors: `3.U_G` is of block 3.
        named = {f"{n}.{name}": getattr(block, name) for n, block in enumerate(self.blocks) for name in _PARTS}
        return {"rest": self.rest, "diagonal": self.diagonal, **named}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Kronecker":
        """The inverse of `tensors`."""
        numbers = range((len(tensors) - 2) // len(_PARTS))
        blocks = [KroneckerBlock(*(tensors[f"{n}.{name}"] for name in _PARTS)) for n in numbers]
        return cls(blocks, tensors["rest"], tensors["diagonal"], 0.0)


# The curvatures that files hold, each by the name of a tensor that those before it do not have.
CURVATURES: dict[str, type[Curvature]] = {
    "factor": LowRank,
    "vectors": DenseCurvature,
    "rest": Kronecker,
    "diagonal": Jacobi,
}


def restored_curvature(tensors: dict[str, Tensor]) -> Curvature:
    """`M̂` from its `tensors`."""
    return next(kind for name, kind in CURVATURES.items() if name in tensors).from_tensors(tensors)


@dataclass(frozen=True)
class Inverse:
    """`(M̂ + A)⁻¹` of rows, in scaled coordinates."""

    curvature: Curvature
    spread: Float[Tensor, " P"]

    def solve(self, rhs: Tensor) -> Tensor:
        """`(M̂ + A)⁻¹ v`."""
        return self.curvature.solve(rhs, self.spread)


# Layers of at most so many weights have no factors, where the random outputs are twice as many.
_DENSE = 1024


# Data of which the layers are found.
_TRIED = 16


@dataclass(frozen=True)
class Factors:
    """The partial traces of the blocks of layers, and the diagonal of the other weights.

    Attributes:
        layers: the layers.
        traces: `G` and `A` of each.
        rest: positions of the weights that are in none.
        diagonal: of `M` at these.
        passes: products spent, in units of all data and one vector.
    """

    layers: list[Layer]
    traces: list[tuple[Tensor, ...]]
    rest: Tensor
    diagonal: Tensor
    passes: float


def has_factors(features: Features) -> bool:
    """Whether there are Kronecker factors: of whole weights of a network, and data of equal noise."""
    return isinstance(features, NetworkFeatures) and not isinstance(features.network, Subnetwork | FilterNetwork)


def kronecker_factors(ggn: GGN, noise: SeededNoise, data: Tensor | None = None) -> Factors:
    """The factors of a GGN, by a forward pass and a VJP for each random output.

    Args:
        ggn: `M`, of the features of a network.
        noise: its signs are the probes `z`; outputs that are no more than they are taken as they are.
        data: the indices of data that stand for all, by default all.

    Raises:
        ValueError: for other features, such as those of measurements or with noise variances.
    """
    if not has_factors(ggn.features):
        raise ValueError(
            'method="kfac" is for whole weights of a network and data of equal noise: leave out `noise_variances` (or '
            '`weights` of a regression), `observe`, masks of `parameters=` and prior="filterwise", or use '
            'method="diagonal".'
        )
    layers, rest = _layers(ggn, noise)
    return Factors(layers, *_sums(ggn, noise, data, layers, [partial_traces for _ in layers], rest))


def corrected(
    ggn: GGN, noise: SeededNoise, factors: Factors, scale: Tensor | None = None, data: Tensor | None = None
) -> Kronecker:
    """`M̂` in the eigenvectors of some factors, by another pass of the same cost.

    Args:
        ggn: `M`.
        noise: as for the factors; with other noise than theirs, `Λ` is unbiased.
        factors: the factors.
        scale: `s`, `[P]`, for the `M̂` of `diag(s) M diag(s)`. It has other eigenvectors, whose `Λ` is summed here.
        data: as for the factors.

    Raises:
        ValueError: for a scale that is not a product of two factors in each layer.
    """
    scale = torch.ones(ggn.size, dtype=torch.float64, device=ggn.device) if scale is None else scale.double()
    bases = [_Basis.of(layer, (G, A), scale) for layer, (G, A) in zip(factors.layers, factors.traces, strict=True)]
    of_layers, rest, diagonal, passes = _sums(
        ggn, noise, data, factors.layers, [basis.sums for basis in bases], factors.rest
    )
    blocks = [basis.block(sums) for basis, sums in zip(bases, of_layers, strict=True)]
    return Kronecker(blocks, rest, diagonal * scale[rest] ** 2, factors.passes + passes)


@dataclass(frozen=True)
class _Basis:
    """The eigenvectors of a layer in scaled coordinates, and what has to be summed for their eigenvalues.

    Attributes:
        layer: the layer.
        scales: `s` of its weights, a factor for each row and one for each column.
        vectors: `U_G` and `U_A`, or none where the block is not factored: one row a group.
    """

    layer: Layer
    scales: tuple[Float[Tensor, "q m"], Float[Tensor, "q k"]]
    vectors: tuple[Float[Tensor, "q m m"], Float[Tensor, "q k k"]] | None

    @classmethod
    def of(cls, layer: Layer, traces: tuple[Tensor, Tensor], scale: Float[Tensor, " P"]) -> "_Basis":
        """The basis of partial traces, in the coordinates of a scale of each weight of the network."""
        scales = outer_factors(scale[layer.index])
        if layer.index.shape[1] == 1:
            return cls(layer, scales, None)
        scaled = [s[..., None] * trace * s[:, None] for s, trace in zip(scales, traces, strict=True)]
        return cls(layer, scales, (batched_eigen(scaled[0])[1], batched_eigen(scaled[1])[1]))

    @property
    def sums(self) -> Callable[[Pair], tuple[Tensor, ...]]:
        """The sums over data that `block` takes."""
        if self.vectors is None:
            return partial_traces
        left, right = (s[..., None] * U for s, U in zip(self.scales, self.vectors, strict=True))
        return partial(_only_squares, left=left, right=right)

    def block(self, sums: tuple[Tensor, ...]) -> KroneckerBlock:
        """The block of the layer, from sums over the data by the function `sums`."""
        if self.vectors is not None:
            return KroneckerBlock(self.layer.index, *self.vectors, sums[0])
        # With one row the partial trace over it is the block itself.
        s = self.scales[0] * self.scales[1]
        eigenvalues, U = batched_eigen(s[..., None] * sums[1] * s[:, None])
        return KroneckerBlock(self.layer.index, torch.ones_like(U[:, :1, :1]), U, eigenvalues.clamp_min(0)[:, None])


def _only_squares(pair: Pair, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    return (squares(pair, left, right),)


# Sums over data -------------------------------------------------------------------------------------------------------


@recorded
def _sums(
    ggn: GGN,
    noise: SeededNoise,
    data: Tensor | None,
    layers: list[Layer],
    functions: list[Callable[[Pair], tuple[Tensor, ...]]],
    rest: Tensor,
) -> tuple[list[tuple[Tensor, ...]], Tensor, Tensor, float]:
    """Sums over data of functions of the pairs of layers, `rest`, the diagonal there, and passes."""
    features = ggn.features
    assert isinstance(features, NetworkFeatures)
    others = _others(features, rest)
    of_layers = [_zeros(layer, function) for layer, function in zip(layers, functions, strict=True)]
    diagonal = torch.zeros(len(rest), dtype=torch.float64, device=rest.device)
    vjps = torch.zeros((), dtype=torch.float64, device=rest.device)
    with features.summing(*(total for totals in of_layers for total in totals), diagonal, vjps):
        for chunk in features.own_chunks(data):
            x, layout = features.inputs(chunk)
            run = LayerRun(features.network, x, len(chunk))
            roots = _roots(ggn, noise, chunk).to(run.f)
            for root in roots:
                u = features.layout.narrow(root[None], layout)[0]
                for number, (layer, pair) in enumerate(zip(layers, run.pairs(layers, u), strict=True)):
                    if pair is not None:
                        for total, more in zip(of_layers[number], functions[number](layer.shaped(pair)), strict=True):
                            total += more
                if others is not None:
                    diagonal += others.vjp_each(root, chunk).square().sum(0)
                vjps += (1 + (others is not None)) * len(chunk)
            features.network.products["vjp"] += len(roots) * len(chunk)
    share = (features.num_data if data is None else len(data)) / features.num_data
    summed = [tuple(t / share for t in sums) for sums in of_layers]
    # A pass is a JVP and a VJP of all data.
    return summed, rest, diagonal / share, float(vjps) / (2 * features.num_data)


def _zeros(layer: Layer, function: Callable[[Pair], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Sums of no data."""
    q, m, k = layer.index.shape
    shapes = [(q, m, m), (q, k, k)] if function is partial_traces else [(q, m, k)]
    return tuple(torch.zeros(shape, dtype=torch.float64, device=layer.index.device) for shape in shapes)


def _others(features: NetworkFeatures, rest: Tensor) -> NetworkFeatures | None:
    """The features of the weights at some positions, which are whole tensors."""
    if not len(rest):
        return None
    is_rest = torch.zeros(features.size, dtype=torch.bool).index_fill_(0, rest.cpu(), True)
    parts = is_rest.split(features.network.shell.sizes)
    names = [name for name, part in zip(features.network.names, parts, strict=True) if bool(part.all())]
    return NetworkFeatures(features.network.with_names(names), features.data, features.layout)


def _roots(ggn: GGN, noise: SeededNoise, chunk: Tensor) -> Float[Tensor, "R n C"]:
    """The columns of roots of `B`, or random combinations of them if outputs are more than probes."""
    f = ggn.outputs_of(chunk)
    if f.shape[1] <= noise.num_samples:
        white = torch.eye(f.shape[1]).to(f)[:, None].expand(-1, len(f), -1)
    else:
        # Signs have the covariance of normal numbers and a smaller fourth moment: squares of sums vary less.
        white = noise(chunk).sign().to(f) / math.sqrt(noise.num_samples)
    return ggn.likelihood.root(f, white, ggn._targets(chunk))


# Which weights are in layers ------------------------------------------------------------------------------------------


def _layers(ggn: GGN, noise: SeededNoise) -> tuple[list[Layer], Tensor]:
    """The layers, and the positions of the weights that are in none."""
    features = ggn.features
    assert isinstance(features, NetworkFeatures)
    positions = torch.arange(ggn.size, device=ggn.device).split(features.network.shell.sizes)
    places = dict(zip(features.network.names, positions, strict=True))
    few = next(iter(features.chunks()))[:_TRIED]
    num_roots = len(_roots(ggn, noise, few))
    # All outputs of a datum have no noise that a block could take for curvature.
    most = min(_DENSE, math.inf if num_roots == features.num_outputs else features.num_data * num_roots / 2)
    found = layers_of(LayerRun(features.network, features.inputs(few)[0], len(few)), places)
    layers = [layer.as_row() if layer.index.numel() <= most else layer for layer in found]
    inside = {name for layer in layers for name in layer.names}
    rest = [place for name, place in places.items() if name not in inside]
    return layers, torch.cat(rest) if rest else positions[0][:0]
