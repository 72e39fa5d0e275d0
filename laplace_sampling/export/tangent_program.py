"""The network and `K` Jacobian-vector products of it as one program of plain operations, whatever the size of a batch.

`torch.export` takes the network apart; its operations are called one by one with tangents (`networks.tangents`),
and the result is exported again: `(w̄, ζ, x) ↦ f(w̄, x), φ(x) ζ_k`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_flatten, tree_map

from laplace_sampling.data.batches import arguments, num_rows, read
from laplace_sampling.export.program import Program, batch_sizes, quietly, two_rows
from laplace_sampling.networks.derivative_rules import forward_mode_kernels
from laplace_sampling.networks.tangents import Dual, pushed

Tensors = dict[str, Tensor]


class _Network(nn.Module):
    """A network whose outputs are one tensor, `[N, ...]`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Tensor:
        args, kwargs = arguments(x)
        return read(self.module(*args, **kwargs), num_rows(x))[0]


class _Pushed(nn.Module):
    """The program of a network, with tangents of some of its weights."""

    def __init__(self, program: ExportedProgram, aliases: dict[str, str]) -> None:
        super().__init__()
        self.interpreter, self.inputs = _Interpreter(program.graph_module), program.graph_signature.input_specs
        self.constants: dict[str, Any] = dict(program.constants)
        self.aliases = aliases

    def forward(self, state: Tensors, samples: Tensors, x: Any) -> tuple[Tensor, Tensor]:
        rows, values = iter(tree_flatten(x)[0]), []
        for spec in self.inputs:
            if spec.kind == InputKind.USER_INPUT:
                values.append(next(rows))
                continue
            name = self.aliases.get(str(spec.target), "")
            value = state[name] if name in state else self.constants[str(spec.target)]
            values.append(Dual(value, samples[name]) if name in samples else value)
        (outputs,) = self.interpreter.run(*values)
        if not isinstance(outputs, Dual):
            raise NotImplementedError("the outputs do not depend on the random weights")
        return outputs.value, outputs.tangents


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return pushed(target, args, kwargs)


def tangent_program(module: nn.Module, state: Tensors, samples: dict[str, Float[Tensor, "K ..."]], x: Any) -> nn.Module:
    """The program `(state, samples, x) ↦ (f, φ ζ)` of a network, whose outputs keep their shape.

    Args:
        module: the network, in evaluation mode.
        state: its parameters and buffers by name.
        samples: of the random weights by name.
        x: example inputs.

    Raises:
        ValueError: where torch does not export the network for batches of any size, or one of its operations has no
            rule.
    """
    x = two_rows(x)
    try:
        with quietly(), torch.no_grad(), forward_mode_kernels(layers=False):
            sizes = batch_sizes(x)
            network = torch.export.export(_Network(module), (x,), dynamic_shapes=(sizes,), strict=False)
            pushing = _Pushed(network.run_decompositions(), _aliases(module))
            fixed = tuple(tree_map(lambda _: None, tensors) for tensors in (state, samples))
            program = torch.export.export(pushing, (state, samples, x), dynamic_shapes=(*fixed, sizes), strict=False)
        return Program(program)
    except Exception as error:  # torch has many classes of errors for what it does not export
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"`to_module`: {type(module).__name__} cannot be exported with error bars of its random weights: {reason}. "
            "A batch of any size asks for `x.shape[0]` in place of `len(x)` in the network. "
            'A posterior of a linear last layer (`parameters="last_layer"`) takes any network.'
        ) from error


def _aliases(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by all of its names in a `_Network`; tied ones have several."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {id(tensor): name for name, tensor in reversed(tensors)}
    return {f"module.{name}": first[id(tensor)] for name, tensor in tensors}
