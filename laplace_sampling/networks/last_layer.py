"""`parameters="last_layer"`: the layer is found by running the network, and its inputs on the training data are kept.

Where the outputs of a network are those of a module, `f(w, x) = g(w, z(x))`, Jacobian products in the weights of that
module take its inputs `z` and the module only. These are kept from the one pass in which `f` is computed: all that
follows costs as much as for a linear model.

`LinearLayer`: a linear layer as a network of its own, whose Jacobian products are products of matrices.

The outputs `f = W z + b` are linear in the weights, `φ(z) = I ⊗ (z, 1)`: no derivative is taken, and no program traced.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data.batches import (
    Layout,
    as_tensors,
    batched,
    concatenate,
    constants,
    num_bytes,
    num_rows,
    place,
    read,
    take,
)
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.networks.linearisation import Linearisation, unwrapped
from laplace_sampling.networks.memory import free_memory
from laplace_sampling.networks.products import difference
from laplace_sampling.networks.shell import HALF, Shell
from laplace_sampling.networks.solving import exclusive
from laplace_sampling.solvers.placement import normal


class LinearLayer(Linearisation):
    """A `torch.nn.Linear` with inputs `z`, `[N, d]`, all of whose weights are random.

    A flat vector holds the matrix row by row, `[C, d]`, and then the bias, `[C]`, if there is one.
    """

    @staticmethod
    def fits(module: nn.Module, names: list[str], z: Any) -> bool:
        """Whether a module is such a layer, with these random weights, and `z` such inputs."""
        plain = type(module) is nn.Linear and not nn.utils.parametrize.is_parametrized(module)
        if not (plain and names == [name for name, _ in module.named_parameters()]):
            return False
        # Vectors of a layer in half precision are in float32, and so is not what it multiplies.
        matrix = isinstance(z, Tensor) and z.dim() == 2
        return matrix and z.dtype == module.weight.dtype and z.dtype not in HALF

    @property
    def num_inputs(self) -> int:
        """`d`."""
        return self.shapes["weight"][1]

    @property
    def has_bias(self) -> bool:
        return "bias" in self.shapes

    @property
    def index(self) -> Float[Tensor, "C D"]:
        """The position in a flat vector of the weight from each input, and of the bias, to each output."""
        num_outputs, num_inputs = self.shapes["weight"]
        index = torch.arange(num_outputs * num_inputs, device=self.device).reshape(num_outputs, num_inputs)
        if not self.has_bias:
            return index
        return torch.cat([index, index.numel() + torch.arange(num_outputs, device=self.device)[:, None]], 1)

    def extended(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N D"]:
        """The inputs, with a one for the bias, as they multiply the weights of each output."""
        return torch.cat([z, z.new_ones(len(z), 1)], 1) if self.has_bias else z

    def _parts(self, v: Float[Tensor, "*K P"]) -> tuple[Float[Tensor, "*K C d"], Float[Tensor, "*K C"] | None]:
        """The matrix and the bias of flat vectors."""
        shape = self.shapes["weight"]
        size = shape.numel()
        return v[..., :size].unflatten(-1, shape), v[..., size:] if self.has_bias else None

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """As `Linearisation` does."""
        self._check_width(v, "jvp")
        num, num_data = v.shape[0], x.shape[0]
        self.products["jvp"] += num * num_data
        weight, bias = self._parts(v)
        # One product of matrices for all vectors: a batched one is several times slower for few data.
        matrix = weight.flatten(0, 1).T
        product = x @ matrix if bias is None else torch.addmm(bias.flatten(), x, matrix)
        return product.view(num_data, num, -1).transpose(0, 1)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """As `Linearisation.vjp`: `Σ_n φ(x_n)ᵀ u_kn`; `graph` changes nothing, as autograd follows plain products."""
        self.products["vjp"] += len(u) * len(x)
        u = u.reshape(len(u), len(x), -1)
        weight = (u.movedim(1, 2).flatten(0, 1) @ x).reshape(len(u), -1)
        return torch.cat([weight, u.sum(1)], 1) if self.has_bias else weight

    def ggn(self, x: Any, v: Float[Tensor, "K P"], curvature: Callable[[Tensor], Tensor]) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        return self.vjp(x, curvature(self.jvp(x, v)))

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """As `Linearisation` does."""
        self.products["vjp"] += len(x)
        u = u.reshape(len(x), -1)
        weight = (u[:, :, None] * x[:, None]).flatten(1)
        return torch.cat([weight, u], 1) if self.has_bias else weight

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """As `Linearisation` does."""
        index, rows = self.index, x.new_zeros(len(x), self.shapes["weight"][0], self.num_parameters)
        self.products["vjp"] += len(x) * len(index)
        for c, positions in enumerate(index):
            rows[:, c, positions] = self.extended(x)
        return rows


# Calls of modules -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One call of a module.

    Attributes:
        name: of the module.
        inputs: copies, in the form of `laplace_sampling.data.batches`; `None` if they have another.
        output: what it returned.
        version: torch's count of in-place changes of the output when it was returned; `None` if it has none.
    """

    name: str
    inputs: Any
    output: Any
    version: int | None

    def gives(self, output: Any, num: int) -> bool:
        """Whether a network that returns this for `num` data has changed nothing but the shape of what was returned."""
        unchanged = _version(self.output) == self.version
        if self.output is output or not unchanged:
            return unchanged
        try:
            own, outputs = (read(of, num)[0] for of in (self.output, output))
        except (TypeError, ValueError):
            return False
        same = own.numel() == outputs.numel() and torch.equal(own.reshape(-1), outputs.reshape(-1))
        return same and (self.inputs is None or num_rows(self.inputs) == num)


