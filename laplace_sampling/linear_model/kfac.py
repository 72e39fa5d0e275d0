r"""Eigenvalue-corrected Kronecker factors (EKFAC): `M̂ = (U_G ⊗ U_A) diag(Λ) (U_G ⊗ U_A)ᵀ` for the weights of a layer.

The eigenvectors are those of the partial traces `G` and `A` of the layer's block of `M`; `Λ` is the diagonal of that
block in their basis (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored
eigenbasis"; `layer_curvature` has the formulas). One pass over some of the data finds the eigenvectors, one over all
finds `Λ`. Each takes a forward pass of a datum, and a VJP for each random output `L z_i` that stands for all outputs:
sums of squares of these are unbiased, and over many data they average out.

Layers of few weights and normalisations have the block itself instead of factors, all other weights its diagonal. A
test finds out which operations make up the gradient of a weight: where their `Σ_it g_it a_itᵀ` is not the gradient, as
where it is used elsewhere too, and where the data are not along one axis, it is one of the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import SeededNoise
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.kronecker import Kronecker, KroneckerBlock, outer_factors
from laplace_sampling.linear_model.layer_curvature import partial_traces, squares
from laplace_sampling.linear_model.network_features import NetworkFeatures
from laplace_sampling.networks.layers import Layer, LayerRun, Pair, layers_of
from laplace_sampling.networks.subnetwork import Subnetwork
from laplace_sampling.solvers.lapack import eigenvectors
from laplace_sampling.solvers.recorded import recorded

__all__ = ["Factors", "corrected", "kronecker_factors"]

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


def kronecker_factors(ggn: GGN, noise: SeededNoise, data: Tensor | None = None) -> Factors:
    """The factors of a GGN, by a forward pass and a VJP for each random output.

    Args:
        ggn: `M`, of the features of a network.
        noise: its signs are the probes `z`; outputs that are no more than they are taken as they are.
        data: the indices of data that stand for all, by default all.

    Raises:
        ValueError: for other features, such as those of measurements or with noise variances.
    """
    features = ggn.features
    if not isinstance(features, NetworkFeatures) or isinstance(features.network, Subnetwork):
        raise ValueError(
            'method="kfac" is for whole weights of a network and data of equal noise: leave out `noise_variances` (or '
            '`weights` of a regression), `observe` and masks of `parameters=`, or use method="diagonal".'
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
        return cls(layer, scales, (eigenvectors(scaled[0]), eigenvectors(scaled[1])))

    @property
    def sums(self) -> Callable[[Pair], tuple[Tensor, ...]]:
        """The sums over data that `block` takes."""
        if self.vectors is None:
            return partial_traces
        left, right = (s[..., None] * U for s, U in zip(self.scales, self.vectors, strict=True))
        return partial(_only_squares, left=left, right=right)

    def block(self, sums: tuple[Tensor, ...]) -> KroneckerBlock:
        """The block of the layer."""
        if self.vectors is not None:
            return KroneckerBlock(self.layer.index, *self.vectors, sums[0])
        # With one row the partial trace over it is the block itself.
        s = self.scales[0] * self.scales[1]
        eigenvalues, U = torch.linalg.eigh(s[..., None] * sums[1] * s[:, None])
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
