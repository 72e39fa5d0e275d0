"""Calls of the modules of a network in a run: their inputs, and whether their output is that of the network."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from laplace_sampling.data.batches import as_tensors, num_rows, read


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: of the module.
        inputs: in the form of `laplace_sampling.data.batches`; `None` if they have another.
        output: what it returned.
        version: of that tensor when it was returned.
    """

    name: str
    inputs: Any
    output: Any
    version: int | None

    @classmethod
    def ended(cls, name: str, inputs: Any, output: Any) -> Self:
        """A call that has just ended."""
        return cls(name, inputs, output, _version(output))

    def is_last(self, output: Any) -> bool:
        """Whether a network that returns this has changed nothing of what the module returned."""
        if self.output is output:
            return _version(output) == self.version
        try:
            outputs = read(output, num_rows(self.inputs))[0]
        except (TypeError, ValueError):
            return False
        return _version(self.output) == self.version and returns(self, outputs)


def returns(call: ModuleCall, outputs: Tensor) -> bool:
    """Whether a call returned the outputs of the network, but for the shape of a datum."""
    try:
        output = read(call.output, len(outputs))[0]
    except (TypeError, ValueError):
        return False
    same = output.numel() == outputs.numel() and torch.equal(output.reshape(-1), outputs.reshape(-1))
    return same and (call.inputs is None or num_rows(call.inputs) == len(outputs))


def inputs_of_call(args: tuple, kwargs: dict) -> Any:
    """In the form of `laplace_sampling.data.batches`; `None` if they have another."""
    if bool(args) == bool(kwargs):
        return None
    x = kwargs or (args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args)
    try:
        num_rows(x)
    except (TypeError, ValueError):
        return None
    return as_tensors(x)


def _version(output: Any) -> int | None:
    return output._version if isinstance(output, Tensor) and not output.is_inference() else None