@contextmanager
def _recorded(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[list[_Call]]:
    """The calls of parts of a network inside, in the order in which they end."""
    calls: list[_Call] = []

    def record(name: str, part: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls.append(_Call(name, _inputs(args, kwargs), output, _version(output)))

    # Hooks rather than a look at the modules' order: a network may register its layers in any order.
    with ExitStack() as hooks:
        for name, part in parts:
            hooks.callback(part.register_forward_hook(partial(record, name), with_kwargs=True).remove)
        yield calls


def _inputs(args: tuple, kwargs: dict) -> Any:
    """Copies of the arguments of a call; `None` if these are no tensors with a row for each datum."""
    if bool(args) == bool(kwargs):
        return None
    x = kwargs or (args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args)
    try:
        num_rows(x)
    except (TypeError, ValueError):
        return None
    tensors, rebuild = batched(as_tensors(x))
    # A view would hold all of what it is a view of.
    return rebuild([tensor.detach().clone() for tensor in tensors])


def _version(output: Any) -> int | None:
    return output._version if isinstance(output, Tensor) and not output.is_inference() else None


# Weights of layers ----------------------------------------------------------------------------------------------------


def own_weights(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The floating-point weights of a part of a module itself, also those that it computes its weights from."""
    if "parametrizations" in name.split("."):
        return []
    part = module.get_submodule(name)
    weights = list(part.parameters(recurse=False))
    if nn.utils.parametrize.is_parametrized(part):
        weights += list(part.get_submodule("parametrizations").parameters())
    return [p for p in weights if p.is_floating_point()]


def linear_layer_of(module: nn.Module, names: list[str]) -> str | None:
    """The name of the linear layer inside a module of which weights are all, if they are those of one."""
    layer = names[0].rpartition(".")[0]
    part = module.get_submodule(layer)
    if not layer or type(part) is not nn.Linear or names_of(module, own_weights(module, layer)) != names:
        return None
    return layer


def has_matrix(module: nn.Module, name: str) -> bool:
    return any(weight.dim() > 1 for weight in own_weights(module, name))


def around(name: str) -> list[str]:
    """The names of the modules around a part, from outside, and its own."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def names_of(module: nn.Module, weights: Sequence[nn.Parameter]) -> list[str]:
    chosen = {id(p) for p in weights}
    return [name for name, p in module.named_parameters() if id(p) in chosen]


# The network ----------------------------------------------------------------------------------------------------------


def _by_head(name: str) -> Any:
    """A product of `Linearisation` by the head and its inputs; without a graph, the rest of the network runs once."""
    whole = getattr(Linearisation, name)

    @wraps(whole)
    def product(self: "LastLayer", x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.head is None or kwargs.get("graph"):
            return whole(self, x, *args, **kwargs)
        part, z = self.evaluate_with_inputs(x)[2:]
        return whole(self, x, *args) if part is self else getattr(part, name)(z, *args)

    return product


class LastLayer(Linearisation):
    """A network of whose weights those of the last layer are random.

    That is the last of its modules to finish a call that has a matrix (or a kernel) of its own, as linear layers and
    convolutions do, or the last with any weights if none has. A module around a layer that gives the outputs of the
    network finishes after it, but its own weights, as the class token of a vision transformer, are used before. Before
    the first fit, which runs the network, it is taken to be the one that was registered last.

    Args:
        module: the trained network.
        autocast: as for `Linearisation`.
        layer: its name, where it is not to be found; without a notice if its inputs are not kept.

    Attributes:
        layer: the name of the layer.
        named: whether the layer was given by its name.
        found: whether the layer and its inputs were looked for in a run of the network.
        head: the innermost module that contains it and gives the outputs of the network, with its own weights; `None`
            where products take the whole network.
    """

    # Data that the network is run on to find the layer: networks with batch normalisation may not run on a single one.
    _DATA_OF_THE_RUN = 2

    jvp, vjp, ggn, vjp_each, jacobian = map(_by_head, ("jvp", "vjp", "ggn", "vjp_each", "jacobian"))

    def __init__(self, module: nn.Module, *, autocast: torch.dtype | None = None, layer: str | None = None) -> None:
        self.found, self.head, self._head_name, self._taken_over = False, None, "", False
        self.named = layer is not None
        module = unwrapped(module)
        weights = self._chosen(module, [name for name, _ in module.named_modules()] if layer is None else [layer])
        super().__init__(module, weights, autocast=autocast)

    def _chosen(self, module: nn.Module, names: list[str]) -> list[str]:
        """The names of the weights of the last of some modules that has any."""
        weights = {name: own_weights(module, name) for name in names}
        layers = [name for name in names if weights[name]]
        if not layers:
            raise ValueError(
                '`parameters="last_layer"` finds no layer: no module with floating-point weights of its own was '
                "called. Name weights with `parameters=[...]`."
            )
        # A normalisation or a scale at the end has weights, too, but is not what users mean by the last layer.
        with_matrix = [name for name in layers if has_matrix(module, name)]
        self.layer = (with_matrix or layers)[-1]
        return names_of(module, weights[self.layer])

    def _choose(self, names: list[str]) -> None:
        """Takes the last of some modules that has weights of its own."""
        weights = self._chosen(self.module, names)
        if weights != self.names:
            shell = self.shell.with_names(weights)
            shell.own()
            super().__init__(shell, batching=self.batching)

    def take_over(self, names: Any) -> None:
        """Takes the layer that a saved posterior is of, if it is one; the first prediction finds its inputs."""
        if self.found:
            return
        for name, _ in list(self.module.named_modules()):
            weights = own_weights(self.module, name)
            if weights and names_of(self.module, weights) == names:
                self._choose([name])
                self._taken_over = True

    def find(self, x: Any, num_data: int, free: float) -> None:
        """Finds the layer by a run on a few inputs, once.

        A notice says if its inputs cannot be kept for so many data in so much free memory.

        Raises:
            ValueError: if no module has weights, or if there are several heads.
        """
        if self.found:
            return
        try:
            calls, outputs, layout = self._run_recorded(x)
        except Exception:
            # Where the layer is known, whether the network takes few data is checked with products.
            self.found = self.named
            if self.named:
                return
            raise
        if layout.names and not self.named:
            raise ValueError(
                f'`parameters="last_layer"` is for one layer, but the model returns the heads {layout.names}. Name '
                'their layers, as by `parameters=["head_a.*", "head_b.*"]`.'
            )
        if not bool(outputs.isfinite().all()):
            return  # the fit raises when it computes the outputs on all data
        self.found = True
        if layout.names:
            return
        if not self.named:
            self._choose([call.name for call in calls])
            # A module around a layer that gives the outputs finishes after it.
            ends = [
                call.name for call in calls if has_matrix(self.module, call.name) and call.gives(outputs, len(outputs))
            ]
            if inner := [name for name in ends if name != self.layer and self.layer in ("", *around(name))]:
                self._choose(inner[-1:])
        reason = self._take_head(x, calls, outputs, num_data, free)
        if reason:
            self._drop_head(reason)

    def _run_recorded(self, x: Any) -> tuple[list[_Call], Tensor, Layout]:
        """All calls of modules, and what the network returns."""
        with exclusive, _recorded(self.module.named_modules()) as calls:
            return calls, *self.evaluate(x)

    def _take_head(self, x: Any, calls: list[_Call], outputs: Tensor, num_data: int, free: float) -> str:
        """Takes the innermost module whose inputs can be kept; returns why there is none."""
        reason = self._output_is_changed
        # Weights may be used outside of the module as well, as tied ones: a product by a random vector tells.
        v = normal(1, self.num_parameters, seed=0, dtype=outputs.dtype, device=outputs.device)
        expected, tolerance = super().jvp(x, v), math.sqrt(torch.finfo(outputs.dtype).eps)
        # From the layer outwards: the innermost module that will do has the smallest forward pass.
        for name in reversed(around(self.layer)):
            of_module = [call for call in calls if call.name == name]
            if len(of_module) != 1 or not of_module[0].gives(outputs, len(outputs)):
                continue
            z = of_module[0].inputs
            if z is None:
                reason = f"`{name}` takes inputs that are not tensors with a row for each datum"
            elif any(t.is_floating_point() and t.dtype != self.module_dtype for t in batched(z)[0]):
                reason = f"`{name}` takes inputs that are in another precision than its weights"
            elif difference((head := self._part(name, z)).jvp(z, v), expected) > tolerance:
                reason = f"weights of `{self.layer}` are used outside of `{name}` as well"
            elif (needed := num_data / num_rows(z) * num_bytes(z)) > (allowed := self.shell.least(free / 2)):
                return f"they would take {needed:.2g} bytes, of {allowed:.2g} that they may take"
            else:
                self._head_name, self.head = name, head
                if self.lacking is not None:
                    head.take_two_pullbacks(self.lacking)
                return ""
        return reason

    def _part(self, name: str, z: Any) -> Linearisation:
        """A part of the module with the random weights in it, and inputs `z`."""
        part, parameters = self.module.get_submodule(name), dict(self.module.named_parameters())
        names = names_of(part, [parameters[name] for name in self.names])
        kind = LinearLayer if LinearLayer.fits(part, names, z) else Linearisation
        head = kind(self.shell.with_names(names, name))
        head.products = self.products
        return head

    def take_two_pullbacks(self, origin: str, having: str = "") -> None:
        """As `Linearisation` does."""
        super().take_two_pullbacks(origin, having)
        if self.head is not None:
            self.head.take_two_pullbacks(origin)

    @property
    def _output_is_changed(self) -> str:
        return f"what `{self.layer}` returns is changed before the network returns it"

    def _drop_head(self, reason: str) -> None:
        self.head = None
        if self.named:
            return
        warnings.warn(
            f'`parameters="last_layer"`: the inputs of `{self.layer}` are not kept, so that each product runs the '
            f"whole network: {reason}.",
            stacklevel=2,
        )

    @contextmanager
    def keep_inputs(self, data: TrainingData) -> Iterator[list[Any]]:
        """Finds the layer, and keeps the inputs of the head in calls inside, for `shortened`."""
        few = data.inputs(torch.arange(min(self._DATA_OF_THE_RUN, data.num_data)))
        free = math.inf if self.found else data.processes.least(free_memory(self.device))
        self.find(place(few, self.device, self.dtype), data.num_data, free)
        if self.head is None:
            yield []
            return
        with self._recording() as kept:
            yield kept

    def shortened(self, data: TrainingData, kept: Sequence[Any]) -> tuple[Linearisation, TrainingData]:
        """The head and its inputs, one for each batch; the whole network if none were kept or their forms differ."""
        if self.head is None:
            return self, data
        # Processes that share out the data must agree.
        forms = [form for of_part in data.processes.gathered(lambda: _forms(kept)) for form in of_part]
        if None in forms:
            self._drop_head(self._output_is_changed)
        elif any(form != forms[0] for form in forms):
            self._drop_head("batches have inputs of it that differ in more than their rows")
        else:
            return self.head, data.with_inputs(concatenate(kept) if kept else None, self.device)
        return self, data

    @contextmanager
    def _recording(self) -> Iterator[list[Any]]:
        """The inputs of the head in each call of the network; `None` if its output is not the network's."""
        kept = list[Any]()
        assert self.head is not None
        with _recorded([(self._head_name, self.head.module)]) as calls:

            def keep(module: nn.Module, args: tuple, output: Any) -> None:
                # What `forward` does to the output may depend on the data, as a bound does: the few data of the run by
                # which the layer was found do not tell.
                z = calls[0].inputs if len(calls) == 1 else None
                kept.append(z if z is not None and calls[0].gives(output, num_rows(z)) else None)
                calls.clear()

            hook = self.module.register_forward_hook(keep)
            try:
                yield kept
            finally:
                hook.remove()

    def evaluate_with_inputs(self, x: Any) -> tuple[Float[Tensor, "N ..."], Layout, Linearisation, Any]:
        """Outputs and layout by one run, and what has their Jacobian: the head, and its inputs in that run.

        It is the network itself, and `x`, where no inputs can be kept.
        """
        if not num_rows(x):  # no data tell nothing of the layer
            return *self.evaluate(x), self, x
        if self._taken_over and not self.found:
            self._taken_over, few = False, take(x, slice(self._DATA_OF_THE_RUN))
            calls, outputs, layout = self._run_recorded(few)
            if not layout.names:
                self._take_head(few, calls, outputs, 0, 0.0)
        if self.head is None:
            return *self.evaluate(x), self, x
        with exclusive, self._recording() as kept:
            outputs, layout = self.evaluate(x)
        if any(z is None for z in kept):
            self._drop_head(self._output_is_changed)
            return outputs, layout, self, x
        # Memory may hold parts of the data only.
        return outputs, layout, self.head, kept[0] if len(kept) == 1 else concatenate(kept)

    def on(self, shell: Shell) -> Self:
        """As `Linearisation` does."""
        other = super().on(shell)
        if self.head is not None:
            other.head = self.head.on(shell.with_names(self.head.names, self._head_name))
        return other


def _forms(kept: Sequence[Any]) -> list[Any]:
    """What must be equal in the inputs of all batches; `None` for a batch without inputs."""
    return [None if z is None else ([t.shape[1:] for t in batched(z)[0]], constants(z)) for z in kept]
