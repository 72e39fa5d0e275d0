"""What `parameters=` takes, and the network with these weights random."""

from collections.abc import Mapping

import torch
from torch import nn

from laplace_sampling.networks.last_layer import LastLayer, linear_layer_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.selection import Selection
from laplace_sampling.networks.subnetwork import Elements, Subnetwork

Subset = Selection | Elements


def linearise(module: nn.Module, parameters: Subset, *, autocast: torch.dtype | None = None) -> Linearisation:
    """The network with the random weights that `parameters` names.

    Args:
        module: the trained network.
        parameters: names, globs or a predicate; `"last_layer"`; or masks or indices by name of parameter.
        autocast: as for `Linearisation`.

    Raises:
        TypeError, ValueError: as `Linearisation`, `LastLayer` and `Subnetwork` do.
    """
    if isinstance(parameters, str) and parameters == "last_layer":
        return LastLayer(module, autocast=autocast)
    if isinstance(parameters, Mapping):
        return Subnetwork(module, parameters, autocast=autocast)
    network = Linearisation(module, parameters, autocast=autocast)
    layer = linear_layer_of(network.module, network.names)
    return network if layer is None else LastLayer(module, autocast=autocast, layer=layer)
