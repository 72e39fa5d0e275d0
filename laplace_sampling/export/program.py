"""Programs of plain operations, which `torch.export` makes: of formulas, and of a network with its products.

`torch.export` takes the network apart; its operations are called one by one with tangents (`networks.tangents`),
and the result is exported again: `(w̄, ζ, x) ↦ f(w̄, x), φ(x) ζ_k`, whatever the size of a batch.

Of a last layer (`HeadProgram`) the rest of the network runs once, and one product of matrices gives all samples.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from laplace_sampling.curvature.head import has_head_covariances
from laplace_sampling.curvature.kronecker import Kronecker, outer_factors
from laplace_sampling.data.batches import arguments, batched, num_rows, read
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.derivatives import forward_mode_kernels, group_norm, instance_norm, layer_norm
from laplace_sampling.networks.last_layer import LinearLayer
from laplace_sampling.networks.shell import own_parameter, private_copy
from laplace_sampling.networks.tangents import Dual, pushed
from laplace_sampling.solvers.dense import DenseCurvature
from laplace_sampling.solvers.preconditioners import Curvature


class HeadProgram(nn.Module):
    """Outputs and deviations of a network whose outputs are those of a linear layer; and their variances.

    Attributes:
        body: the network with the identity in place of the layer: any module that returns its inputs will do.
        layer: the layer.
    """

    matrix: Tensor
    bias: Tensor | None
    root: Tensor | None
    mixing: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        name: str,
        layer: LinearLayer,
        samples: Float[Tensor, "K P"],
        root: tuple[Float[Tensor, "D m"], Float[Tensor, "m C"]] | None,
    ) -> None:
        super().__init__()
        self.body = copied(network)
        if name:
            self.body.set_submodule(name, nn.Identity())
        else:
            self.body = nn.Identity()
        self.layer, self.shape = copied(layer.module), (len(samples), layer.index.shape[0])
        extended = samples[:, layer.index].flatten(0, 1)
        self.register_buffer("matrix", extended[:, : layer.num_inputs].contiguous())
        self.register_buffer("bias", extended[:, -1].contiguous() if layer.has_bias else None)
        for part, tensor in zip(("root", "mixing"), root or (None, None), strict=True):
            self.register_buffer(part, None if tensor is None else tensor.to(samples.dtype).contiguous())

    def forward(self, x: Any) -> tuple[Tensor, Float[Tensor, "K N C"], Float[Tensor, "N C"] | None]:
        args, kwargs = arguments(x)
        z = read(self.body(*args, **kwargs), num_rows(x))[0]
        rows = nn.functional.linear(z, self.matrix, self.bias).unflatten(1, self.shape)
        # Squares of what a body in half precision gives may leave its range.
        dtype = torch.promote_types(z.dtype, torch.float32)
        variance = None
        if self.root is not None and self.mixing is not None:
            # Of an input with a one for the bias, without forming it.
            scaled = z @ self.root[: z.shape[1]] + (0 if self.bias is None else self.root[-1])
            variance = scaled.to(dtype).square() @ self.mixing.to(dtype)
        return self.layer(z).to(dtype), rows.transpose(0, 1).to(dtype), variance


def head_root(
    layer: LinearLayer, curvature: Curvature, prior: GaussianPrior
) -> tuple[Float[Tensor, "D m"], Float[Tensor, "m C"]] | None:
    """`R` and `W` of the variances `Σ_m (hᵀR)²_m W_mc` of the outputs for inputs `h`, in float64; `None` for others.

    As `curvature.head`: of a Kronecker product `R = s ∘ V` and `W` holds `Σ_n U²_cn/(Λ_nm + α)`; of a
    matrix, `R` holds a root of the covariance of the weights of each output.
    """
    if len(prior.precision) != 1 or not has_head_covariances(curvature):
        return None
    scales, shift = prior.scale[layer.index].double(), prior.precision.to(prior.scale.device, torch.float64)
    if isinstance(curvature, Kronecker):
        block = curvature.blocks[0]
        (of_outputs,), (of_inputs,) = outer_factors(scales[None])
        U = of_outputs[:, None] * block.U_G[0]
        return of_inputs[:, None] * block.U_A[0], (1 / (block.eigenvalues[0] + shift)).T @ U.square().T
    assert isinstance(curvature, DenseCurvature)
    rows = curvature.vectors[layer.index] * scales[..., None]
    values, vectors = torch.linalg.eigh(rows / (curvature.spectrum + shift) @ rows.mT)
    roots = vectors * values.clamp_min(0).sqrt()[:, None]
    return roots.movedim(0, 1).flatten(1), torch.eye(len(roots)).to(roots).repeat_interleave(roots.shape[1], 0)


def copied(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode, without gradients."""
    return private_copy(module, lambda _, p: own_parameter(p, requires_grad=False))


Tensors = dict[str, Tensor]


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


# A network with its products -----------------------------------------------------------------------------------------


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
            pushing = _Pushed(network.run_decompositions(_decompositions()), _aliases(module))
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


def _decompositions() -> dict[Any, Callable]:
    """How operations are taken apart: as torch does, and normalisations by the statistics of their inputs as well."""
    aten = torch.ops.aten

    # These return a mean and a scale as well, which nothing in a network takes: the output stands in their places.
    def layer(x: Tensor, *args: Any) -> list[Tensor]:
        return [layer_norm(x, *args)] * 3

    def group(x: Tensor, weight: Any, bias: Any, N: int, C: int, size: int, groups: int, eps: float) -> list[Tensor]:
        return [group_norm(x, groups, weight, bias, eps)] * 3

    def instance(x: Tensor, weight: Any, bias: Any, *options: Any) -> list[Tensor]:
        return [instance_norm(x, None, None, weight, bias, *options)] * 3  # instances come as `[1, N·C, ...]`

    return {
        **default_decompositions(),
        aten.native_layer_norm.default: layer,
        aten.native_group_norm.default: group,
        aten._native_batch_norm_legit.no_stats: instance,
    }


def _aliases(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by all of its names in a `_Network`; tied ones have several."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {id(tensor): name for name, tensor in reversed(tensors)}
    return {f"module.{name}": first[id(tensor)] for name, tensor in tensors}
