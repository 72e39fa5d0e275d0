"""What `parameters=` takes, and the network whose weights are random so."""

from collections.abc import Mapping

import torch
from torch import nn

from laplace_sampling.last_layer import LastLayer
from laplace_sampling.linearise import Linearisation, Selection
from laplace_sampling.subnetwork import Elements, Subnetwork

__all__ = ["Subset", "linearise"]

Subset = Selection | Elements


def linearise(module: nn.Module, parameters: Subset, *, autocast: torch.dtype | None = None) -> Linearisation:
    """The network with the random weights that `parameters` says.

    Raises:
        TypeError, ValueError: as `Linearisation`, `LastLayer` and `Subnetwork`.
    """
    if isinstance(parameters, str) and parameters == "last_layer":
        return LastLayer(module, autocast=autocast)
    if isinstance(parameters, Mapping):
        return Subnetwork(module, parameters, autocast=autocast)
    return Linearisation(module, parameters, autocast=autocast)
