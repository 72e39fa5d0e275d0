r"""Kronecker-factored curvature (KFAC): `M̂ = G ⊗ A` for the weights of each linear layer and convolution.

With inputs `a` of such a layer (a one appended for its bias) and pulled-back columns `g` of roots of `B`, the exact
block is `Σ_i Σ_c vec(Σ_t g_itc a_itᵀ) vec(…)ᵀ` over data `i`, outputs `c` and places `t` where the weights are used.
KFAC treats inputs and gradients, and different places, as independent (Martens and Grosse 2015; "expand" of Eschenhagen
et al. 2023):

    G = Σ_i Σ_t Σ_c g_itc g_itcᵀ,        A = Σ_i Σ_t w_i a_it a_itᵀ / Σ_i Σ_t w_i,

with weights `w` of data, which are in `g` already. Sums are over the places that the outputs depend on: where all
`g_itc` are zero, as at padding and ignored labels, nothing contributes to `M`.

Weights of all other modules get the diagonal of `M`. A test finds out whether a layer is used as its class says: where
the gradients of its weights are not `Σ_it g_it a_itᵀ`, its weights are treated as those of other modules.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.likelihoods.weighted import Weighted
from laplace_sampling.linear_model.ggn import GGN, WhiteNoise
from laplace_sampling.linear_model.kronecker import Kronecker, KroneckerBlock
from laplace_sampling.linear_model.network_features import NetworkFeatures
from laplace_sampling.linear_model.priors.g_prior import GPrior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.subnetwork import Subnetwork
from laplace_sampling.networks.undisturbed import LOCK, undisturbed

__all__ = ["kfac"]


@dataclass
class _Call:
    """One call of a layer.

    Attributes:
        inputs: inputs as rows, one for each place.
        output: output of the call.
        counts: how much each row counts: `w_i`, or 0 where the outputs do not depend on it.
    """

    inputs: Float[Tensor, "rows n"]
    output: Tensor
    counts: Float[Tensor, " rows"]


@dataclass
class _Layer:
    """A linear layer or convolution, and the sums over its calls.

    Attributes:
        module: the layer itself.
        weight: name of its weight among the random weights.
        bias: name of its bias, if that is random.
        calls: calls in the last run of the network.
        A: `Σ w a aᵀ`.
        G: `Σ g gᵀ`.
        rows: sum of the weights `w`.
    """

    module: nn.Linear | nn.Conv2d
    weight: str
    bias: str | None
    calls: list[_Call] = field(default_factory=list)
    A: Tensor | float = 0.0
    G: Tensor | float = 0.0
    rows: float = 0.0

    def record(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        """A forward hook that stores the call."""
        inputs = self._unfolded((args[0] if args else kwargs["input"]).detach())
        self.calls.append(_Call(inputs, output, torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)))
        # The next module may change its input in place, as `ReLU(inplace=True)` does: it gets a copy.
        return output.clone()

    def add_calls(self) -> None:
        """Adds the inputs of all calls to `A`, and forgets the calls."""
        for call in self.calls:
            a = call.inputs.double()
            self.A, self.rows = self.A + (call.counts * a.T) @ a, self.rows + float(call.counts.sum())
        self.calls = []

    def _unfolded(self, x: Tensor) -> Tensor:
        """Inputs as rows, with a one for the bias: a convolution is a linear layer of patches."""
        module = self.module
        if isinstance(module, nn.Conv2d):
            assert not isinstance(module.padding, str)
            x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
        x = x.reshape(-1, x.shape[-1])
        return x if self.bias is None else torch.cat([x, x.new_ones(len(x), 1)], dim=1)

    def by_row(self, gradient: Tensor) -> Tensor:
        """The gradient in an output as rows `[rows, m]`, in the order of the rows of the inputs."""
        if isinstance(self.module, nn.Conv2d):
            gradient = gradient.movedim(1, -1)
        return gradient.reshape(-1, gradient.shape[-1])

    def explains(self, output_gradients: list[Tensor], weight_gradients: dict[str, Tensor]) -> bool:
        """Whether the gradients of its weights are those that its calls give, `Σ g aᵀ`."""
        if not self.calls:
            return False
        pairs = [(self.by_row(g), call.inputs) for call, g in zip(self.calls, output_gradients, strict=True)]
        if any(len(g) != len(a) for g, a in pairs):  # a subclass that returns something else
            return False
        by_calls = torch.stack([g.T @ a for g, a in pairs]).sum(0)
        expected = weight_gradients[self.weight].reshape(len(by_calls), -1)
        if self.bias is not None:
            expected = torch.cat([expected, weight_gradients[self.bias][:, None]], dim=1)
        # Half of the digits: sums over many places round in another order.
        rounding = math.sqrt(torch.finfo(by_calls.dtype).eps)
        return float((by_calls - expected).norm()) <= rounding * float(expected.norm())


def kfac(ggn: GGN, noise: WhiteNoise) -> Kronecker:
    """KFAC of a GGN, by a forward pass of all data, and a reverse pass for each output or probe.

    Args:
        ggn: `M`, of the features of a network.
        noise: probes in place of the columns of roots of `B`, if there are fewer of them.

    Raises:
        ValueError: for other features, such as those of measurements or with noise variances.
    """
    features = ggn.features
    if not isinstance(features, NetworkFeatures) or isinstance(features.network, Subnetwork):
        raise ValueError(
            'method="kfac" is for whole weights of a network and data of equal noise: leave out `noise_variances` (or '
            '`weights` of a regression), `observe` and masks of `parameters=`, or use method="diagonal".'
        )
    layers = _layers(features.network)
    passes = 0.0
    for number, chunk in enumerate(features.chunks()):
        x, layout = features.inputs(chunk)
        with undisturbed, _recorded(layers):
            outputs, weights = features.network.traced(x)
        f = outputs.reshape(len(chunk), -1)
        if number == 0:
            layers = _used_as_their_class_says(layers, f, weights)
        roots = features.layout.narrow(_roots(ggn, noise, chunk), layout).to(f)
        _add_chunk(ggn, layers, f, roots, chunk)
        # A pass is a JVP and a VJP of all data; each root takes a VJP.
        passes += len(roots) * len(chunk) / (2 * features.num_data)
    return _assembled(ggn, layers, noise, passes)


def _layers(network: Linearisation) -> list[_Layer]:
    """Linear layers and convolutions whose weight is random."""
    # By identity: a weight that two modules share has one name, that of the first.
    with LOCK:
        names = {id(p): name for name, p in network.module.named_parameters() if name in network.shapes}
        layers = []
        for module in network.module.modules():
            if isinstance(module, nn.Conv2d):
                is_plain = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
            else:
                is_plain = isinstance(module, nn.Linear)
            if is_plain and isinstance(module, nn.Linear | nn.Conv2d) and id(module.weight) in names:
                layers.append(_Layer(module, names[id(module.weight)], names.get(id(module.bias))))
    return layers


@contextmanager
def _recorded(layers: list[_Layer]) -> Iterator[None]:
    """Records the calls of layers inside."""
    # Hooks, not a changed forward: subclasses and functional calls of a layer are seen as well.
    handles = [layer.module.register_forward_hook(layer.record, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _roots(ggn: GGN, noise: WhiteNoise, chunk: Tensor) -> Float[Tensor, "R n C"]:
    """The columns of roots of `B`, or random combinations of them if outputs are more than probes."""
    f = ggn.outputs[chunk]
    # Columns of `L` are exact; with `E[zzᵀ] = I`, scaled probes `Lz` have the same sum of squares in the mean.
    if f.shape[1] <= noise.num_samples:
        white = torch.eye(f.shape[1]).to(f)[:, None].expand(-1, len(f), -1)
    else:
        white = noise(chunk).to(f) / math.sqrt(noise.num_samples)
    return ggn.likelihood.root(f, white, ggn._targets(chunk))


def _add_chunk(ggn: GGN, layers: list[_Layer], f: Tensor, roots: Tensor, chunk: Tensor) -> None:
    """Adds the data of a chunk to the factors of all layers."""
    calls = [(layer, call) for layer in layers for call in layer.calls]
    for root in roots if calls else []:
        # One reverse pass gives the gradients in the outputs of all calls of all layers.
        for (layer, call), g in zip(calls, _pulled_back(f, calls, root), strict=True):
            layer.G = layer.G + g.T @ g
            # A gradient of exactly zero for all roots: padding, or a label that is ignored.
            call.counts[(g != 0).any(1)] = 1.0
    if isinstance(ggn.likelihood, Weighted) and calls:
        targets = ggn._targets(chunk)
        assert targets is not None
        _weigh(f, calls, roots, ggn.likelihood.weights(targets).to(f))
    for layer in layers:
        layer.add_calls()


def _gradients(f: Tensor, tensors: list[Tensor], u: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(f, tensors, u, retain_graph=True, allow_unused=True, materialize_grads=True))


def _pulled_back(f: Tensor, calls: list[tuple[_Layer, _Call]], u: Tensor) -> list[Float[Tensor, "rows m"]]:
    """`u` pulled back to the outputs of calls."""
    gradients = _gradients(f, [call.output for _, call in calls], u)
    return [layer.by_row(gradient).double() for (layer, _), gradient in zip(calls, gradients, strict=True)]


def _weigh(f: Tensor, calls: list[tuple[_Layer, _Call]], roots: Tensor, weights: Float[Tensor, " n"]) -> None:
    """Gives each row the weight of its datum.

    A layer may fold data and places into its rows in any way. So the datum of a row is not looked up: a reverse pass
    scaled by the weights shows the weight of each row as a ratio of gradients.
    """
    # A random combination of the roots, in which gradients that are not zero do not cancel.
    signs = torch.randn(len(roots), generator=torch.Generator().manual_seed(0)).to(roots)
    u = torch.einsum("k,knc->nc", signs, roots)
    pairs = zip(_pulled_back(f, calls, u), _pulled_back(f, calls, u * weights[:, None]), strict=True)
    for (_, call), (plain, scaled) in zip(calls, pairs, strict=True):
        ratio = (scaled * plain).sum(1) / plain.square().sum(1)
        call.counts = torch.where(call.counts > 0, ratio.nan_to_num(0.0), 0.0)


def _used_as_their_class_says(layers: list[_Layer], f: Tensor, weights: dict[str, Tensor]) -> list[_Layer]:
    """The layers whose weights act through their calls only.

    The test compares gradients of a random combination of the outputs; a weight that is also used elsewhere, or tied to
    another module, fails it.
    """
    u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
    weight_gradients = dict(zip(weights, _gradients(f, list(weights.values()), u), strict=True))
    used = []
    for layer in layers:
        # A layer that is never called, or called by other means than its forward, has no outputs here.
        outputs = [call.output for call in layer.calls]
        if outputs and layer.explains(_gradients(f, outputs, u), weight_gradients):
            used.append(layer)
        else:
            layer.calls = []
    return used


def _assembled(ggn: GGN, layers: list[_Layer], noise: WhiteNoise, passes: float) -> Kronecker:
    """The blocks of layers, and the diagonal of the weights that are in none."""
    features = ggn.features
    assert isinstance(features, NetworkFeatures)
    network, sizes = features.network, [shape.numel() for shape in features.network.shapes.values()]
    places = dict(zip(network.names, torch.arange(ggn.size, device=ggn.device).split(sizes), strict=True))
    blocks = [_block(layer, places) for layer in layers]
    if not places:
        nothing = torch.zeros(0, dtype=torch.long, device=ggn.device)
        return Kronecker(blocks, nothing, nothing.double(), passes)
    # The diagonal takes products with the other weights only.
    others = NetworkFeatures(network.with_names(list(places)), features.data, features.layout)
    diagonal = GPrior(num_probes=noise.num_samples).diagonal(replace(ggn, features=others), noise)
    return Kronecker(blocks, torch.cat([places[name] for name in others.network.names]), diagonal.double(), passes)


def _block(layer: _Layer, places: dict[str, Tensor]) -> KroneckerBlock:
    """The block of a layer, whose weights are removed from `places`."""
    index = places.pop(layer.weight).reshape(len(layer.module.weight), -1)
    if layer.bias is not None:
        index = torch.cat([index, places.pop(layer.bias)[:, None]], dim=1)
    assert isinstance(layer.G, Tensor)
    assert isinstance(layer.A, Tensor)
    return KroneckerBlock(index, layer.G, layer.A / (layer.rows or 1.0))
