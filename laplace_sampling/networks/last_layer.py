r"""`parameters="last_layer"`: the layer is found by running the network, and its inputs on the training data are kept.

Where the outputs of a network are those of a module, `f(w, x) = g(w, z(x))`, Jacobian products in the weights of that
module take its inputs `z` and the module only. These are kept from the one pass in which `f` is computed: all that
follows costs as much as for a linear model.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data.batches import Layout, batched, concatenate, constants, num_bytes, num_rows, place, read
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.networks.batching import DEFAULT_CHUNK
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.resources import free_memory
from laplace_sampling.networks.unwrapping import unwrapped

__all__ = ["LastLayer", "keep_inputs", "shortened"]

# Data that the network is run on to find the layer, and the share of free memory that its inputs may take.
_FEW, _SHARE = 2, 0.5


@dataclass(frozen=True)
class _Call:
    """One call of a module: inputs in the form of `laplace_sampling.data.batches`, `None` if they have another."""

    name: str
    inputs: Any
    output: Any


class LastLayer(Linearisation):
    """A network of whose weights those of the last layer are random.

    That is the last of its modules to finish a call that has a matrix (or a kernel) of its own, as linear layers and
    convolutions do, or the last with any weights if none has. Before the first fit, which runs the network, it is taken
    to be the one that was registered last.

    Args:
        module: the trained network.
        chunk_size: as for `Linearisation`.

    Attributes:
        layer: the name of the layer.
        head: the innermost module that contains it and gives the outputs of the network, with its own weights; `None`
            where products take the whole network.
    """

    def __init__(
        self, module: nn.Module, *, chunk_size: int = DEFAULT_CHUNK, autocast: torch.dtype | None = None
    ) -> None:
        module = unwrapped(module)
        self.found, self.head, self._root = False, None, ""
        self._choose(module, [name for name, _ in module.named_modules()], chunk_size, autocast)

    def _choose(self, module: nn.Module, names: list[str], chunk_size: int, autocast: torch.dtype | None) -> None:
        """Take the last of some modules that has weights of its own."""
        own = {name: _own(module, name) for name in names}
        layers = [name for name in names if own[name]]
        if not layers:
            raise ValueError(
                '`parameters="last_layer"` finds no layer: no module with floating-point weights of its own was '
                "called. Name weights with `parameters=[...]`."
            )
        wide = [name for name in layers if any(p.dim() > 1 for p in own[name])]
        self.layer = (wide or layers)[-1]
        random = {id(p) for p in own[self.layer]}
        chosen = [name for name, p in module.named_parameters() if id(p) in random]
        super().__init__(module, chosen, chunk_size=chunk_size, autocast=autocast)

    def take_over(self, names: Any) -> None:
        """The layer that a saved posterior is of, if it is one: its inputs are not kept until a fit."""
        of = [name for name, _ in self.module.named_modules() if _own(self.module, name)]
        for name in of if not self.found else []:
            random = {id(p) for p in _own(self.module, name)}
            if [n for n, p in self.module.named_parameters() if id(p) in random] == names:
                self._choose(self.module, [name], self.chunk_size, self.autocast)

    def find(self, x: Any, num_data: int) -> None:
        """Find the layer by a run on a few inputs; done once.

        A notice says if its inputs cannot be kept for so many data.

        Raises:
            ValueError: if no module has weights, or if there are several heads.
        """
        if self.found:
            return
        calls, outputs, layout = self._run(x)
        if layout.names:
            raise ValueError(
                f'`parameters="last_layer"` is for one layer, but the model returns the heads {layout.names}. Name '
                'their layers, as by `parameters=["head_a.*", "head_b.*"]`.'
            )
        if not bool(outputs.isfinite().all()):
            return  # said when the outputs on all data are computed
        self._choose(self.module, [call.name for call in calls], self.chunk_size, self.autocast)
        self.found = True
        head, why = self._head(x, calls, outputs)
        if head is not None:
            z = next(call.inputs for call in calls if call.name == head)
            needed, room = num_data / num_rows(z) * num_bytes(z), _SHARE * free_memory(self.device)
            if needed > room:
                head, why = None, f"they would take {needed:.2g} bytes, of {room:.2g} that they may take"
        if head is None:
            self._say(why)
        else:
            self._hold(head)

    def _run(self, x: Any) -> tuple[list[_Call], Tensor, Layout]:
        """All calls of modules, in the order in which they end, and what the network returns."""
        calls: list[_Call] = []
        handles = []
        for name, module in self.module.named_modules():

            def record(module: nn.Module, args: tuple, kwargs: dict, output: Any, name: str = name) -> None:
                calls.append(_Call(name, _inputs(args, kwargs), output))

            handles.append(module.register_forward_hook(record, with_kwargs=True))
        try:
            outputs, layout = self.evaluate(x)
        finally:
            for handle in handles:
                handle.remove()
        return calls, outputs, layout

    def _head(self, x: Any, calls: list[_Call], outputs: Tensor) -> tuple[str | None, str]:
        """The module whose inputs are to be kept; or why there is none."""
        why = f"what `{self.layer}` returns is changed before the network returns it"
        v = torch.randn(1, self.num_parameters, generator=torch.Generator().manual_seed(0)).to(outputs)
        whole = super().jvp(x, v)
        parts = self.layer.split(".")
        for name in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
            of_name = [call for call in calls if call.name == name]
            if len(of_name) != 1 or not _gives(of_name[0], outputs):
                continue
            z = of_name[0].inputs
            if z is None:
                why = f"`{name}` takes inputs that are not tensors with a row for each datum"
                continue
            head = self._part(self.module, name)
            if not _close(head.jvp(z, v), whole):
                why = f"weights of `{self.layer}` are used outside of `{name}` as well"
                continue
            return name, ""
        return None, why

    def _part(self, module: nn.Module, name: str) -> Linearisation:
        """A module with the random weights in it."""
        part, parameters = module.get_submodule(name), dict(module.named_parameters())
        random = {id(parameters[name]) for name in self.names}
        names = [name for name, p in part.named_parameters() if id(p) in random]
        return Linearisation(part, names, chunk_size=self.chunk_size, autocast=self.autocast)

    def _hold(self, name: str) -> None:
        self._root, self.head = name, self._part(self.module, name)
        self.head.products = self.products

    def _say(self, why: str) -> None:
        self.head = None
        warnings.warn(
            f'`parameters="last_layer"`: the inputs of `{self.layer}` are not kept, so that each product runs the '
            f"whole network: {why}.",
            stacklevel=2,
        )

    @contextmanager
    def keeping(self) -> Iterator[list[Any]]:
        """The inputs of the head in each call of the network, copied."""
        kept: list[Any] = []
        assert self.head is not None

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            z = _inputs(args, kwargs)
            tensors, rebuild = ([], lambda _: None) if z is None else batched(z)
            # a view would hold all of what it is a view of
            kept.append(rebuild([tensor.detach().clone() for tensor in tensors]))

        handle = self.head.module.register_forward_pre_hook(record, with_kwargs=True)
        try:
            yield kept
        finally:
            handle.remove()

    def _inputs(self, x: Any) -> Any:
        """Of the head."""
        with self.keeping() as kept:
            self.evaluate(x)
        return kept[0]

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """As of a `Linearisation`; without a graph, all but the head runs once."""
        if self.head is None or graph:
            return super().jvp(x, v, graph=graph)
        self._check_width(v, "jvp")
        return self.head.jvp(self._inputs(x), v)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """As of a `Linearisation`; without a graph, all but the head runs once."""
        if self.head is None or graph:
            return super().vjp(x, u, graph=graph)
        return self.head.vjp(self._inputs(x), u)

    def ggn(self, x: Any, v: Float[Tensor, "K P"], curvature: Callable[[Tensor], Tensor]) -> Float[Tensor, "K P"]:
        """As of a `Linearisation`; all but the head runs once."""
        if self.head is None:
            return super().ggn(x, v, curvature)
        return self.head.ggn(self._inputs(x), v, curvature)

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """As of a `Linearisation`; all but the head runs once."""
        return super().vjp_each(x, u) if self.head is None else self.head.vjp_each(self._inputs(x), u)

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """As of a `Linearisation`; without a graph, all but the head runs once."""
        if self.head is None or graph:
            return super().jacobian(x, graph=graph)
        return self.head.jacobian(self._inputs(x))

    def in_float64(self) -> "LastLayer":
        """The same on a copy of the module in float64."""
        other = super().in_float64()
        assert isinstance(other, LastLayer)
        if other.head is not None:
            other._hold(self._root)
        return other

    def with_kept(self, data: TrainingData, kept: Sequence[Any]) -> tuple[Linearisation, TrainingData]:
        """The head and its inputs on the training data, one for each batch; the whole network if these differ."""
        assert self.head is not None
        forms = [None if z is None else ([t.shape[1:] for t in batched(z)[0]], constants(z)) for z in kept]
        if None in forms or any(form != forms[0] for form in forms):
            self._say("batches have inputs of it that differ in more than their rows")
            return self, data
        return self.head, TrainingData.unlabelled(concatenate(kept), data.batch_size)


@contextmanager
def keep_inputs(network: Linearisation, data: TrainingData) -> Iterator[list[Any]]:
    """The inputs that `shortened` takes, from calls of the network inside; none but of a `LastLayer`."""
    if isinstance(network, LastLayer):
        some = data.inputs(torch.arange(min(_FEW, data.num_data)))
        network.find(place(some, network.device, network.dtype), data.num_data)
        if network.head is not None:
            with network.keeping() as kept:
                yield kept
            return
    yield []


def shortened(network: Linearisation, data: TrainingData, kept: Sequence[Any]) -> tuple[Linearisation, TrainingData]:
    """The part of the network that has random weights and its inputs, where these were kept; else both as they are."""
    if kept and isinstance(network, LastLayer):
        return network.with_kept(data, kept)
    return network, data


def _own(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The floating-point weights of a module itself, also those that it computes its weights from."""
    if "parametrizations" in name.split("."):
        return []
    found = module.get_submodule(name)
    own = list(found.parameters(recurse=False))
    if nn.utils.parametrize.is_parametrized(found):
        own += list(found.get_submodule("parametrizations").parameters())
    return [p for p in own if p.is_floating_point()]


def _inputs(args: tuple, kwargs: dict) -> Any:
    """Of a call, in the form of `laplace_sampling.data.batches`; `None` if there is none."""
    if bool(args) == bool(kwargs):
        return None
    x = kwargs or (args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args)
    try:
        num_rows(x)
    except (TypeError, ValueError):
        return None
    return x


def _gives(call: _Call, outputs: Tensor) -> bool:
    """Whether a call returned the outputs of the network, but for the shape of a datum."""
    try:
        output = read(call.output, len(outputs))[0]
    except (TypeError, ValueError):
        return False
    same = output.numel() == outputs.numel() and torch.equal(output.reshape(-1), outputs.reshape(-1))
    return same and (call.inputs is None or num_rows(call.inputs) == len(outputs))


def _close(a: Tensor, b: Tensor) -> bool:
    """Up to rounding: half of the digits."""
    return float((a - b).norm()) <= math.sqrt(torch.finfo(b.dtype).eps) * float(b.norm())
