r"""The gradient of each datum in the weights of whole layers, from one forward and one backward pass.

The operations of a run that take random weights are watched (`weight_uses`); a layer is the weights that the same
operations use, and the gradient of a datum in them is `D_i = Σ_t g_it a_itᵀ`. What is seen is compared once with the
gradient that torch finds: weights that are used in another way as well are in no layer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.networks.solving import exclusive
from laplace_sampling.networks.weight_uses import Fold, Pair, Use, WeightUses, folds
from laplace_sampling.solvers.placement import normal


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
        """The same with one row of weights."""
        return Layer(self.names, self.folds, self.index.reshape(1, 1, -1), dense=True)

    def shaped(self, pair: Pair) -> Pair:
        """`g` and `a` in the shape of the index."""
        if not self.dense:
            return pair
        a = (pair[0] @ pair[1].mT).flatten(1)[:, None, :, None]
        return torch.ones_like(a[:, :, :1]), a


class _Traced(Protocol):
    """A network that runs with a graph while it is watched."""

    def traced(self, x: Any, watch: Callable[[dict[str, Tensor]], Any]) -> tuple[Tensor, Any]: ...


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

    def __init__(self, network: _Traced, x: Any, num_data: int) -> None:
        with exclusive:
            outputs, watched = network.traced(x, WeightUses)
        self.f, self.weights = outputs.reshape(num_data, -1), watched.weights
        self.uses = defaultdict[tuple[str, ...], list[Use]](list)
        for use in watched.uses:
            self.uses[use.names].append(use)

    def gradients(self, uses: list[Use], u: Float[Tensor, "n C"], *, again: bool = True) -> list[Tensor | None]:
        """`u` pulled back to the outputs of operations; `None` where nothing reaches. The graph is kept for `again`."""
        edges = [use.edge for use in uses]
        return list(torch.autograd.grad(self.f, edges, u, retain_graph=again, allow_unused=True)) if edges else []

    def pairs(self, layers: list[Layer], u: Float[Tensor, "n C"], *, again: bool = True) -> Iterator[Pair | None]:
        """`g` and `a` of each layer."""
        gradients = iter(self.gradients([use for layer in layers for use in self.uses[layer.names]], u, again=again))
        return (self.pair(layer.names, layer.folds, gradients) for layer in layers)

    def pair(self, names: tuple[str, ...], of_uses: list[Fold], gradients: Iterator[Tensor | None]) -> Pair | None:
        """`g` and `a` of a layer, with the places of all its operations one after another."""
        pairs = []
        for number, use in enumerate(self.uses[names]):
            gradient = next(gradients)
            if gradient is not None:
                # The last fold is that of more operations, as in a loop that is longer than when the layer was found.
                fold = of_uses[min(number, len(of_uses) - 1)]
                pairs.append(use.pair(gradient, fold, len(self.f), self.f.dtype))
        if not pairs:
            return None
        return (
            pairs[0] if len(pairs) == 1 else (torch.cat([g for g, _ in pairs], 3), torch.cat([a for _, a in pairs], 3))
        )


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
    folds_of = dict(zip(map(id, uses), map(_fold, uses, plain, scaled, [factors] * len(uses)), strict=True))
    of_weights = dict(zip(run.weights, _weight_gradients(run, u), strict=True))
    found = []
    for name in names:
        of_uses = [fold for use in run.uses[name] if (fold := folds_of[id(use)]) is not None]
        if len(of_uses) < len(run.uses[name]):
            continue
        gradients = run.gradients(run.uses[name], u)
        pair = run.pair(name, of_uses, iter(gradients))
        if pair is not None and _explained(pair, [of_weights[n] for n in name], gradients):
            found.append(Layer(name, of_uses, _joined([places[n] for n in name], pair)))
    return found


def _weight_gradients(run: LayerRun, u: Tensor) -> tuple[Tensor, ...]:
    weights = list(run.weights.values())
    return torch.autograd.grad(run.f, weights, u, retain_graph=True, allow_unused=True, materialize_grads=True)


def _fold(use: Use, plain: Tensor | None, scaled: Tensor | None, factors: Tensor) -> Fold | None:
    """Where the data are: a factor of each output of a datum is one of each gradient that belongs to it."""
    if plain is None or scaled is None:
        return None
    tried = folds(plain.shape, use.leading, len(factors))
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


def _explained(pair: Pair, gradients: list[Tensor], of_uses: list[Tensor | None]) -> bool:
    """Whether gradients of the weights are those that the operations give, by gradients in their outputs."""
    found, expected = torch.einsum("nqmt,nqkt->qmk", *pair), _joined(gradients, pair).to(pair[0])
    # Torch sums those of weights in the precision of the operations, which half precision and `autocast` lower.
    return _close(found, expected, max(torch.finfo(t.dtype).eps for t in of_uses if t is not None))


def _close(found: Tensor, expected: Tensor, eps: float | None = None) -> bool:
    # Half of the digits: sums over many places round in another order.
    rounding = math.sqrt(eps or torch.finfo(found.dtype).eps)
    return float((found - expected).norm()) <= rounding * float(expected.norm())
