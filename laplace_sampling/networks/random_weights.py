"""What `parameters=` takes, and the network whose weights are random so."""

from collections.abc import Mapping

import torch
from torch import nn

from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.selection import Selection
from laplace_sampling.networks.subnetwork import Elements, Subnetwork

__all__ = ["Subset", "linearise"]

Subset = Selection | Elements


def linearise(
    module: nn.Module, parameters: Subset, *, autocast: torch.dtype | None = None, compile: bool | str = False
) -> Linearisation:
    """The network with the random weights that `parameters` says.

    Raises:
        TypeError, ValueError: as `Linearisation`, `LastLayer` and `Subnetwork`; for a last layer to be compiled.
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
    return Linearisation(module, parameters, autocast=autocast, compile=compile)
