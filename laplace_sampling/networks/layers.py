r"""Weights of whole layers: which operations use them, and the gradient of each datum in them.

Linear layers, convolutions and normalisations apply a weight at many places `t` of a datum `i`. The gradient of a
function of the outputs in the weights `[m, k]` of one of `q` groups is

    D_i = Σ_t g_it a_itᵀ,

with the gradient `g` in the output of the operation and its inputs `a` (a one is appended for the bias). The operations
are watched, not the modules: a weight that a user's own module gives to `F.linear` is seen as well. A layer is the
weights that the same operations use. What is seen is compared once with the gradient that torch finds: weights that are
used in another way as well are in no layer.

`vjp_by_layers` gives rows `φ_nᵀu_n` of each datum by one forward and one backward pass of all data, in place of `vmap`:
the gradient of a linear layer's weights at a datum is an outer product `g aᵀ`, which is not formed. Layers that use
their weights at several places, as convolutions, sum over the places by one product of matrices.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from laplace_sampling.data.batches import concatenate, num_rows, rows_of
from laplace_sampling.networks.derivatives import linear_inside
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.products import difference
from laplace_sampling.networks.solving import exclusive
from laplace_sampling.networks.tangents import BatchNormCall
from laplace_sampling.solvers.placement import normal

# `g`, `[n, q, m, T]`, and `a`, `[n, q, k, T]`.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Fold:
    """Where the data are in a tensor: along one axis, whose index is `datum · r + place` or `place · n + datum`."""

    axis: int
    places_first: bool

    def fits(self, shape: torch.Size, num_data: int) -> bool:
        """Whether so many data can be there in a tensor of a shape."""
        return shape[self.axis] % num_data == 0

    def __call__(self, x: Tensor, num_data: int) -> Float[Tensor, "n ..."]:
        """The tensor with the data along an axis of their own, the first."""
        sizes = (-1, num_data) if self.places_first else (num_data, -1)
        return x.unflatten(self.axis, sizes).movedim(self.axis + self.places_first, 0)


def folds(shape: torch.Size, leading: int, num_data: int) -> list[Fold]:
    """All places that the data may have among the first axes of a shape."""
    both = [Fold(axis, places_first) for axis in range(leading) for places_first in (False, True)]
    return [fold for fold in both if fold.fits(shape, num_data)]


@dataclass(frozen=True)
class _Operation:
    """How an operation uses a weight.

    Attributes:
        weight, bias: its arguments; the bias may be `None`.
        leading: how many axes of its output may hold the data.
        of_gradient: `(gradient in the output, fold, number of data) ↦ g`.
        of_inputs: `(whether the bias is random, fold, number of data) ↦ a`.
    """

    weight: Tensor | None
    bias: Tensor | None
    leading: int
    of_gradient: Callable[[Tensor, Fold, int], Tensor]
    of_inputs: Callable[[bool, Fold, int], Tensor]

    def of_gradients(self, gradients: Float[Tensor, "C ..."], fold: Fold, num_data: int) -> Float[Tensor, "n C q m T"]:
        """`g` of several gradients."""
        one_place = gradients.shape[1:][fold.axis] == num_data
        if fold.axis == 0 and (one_place or not fold.places_first):  # all gradients are as many data
            plain, num = Fold(0, places_first=False), len(gradients) * num_data
            return self.of_gradient(gradients.flatten(0, 1), plain, num).unflatten(0, (-1, num_data)).transpose(0, 1)
        return torch.stack([self.of_gradient(gradient, fold, num_data) for gradient in gradients], 1)


@dataclass(frozen=True)
class Use:
    """One operation of a run of the network that takes a random weight.

    Attributes:
        names: of the weight, and of the bias if that is random.
        edge: its output in the graph.
        shape: of the output.
        operation: what it does with them.
    """

    names: tuple[str, ...]
    edge: GradientEdge
    shape: torch.Size
    operation: _Operation


class WeightUses(TorchFunctionMode):
    """Keeps the operations inside that take weights.

    Attributes:
        weights: the random weights in the graph, by name.
        uses: in the order of the calls.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights, self.uses = weights, list[Use]()
        self._names = {id(weight): name for name, weight in weights.items()}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            plain = F.linear

            def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                output = plain(input, weight, bias)
                self._keep(_linear(input, weight, bias), output)
                return output

            with torch._C.DisableTorchFunction(), linear_inside(linear):
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in _OPERATIONS:
            self._keep(_OPERATIONS[func](*args, **kwargs), output)
        return output

    def _keep(self, operation: _Operation | None, output: Tensor) -> None:
        if operation is not None and id(operation.weight) in self._names and output.requires_grad:
            of_bias = [self._names[id(operation.bias)]] if id(operation.bias) in self._names else []
            names = (self._names[id(operation.weight)], *of_bias)
            # An edge, not the output: the next module may change that in place, as `ReLU(inplace=True)` does.
            self.uses.append(Use(names, get_gradient_edge(output), output.shape, operation))


