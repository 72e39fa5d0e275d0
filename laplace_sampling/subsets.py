"""What `parameters=` takes, and the network whose weights are random so."""

from torch import nn

from laplace_sampling.last_layer import LastLayer
from laplace_sampling.linearise import Linearisation, Selection

__all__ = ["Subset", "linearise"]

Subset = Selection


def linearise(module: nn.Module, parameters: Subset) -> Linearisation:
    """The network with the random weights that `parameters` says.

    Raises:
        TypeError, ValueError: as `Linearisation` and `LastLayer`.
    """
    if isinstance(parameters, str) and parameters == "last_layer":
        return LastLayer(module)
    return Linearisation(module, parameters)
