"""`Program`: what `torch.export` made of a function of tensors, as a module that can be copied and pickled."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from laplace_sampling.data.batches import batched


class Program(nn.Module):
    """The operations of an exported module without weights, which takes the same arguments.

    `ExportedProgram.module()` has functions in it that cannot be pickled, and constants that do not go to another
    device with the module.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        assert exported.call_spec.out_spec is not None
        self.graph, self.out_spec = exported.graph_module, exported.call_spec.out_spec
        # Torch 2.14.1 reads no module from a file whose tracer, that of `torch.export`, takes an argument.
        self.graph._tracer_cls = torch.fx.Tracer
        self.constants: list[str | None] = []
        for number, spec in enumerate(exported.graph_signature.input_specs):
            constant = spec.kind != InputKind.USER_INPUT
            self.constants.append(f"constant_{number}" if constant else None)
            if constant:
                value = exported.constants[str(spec.target)]
                assert isinstance(value, Tensor)
                self.register_buffer(f"constant_{number}", value.detach().clone())

    def forward(self, *args: Any) -> Any:
        leaves = iter(tree_flatten(args)[0])
        values = [next(leaves) if name is None else getattr(self, name) for name in self.constants]
        return tree_unflatten(list(self.graph(*values)), self.out_spec)


class FormulaProgram(Program):
    """Formulas on the device, and in the precision, of what they are given.

    `torch.export` writes down where tensors were, and in which precision, wherever one becomes like another
    (`a.to(b)`). Numbers of the formulas stay in their own precision: a noise precision may be larger than half
    precision holds.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__(exported)
        graph = self.graph.graph
        for node in list(graph.nodes):
            if node.target == torch.ops.aten._assert_tensor_metadata.default:
                graph.erase_node(node)
            elif node.target == torch.ops.aten.to.device:
                source, _, dtype = node.args
                if source.meta["val"].dtype == dtype:
                    node.replace_all_uses_with(source)
                    graph.erase_node(node)
                else:
                    node.target, node.args = torch.ops.aten.to.dtype, (source, dtype)
        self.graph.recompile()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FormulaProgram":
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None:
                self._buffers[name] = tensor.to(moved.device)
        return self


@contextmanager
def quietly() -> Iterator[None]:
    """What torch warns of while it exports is of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def two_rows(x: Any) -> Any:
    """At least two rows: a batch of one is exported for one."""
    tensors, rebuild = batched(x)
    return rebuild([torch.cat([t, t])[: max(2, len(t))] for t in tensors])


def batch_sizes(x: Any) -> Any:
    """Which axes may have any length: the first of each tensor."""
    return tree_map(lambda leaf: {0: Dim.DYNAMIC} if isinstance(leaf, Tensor) and leaf.dim() else None, x)
