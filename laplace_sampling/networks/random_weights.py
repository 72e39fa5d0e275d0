"""What `parameters=` takes, and the network with these weights random."""

from collections.abc import Mapping

import torch
from torch import nn

from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.own_weights import linear_layer_of
from laplace_sampling.networks.selection import Selection
from laplace_sampling.networks.subnetwork import Elements, Subnetwork

__all__ = ["Subset", "linearise"]

Subset = Selection | Elements


def linearise(
    module: nn.Module, parameters: Subset, *, autocast: torch.dtype | None = None, compile: bool | str = False
) -> Linearisation:
    """The network with the random weights that `parameters` names.

    Args:
        module: the trained network.
        parameters: names, globs or a predicate; `"last_layer"`; or masks or indices by name of parameter.
        autocast: as for `Linearisation`.
        compile: as for `Linearisation`.

    Raises:
        TypeError, ValueError: as `Linearisation`, `LastLayer` and `Subnetwork` do; for `compile` of a last layer.
    """
    if isinstance(parameters, str) and parameters == "last_layer":
        if compile:
            raise ValueError(
                '`compile` is for products of a network; those of `parameters="last_layer"` are matrix products of '
                "features that are kept. Leave it out."
            )
        return LastLayer(module, autocast=autocast)
    if isinstance(parameters, Mapping):
        return Subnetwork(module, parameters, autocast=autocast, compile=compile)
    network = Linearisation(module, parameters, autocast=autocast, compile=compile)
    layer = None if compile else linear_layer_of(network.module, network.names)
    return network if layer is None else LastLayer(module, autocast=autocast, layer=layer)