# Operations -----------------------------------------------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Operation:
    x = input.detach()

    def placed(t: Tensor, fold: Fold, num_data: int) -> Tensor:
        return fold(t, num_data).reshape(num_data, 1, -1, t.shape[-1]).mT

    def of_inputs(with_bias: bool, fold: Fold, num_data: int) -> Tensor:
        a = placed(x, fold, num_data)
        return torch.cat([a, torch.ones_like(a[:, :, :1])], dim=2) if with_bias else a

    return _Operation(weight, bias, x.dim() - 1, placed, of_inputs)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Operation | None:
    x, axes = input.detach(), weight.dim() - 2
    if x.dim() != weight.dim():  # a single datum without an axis
        return None

    def placed(t: Tensor, fold: Fold, num_data: int) -> Tensor:
        # Data, places of the fold, groups, channels, places: all places go last.
        return fold(t, num_data).movedim(1, -2).flatten(-2)

    def of_gradient(gradient: Tensor, fold: Fold, num_data: int) -> Tensor:
        return placed(gradient.unflatten(1, (groups, -1)).flatten(3), fold, num_data)

    def of_inputs(with_bias: bool, fold: Fold, num_data: int) -> Tensor:
        patches = _patches(x, weight.shape[2:], _each(stride, axes), padding, _each(dilation, axes), groups, with_bias)
        return placed(patches, fold, num_data)

    return _Operation(weight, bias, 1, of_gradient, of_inputs)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """An argument of a convolution for each axis."""
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * axes if len(value) == 1 else value


