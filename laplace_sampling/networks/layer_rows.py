r"""Rows `φ_nᵀu_n` of each datum by layers: one forward and one backward pass of all data, in place of `vmap`.

The gradient of a linear layer's weights at a datum is an outer product `g aᵀ`, which is not formed. Those of layers
that use their weights at several places, as convolutions, are summed over the places by one product of matrices.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import num_rows, rows_of
from laplace_sampling.networks.layer_gradients import Layer, LayerRun, layers_of
from laplace_sampling.networks.linearisation import Linearisation

# Positions of weights in the flat vector, `[m, k]`, and `g`, `[n, m]`, and `a`, `[n, k]`, of each datum.
Outer = tuple[Tensor, Float[Tensor, "n m"], Float[Tensor, "n k"]]
# Data of which the layers are found, at least and at most.
_FEWEST, _TRIED = 2, 16


def vjp_by_layers(network: Linearisation, x: Any, u: Float[Tensor, "N C"]) -> list[Outer] | None:
    """`vjp_each` in factors; `None` for a network of which some random weights are in no layer.

    Layers are looked for among the first data; where others take another way through the network, it is `None` from
    then on.
    """
    if network.autocast is not None or network.module_dtype != network.dtype:
        return None
    if network.known_layers is None and num_rows(x) >= _FEWEST:
        network.known_layers = _found(network, rows_of(x, slice(min(num_rows(x), _TRIED))))
    layers = network.known_layers
    if not layers:
        return None
    parts = network.batching.in_parts(num_rows(x), lambda rows: _of_some(network, layers, rows_of(x, rows), u[rows]))
    if not all(parts):
        network.known_layers = []
        return None
    network.products["vjp"] += num_rows(x)
    return [
        (of[0][0], torch.cat([g for _, g, _ in of]), torch.cat([a for _, _, a in of]))
        for of in zip(*(part for part in parts if part is not None), strict=True)
    ]


def _of_some(network: Linearisation, layers: list[Layer], x: Any, u: Tensor) -> list[Outer]:
    """The rows of data that go through the network at once; none where they take another way."""
    run, found = LayerRun(network, x, num_rows(x)), []
    if {layer.names: len(layer.folds) for layer in layers} != {n: len(of_n) for n, of_n in run.uses.items()}:
        return []
    folds = [(fold, use) for of in layers for fold, use in zip(of.folds, run.uses[of.names], strict=True)]
    if not all(fold.fits(use.shape, len(run.f)) for fold, use in folds):
        return []  # as of a mixture of experts, which other data take
    for layer, pair in zip(layers, run.pairs(layers, u.reshape(run.f.shape).to(run.f), again=False), strict=True):
        if pair is None:
            return []
        q, m, k = layer.index.shape
        as_outer = q == 1 and pair[0].shape[3] == 1 and m + k < m * k
        g, a = pair if as_outer else layer.as_row().shaped(pair)
        index = layer.index[0] if as_outer else layer.index.reshape(1, -1)
        found.append((index, g[:, 0, :, 0], a[:, 0, :, 0]))
    return found


def _found(network: Linearisation, x: Any) -> list[Layer]:
    """The layers, if these hold all random weights."""
    positions = torch.arange(network.num_parameters, device=network.device).split(network.shell.sizes)
    try:
        layers = layers_of(LayerRun(network, x, num_rows(x)), dict(zip(network.names, positions, strict=True)))
    except RuntimeError:  # outputs that depend on no random weights, or an operation without a derivative
        return []
    return layers if sum(layer.index.numel() for layer in layers) == network.num_parameters else []