def _patches(
    x: Tensor,
    kernel: torch.Size,
    stride: tuple[int, ...],
    padding: Any,
    dilation: tuple[int, ...],
    groups: int,
    with_bias: bool,
) -> Float[Tensor, "N q k T"]:
    """The inputs of a convolution at each place, with a one for the bias."""
    axes = len(kernel)
    reach = [d * (size - 1) for d, size in zip(dilation, kernel, strict=True)]
    if isinstance(padding, str):
        before = [total // 2 if padding == "same" else 0 for total in reach]
        after = [total - total // 2 if padding == "same" else 0 for total in reach]
    else:
        before = after = list(_each(padding, axes))
    if any(before) or any(after):
        x = F.pad(x, [size for pads in zip(reversed(before), reversed(after), strict=True) for size in pads])
    for axis in range(axes):  # views only
        x = x.unfold(axis + 2, reach[axis] + 1, stride[axis])[..., :: dilation[axis]]
    # [N, c, *places, *kernel] in groups, with the places last.
    x = x.unflatten(1, (groups, -1)).permute(0, 1, 2, *range(3 + axes, 3 + 2 * axes), *range(3, 3 + axes))
    size, places = math.prod(x.shape[2:-axes]), x.shape[-axes:]
    rows = x.new_ones(len(x), groups, size + with_bias, *places)
    rows[:, :, :size].unflatten(2, x.shape[2:-axes]).copy_(x)
    return rows.flatten(3)


def _normalisation(
    x: Tensor, normalised: Callable[[], Tensor], of_channels: bool, *given: Tensor | None
) -> _Operation | None:
    """`w ⊙ x̂ + b`; of channels, on axis 1, or of the last axes."""
    weight, bias = given
    if weight is None:
        return None
    leading = 1 if of_channels else x.dim() - weight.dim()

    def placed(t: Tensor, fold: Fold, num_data: int) -> Tensor:
        # A group for each weight.
        t = t.movedim(1, -1) if of_channels else t
        return fold(t, num_data).reshape(num_data, -1, weight.numel()).mT[:, :, None]

    def of_inputs(with_bias: bool, fold: Fold, num_data: int) -> Tensor:
        a = placed(normalised(), fold, num_data)
        return torch.cat([a, torch.ones_like(a)], dim=2) if with_bias else a

    return _Operation(weight, bias, leading, placed, of_inputs)


def _batch_norm(*args: Any, **kwargs: Any) -> _Operation | None:
    call = BatchNormCall(*args, **kwargs)
    if call.training:  # a datum has no output of its own
        return None
    x = call.input.detach()
    plain = BatchNormCall(x, call.running_mean, call.running_var, eps=call.eps)
    return _normalisation(x, lambda: F.batch_norm(*plain), True, call.weight, call.bias)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> _Operation | None:
    x = input.detach()
    return _normalisation(x, lambda: F.group_norm(x, num_groups, eps=eps), True, weight, bias)


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> _Operation | None:
    x = input.detach()
    return _normalisation(x, lambda: F.layer_norm(x, normalized_shape, eps=eps), False, weight, bias)


_OPERATIONS: dict[Callable, Callable[..., _Operation | None]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}


@dataclass(frozen=True)
class Layer:
    """Weights that the same operations use.

    Attributes:
        names: of the weight, and of the bias if that is random.
        folds: where the data are in each of the operations.
        index: positions of the weights in the flat vector; a matrix `[m, k]` for each of `q` groups.
        dense: whether the weights are one row, whose block is not factored.
    """

    names: tuple[str, ...]
    folds: list[Fold]
    index: Tensor
    dense: bool = False

    def as_row(self) -> "Layer":
        """Returns the layer with one row of weights."""
        return Layer(self.names, self.folds, self.index.reshape(1, 1, -1), dense=True)

    def shaped(self, pair: Pair) -> Pair:
        """`g` and `a` in the shape of the index."""
        if not self.dense:
            return pair
        a = (pair[0] @ pair[1].mT).flatten(1)[:, None, :, None]
        return torch.ones_like(a[:, :, :1]), a


class LayerRun:
    """Some data that have gone through the network.

    Args:
        network: with random weights.
        x: its inputs.
        num_data: how many data they are.

    Attributes:
        f: outputs with a graph, `[n, C]`.
        weights: random weights in the graph, by name.
        uses: the operations by the names of their weights.
    """

    def __init__(self, network: Linearisation, x: Any, num_data: int) -> None:
        with exclusive:
            outputs, watched = network.traced(x, WeightUses)
        self.network, self.x = network, x
        self.f, self.weights = outputs.reshape(num_data, -1), watched.weights
        self.uses = defaultdict[tuple[str, ...], list[Use]](list)
        for use in watched.uses:
            self.uses[use.names].append(use)

    def gradients(self, uses: list[Use], u: Float[Tensor, "n C"], *, again: bool = True) -> list[Tensor | None]:
        """`u` pulled back to the outputs of operations; `None` where nothing reaches. The graph is kept for `again`."""
        edges = [use.edge for use in uses]
        return list(torch.autograd.grad(self.f, edges, u, retain_graph=again, allow_unused=True)) if edges else []

    def gradients_of_outputs(self, uses: list[Use]) -> list[Tensor | None]:
        """Each output pulled back to the outputs of operations, `[C, ...]`."""
        eye = torch.eye(self.f.shape[1], dtype=self.f.dtype, device=self.f.device)
        edges: list[Any] = [use.edge for use in uses]
        largest = self.network.batching.largest_tensor(self.network.shell.forward, self.x)
        parts = self.network.ways.pull(self.f, edges, eye[:, None].expand(-1, *self.f.shape), largest)
        return [_stacked(of_use) for of_use in zip(*parts, strict=True)]

    def pairs(
        self, layers: list[Layer], u: Float[Tensor, "n C"] | None, *, again: bool = True
    ) -> Iterator[Pair | None]:
        """`g` and `a` of each layer; without `u` of each output, `g` having an axis of outputs after that of data."""
        uses = [use for layer in layers for use in self.uses[layer.names]]
        gradients = iter(self.gradients_of_outputs(uses) if u is None else self.gradients(uses, u, again=again))
        return (self.pair(layer.names, layer.folds, gradients, of_outputs=u is None) for layer in layers)

    def pair(
        self,
        names: tuple[str, ...],
        of_uses: list[Fold],
        gradients: Iterator[Tensor | None],
        *,
        of_outputs: bool = False,
    ) -> Pair | None:
        """`g` and `a` of a layer, with the places of all its operations one after another."""
        pairs, num = [], len(self.f)
        for number, use in enumerate(self.uses[names]):
            gradient = next(gradients)
            if gradient is not None:
                # The last fold is that of more operations, as in a loop that is longer than when the layer was found.
                fold, operation = of_uses[min(number, len(of_uses) - 1)], use.operation
                g = (operation.of_gradients if of_outputs else operation.of_gradient)(gradient, fold, num)
                pairs.append((g.to(self.f), operation.of_inputs(len(names) > 1, fold, num).to(self.f)))
        if not pairs:
            return None
        g, a = zip(*pairs, strict=True)
        return pairs[0] if len(pairs) == 1 else (torch.cat(g, -1), torch.cat(a, -1))


def _stacked(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Gradients of several outputs; zero for those that nothing reaches, and `None` if these are all."""
    like = next((part for part in parts if part is not None), None)
    return None if like is None else torch.cat([torch.zeros_like(like[:1]) if p is None else p for p in parts])


def layers_of(run: LayerRun, places: dict[str, Tensor]) -> list[Layer]:
    """The weights whose gradient is what their operations give, for a random combination of outputs.

    Args:
        run: of two data at least.
        places: positions of the weights in the flat vector, by name.
    """
    u = normal(*run.f.shape, seed=0, dtype=run.f.dtype, device=run.f.device)
    factors = torch.linspace(1.0, 2.0, len(u)).to(u)
    names = list(run.uses)
    uses = [use for name in names for use in run.uses[name]]
    plain, scaled = run.gradients(uses, u), run.gradients(uses, u * factors[:, None])
    folds_of = {
        id(use): (_fold(use, g, g_scaled, factors), g) for use, g, g_scaled in zip(uses, plain, scaled, strict=True)
    }
    of_weights = dict(zip(run.weights, _weight_gradients(run, u), strict=True))
    found = []
    for name in names:
        of_uses, gradients = zip(*(folds_of[id(use)] for use in run.uses[name]), strict=True)
        if None in of_uses:
            continue
        pair = run.pair(name, list(of_uses), iter(gradients))
        if pair is not None and _explained(pair, [of_weights[n] for n in name], gradients):
            found.append(Layer(name, list(of_uses), _joined([places[n] for n in name], pair)))
    return found


def _weight_gradients(run: LayerRun, u: Tensor) -> tuple[Tensor, ...]:
    weights = list(run.weights.values())
    return torch.autograd.grad(run.f, weights, u, retain_graph=True, allow_unused=True, materialize_grads=True)


def _fold(use: Use, plain: Tensor | None, scaled: Tensor | None, factors: Tensor) -> Fold | None:
    """Where the data are: a factor of each output of a datum is one of each gradient that belongs to it."""
    if plain is None or scaled is None:
        return None
    tried = folds(plain.shape, use.operation.leading, len(factors))
    if not plain.any() and not _one_place(tried, plain.shape, len(factors)):
        return None  # all folds would do for a gradient of zero, which that of other data need not be
    for fold in tried:
        expected, seen = (fold(t, len(factors)).flatten(1) for t in (plain, scaled))
        if _close(seen, expected * factors[:, None].to(expected)):
            return fold
    return None


def _one_place(tried: list[Fold], shape: torch.Size, num_data: int) -> bool:
    """Whether the data can only be along one axis, with one row each."""
    return bool(tried) and all(fold.axis == tried[0].axis and shape[fold.axis] == num_data for fold in tried)


def _joined(of_names: list[Tensor], pair: Pair) -> Tensor:
    """Weight and bias, each of any shape, as `[q, m, k]`."""
    q, m = pair[0].shape[1:3]
    return torch.cat([t.reshape(q, m, -1) for t in of_names], dim=-1)


def _explained(pair: Pair, gradients: list[Tensor], of_uses: Iterable[Tensor | None]) -> bool:
    """Whether gradients of the weights are those that the operations give, by gradients in their outputs."""
    found, expected = torch.einsum("nqmt,nqkt->qmk", *pair), _joined(gradients, pair).to(pair[0])
    # Torch sums those of weights in the precision of the operations, which half precision and `autocast` lower.
    return _close(found, expected, max(torch.finfo(t.dtype).eps for t in of_uses if t is not None))


def _close(found: Tensor, expected: Tensor, eps: float | None = None) -> bool:
    # Half of the digits: sums over many places round in another order.
    return difference(found, expected) <= math.sqrt(eps or torch.finfo(found.dtype).eps)


# Positions of weights in the flat vector, `[m, k]`, and `g`, `[n, m]`, and `a`, `[n, k]`, of each datum.
Outer = tuple[Tensor, Float[Tensor, "n m"], Float[Tensor, "n k"]]
# A layer with `g`, `[n, C, m, T]`, and `a`, `[n, k, T]`, where a datum uses it `T` times and these are fewer numbers
# than its part of rows, `[n, C, p]`; else with that part.
OfOutputs = tuple[Layer, tuple[Tensor, ...]]
# Data of which the layers are found, at most.
_TRIED = 16


def vjp_by_layers(network: Linearisation, x: Any, u: Float[Tensor, "N C"]) -> list[Outer] | None:
    """`vjp_each` in factors; `None` for a network of which some random weights are in no layer.

    Layers are looked for among the first data; where others take another way through the network, it is `None` from
    then on.
    """
    found = _by_layers(network, x, u, _outer)
    if found is None:
        return None
    network.products["vjp"] += num_rows(x)
    return [(layer.index[0] if len(g[0]) > 1 else layer.index.reshape(1, -1), g, a) for layer, (g, a) in found]


def jacobian_by_layers(network: Linearisation, x: Any) -> list[OfOutputs] | None:
    """`jacobian` in factors, by one forward pass and a pullback of each output; `None` where `vjp_by_layers` is."""
    found = _by_layers(network, x, None, _of_outputs)
    if found is not None:
        network.products["vjp"] += num_rows(x) * found[0][1][0].shape[1]
    return found


def _by_layers(
    network: Linearisation,
    x: Any,
    u: Float[Tensor, "N C"] | None,
    shaped: Callable[[Layer, Pair], tuple[Tensor, ...]],
) -> list[tuple[Layer, tuple[Tensor, ...]]] | None:
    """What is `shaped` of `g` and `a` of each layer, as `LayerRun.pairs` gives them."""
    if network.autocast is not None or network.module_dtype != network.dtype or not num_rows(x):
        return None
    if network.known_layers is None:
        few = rows_of(x, slice(min(num_rows(x), _TRIED)))
        # Of one datum it would not be seen along which axis the data are.
        network.known_layers = _found(network, few if num_rows(few) > 1 else concatenate([few, few]))
    layers = network.known_layers
    if not layers:
        return None
    parts = network.batching.in_parts(
        num_rows(x), lambda rows: _of_some(network, layers, rows_of(x, rows), None if u is None else u[rows], shaped)
    )
    if not all(parts):
        network.known_layers = []
        return None
    if len(parts) == 1:
        return list(zip(layers, parts[0], strict=True))
    joined = (tuple(torch.cat(t) for t in zip(*of_parts, strict=True)) for of_parts in zip(*parts, strict=True))
    return list(zip(layers, joined, strict=True))


def _of_some(
    network: Linearisation,
    layers: list[Layer],
    x: Any,
    u: Tensor | None,
    shaped: Callable[[Layer, Pair], tuple[Tensor, ...]],
) -> list[tuple[Tensor, ...]]:
    """The rows of data that go through the network at once; none where they take another way."""
    run = LayerRun(network, x, num_rows(x))
    if {layer.names: len(layer.folds) for layer in layers} != {n: len(of_n) for n, of_n in run.uses.items()}:
        return []
    folds = [(fold, use) for of in layers for fold, use in zip(of.folds, run.uses[of.names], strict=True)]
    if not all(fold.fits(use.shape, len(run.f)) for fold, use in folds):
        return []  # such as an expert of a mixture, which only other data take
    u = None if u is None else u.reshape(run.f.shape).to(run.f)
    pairs = list(zip(layers, run.pairs(layers, u, again=False), strict=True))
    return [] if any(pair is None for _, pair in pairs) else [shaped(layer, pair) for layer, pair in pairs if pair]


def _used_once(layer: Layer, a: Float[Tensor, "n q k T"]) -> bool:
    """Whether rows of a layer are outer products, and so fewer numbers."""
    q, m, k = layer.index.shape
    return q == 1 and a.shape[3] == 1 and m + k < m * k


def _outer(layer: Layer, pair: Pair) -> tuple[Tensor, Tensor]:
    g, a = pair if _used_once(layer, pair[1]) else layer.as_row().shaped(pair)
    return g[:, 0, :, 0], a[:, 0, :, 0]


def _of_outputs(layer: Layer, pair: Pair) -> tuple[Tensor, ...]:
    g, a = pair
    num_outputs, (q, m, k), times = g.shape[1], layer.index.shape, a.shape[3]
    if q == 1 and times * (num_outputs * m + k) < num_outputs * m * k:
        return g[:, :, 0], a[:, 0]
    # One product of matrices for all outputs.
    rows = g.transpose(1, 2).flatten(2, 3) @ a.mT
    return (rows.unflatten(2, (-1, g.shape[3])).transpose(1, 2).flatten(2),)


def _found(network: Linearisation, x: Any) -> list[Layer]:
    """The layers, if these hold all random weights."""
    positions = torch.arange(network.num_parameters, device=network.device).split(network.shell.sizes)
    try:
        layers = layers_of(LayerRun(network, x, num_rows(x)), dict(zip(network.names, positions, strict=True)))
    except RuntimeError:  # outputs that depend on no random weights, or an operation without a derivative
        return []
    return layers if sum(layer.index.numel() for layer in layers) == network.num_parameters else []
