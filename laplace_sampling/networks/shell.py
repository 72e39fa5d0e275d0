"""`Shell`: a network as a function of its random weights, on a copy that nobody else has.

The copy shares the memory of the weights that are not random, and has random weights, buffers, modes and hooks of its
own (`private_copy`). So the user's module is never entered, and what is computed is that of the moment of the copy,
whatever becomes of the module. Weights are put into the copy for the time of a call, also into its lists and
dictionaries.

"""

import copy
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data.batches import Layout, arguments, as_plain, batched, digest, num_rows, read
from laplace_sampling.networks.derivatives import ComposedLayers
from laplace_sampling.networks.memory import cpu_out_of_memory
from laplace_sampling.networks.sharded import BLOCK, agreed, gathering, is_dtensor, is_fsdp, is_of_fsdp, reshard, whole
from laplace_sampling.networks.solving import LOCK, exclusive


def private_copy(module: nn.Module, weight: Callable[[str, nn.Parameter], nn.Parameter]) -> nn.Module:
    """A copy in evaluation mode, with buffers, attributes and hooks of its own; what cannot be copied is shared.

    Args:
        module: of which.
        weight: gives the parameter of the copy for the name and the parameter of the module.
    """
    parts = list(module.modules())
    tensors: dict[int, Any] = {id(p): weight(name, p) for name, p in module.named_parameters()}
    # Weights that hooks compute, as those of pruning, may have a graph, which torch does not copy.
    computed = [t for part in parts for t in vars(part).values() if isinstance(t, Tensor) and not t.is_leaf]
    tensors |= {id(t): t.detach().clone() for t in computed}
    memo = dict(tensors)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception:  # a part that forbids to be copied, as those of FSDP, or that holds what cannot be
        memo = dict(tensors)
        copied = _copied_by_parts(parts, memo)
    sources = dict(module.named_modules())
    for name, part in copied.named_modules():
        part.training = False
        given = vars(sources.get(name, part))
        own = {key: _own_function(value, memo) for key, value in given.items() if isinstance(value, FunctionType)}
        vars(part).update(own)
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.update({key: _own_function(hook, memo) for key, hook in hooks.items()})
    return copied


def shared_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter in the same memory, without gradient; other classes, which hold more than numbers, as they are."""
    is_plain = type(parameter) is nn.Parameter or is_dtensor(parameter)
    return nn.Parameter(parameter.detach(), requires_grad=False) if is_plain else parameter


def own_parameter(parameter: nn.Parameter, requires_grad: bool, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A copy of a parameter, of a dtype if it is a plain one."""
    if type(parameter) is not nn.Parameter and not is_dtensor(parameter):
        try:
            copied = copy.deepcopy(parameter)
        except RuntimeError:  # a class that only adds a name to a tensor need not say how it is copied
            copied = nn.Parameter(parameter.detach().clone())
        copied.requires_grad = requires_grad
        return copied
    numbers = parameter.detach()
    return nn.Parameter(numbers.clone() if dtype is None else numbers.to(dtype), requires_grad)


def _copied_by_parts(parts: list[nn.Module], memo: dict[int, Any]) -> nn.Module:
    # Classes of FSDP are followed by `FSDPModule` and the user's.
    classes = [type(part).__mro__[2] if is_fsdp(part) else type(part) for part in parts]
    memo |= {id(part): object.__new__(kind) for part, kind in zip(parts, classes, strict=True)}
    for part in parts:
        own = vars(memo[id(part)])
        for name, value in vars(part).items():
            if isinstance(value, dict) and type(value) in (dict, OrderedDict):
                kept = {k: item for k, item in value.items() if "_hooks" not in name or not is_of_fsdp(item)}
                own[name] = type(value)((k, _own(item, memo)) for k, item in kept.items())
            elif not name.startswith("__composable_api"):  # streams and process groups of FSDP
                own[name] = _own(value, memo)
        if is_fsdp(part):
            own[BLOCK] = True
    return memo[id(parts[0])]


def _own(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an object of a user's class may raise anything
        return value.detach().clone() if isinstance(value, Tensor) else value


def _own_function(function: Any, memo: dict[int, Any]) -> Any:
    """A function that finds the copies of the modules and weights in its closure; others as they are."""
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    if id(function) in memo:
        return memo[id(function)]
    cells = tuple(CellType() for _ in function.__closure__)
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, function.__qualname__
    own.__dict__.update(function.__dict__)
    memo[id(function)] = own
    for cell, given in zip(cells, function.__closure__, strict=True):
        try:
            value = given.cell_contents
        except ValueError:  # not yet assigned
            continue
        if isinstance(value, FunctionType):
            value = _own_function(value, memo)
        elif isinstance(value, nn.Module) or (isinstance(value, Tensor) and id(value) in memo):
            value = memo.get(id(value), value)
        elif isinstance(value, MethodType):
            value = MethodType(value.__func__, memo.get(id(value.__self__), value.__self__))
        elif isinstance(value, (partial, list, tuple, dict)):
            value = _own(value, memo)
        cell.cell_contents = value
    return own


Weights = dict[str, Tensor]


HALF = (torch.bfloat16, torch.float16)


class Shell:
    """A network `f(w, x)` as a function of its random weights, which are one flat vector of `P` numbers.

    Args:
        source: the trained network.
        names: the random weights, in the order of the flat vector.
        autocast: dtype of the operations that `torch.autocast` lowers.

    Attributes:
        module: the copy of the network, which only this library enters.
        source: the network itself.
        shapes, sizes: of the random weights; of complex ones as pairs of real numbers, `[..., 2]`.
        mesh: of the processes over which `fully_shard` has shared out the weights, else `None`.

    Raises:
        ValueError: for an `autocast` that is not narrower than the weights; for names that the network does not have.
    """

    def __init__(self, source: nn.Module, names: list[str], autocast: torch.dtype | None = None) -> None:
        self.source, self.autocast = source, autocast
        with LOCK, torch.inference_mode(False):
            reshard(source)
            given = dict(source.named_parameters())
            if missing := [name for name in names if name not in given]:
                raise ValueError(
                    f"The model has no parameters {missing} any more, which it had when it was linearised: put them "
                    "back, or construct the `LinearisedLaplace` again."
                )
            module = private_copy(
                source, lambda name, p: own_parameter(p, True) if name in names else shared_parameter(p)
            )
        # A closure in the copy may still have the weights of the network itself.
        self._originals = list(given.items())
        self._shared = [(name, p, p._version) for name, p in module.named_parameters() if name not in names]
        self._take(module, names)
        if autocast is not None and (autocast not in HALF or self.module_dtype != torch.float32):
            raise ValueError(
                f"`autocast={autocast}` must be torch.bfloat16 or torch.float16, of a network in float32, but the "
                f"network is in {self.module_dtype}; leave it out, or call `model.float()`."
            )

    def _take(self, module: nn.Module, names: list[str]) -> None:
        parameters = dict(module.named_parameters())
        self.module, self.names = module, names
        self._complex = [name for name in names if parameters[name].is_complex()]
        self.shapes = {name: real_shape(parameters[name]) for name in names}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.mesh: Any = next((p.device_mesh for p in cast(dict[str, Any], parameters).values() if is_dtensor(p)), None)
        self._look()

    def _look(self) -> None:
        """Notes where weights are in the copy, and what it holds: a forward pass may leave other things behind."""
        first = {id(p): name for name, p in self.module.named_parameters()}
        attributes = [vars(part) for part in self.module.modules()]
        # Weights may be in lists and dictionaries as well, as in recurrent layers; hooks are in none of these.
        containers: list[Any] = [of for own in attributes for of in own.values() if type(of) in (list, dict)]
        self._places: list[tuple[Any, Any, str]] = [
            (own, key, first[id(value)])
            for own in containers
            for key, value in (own.items() if isinstance(own, dict) else enumerate(own))
            if id(value) in first
        ]
        self._held = [(now, now.copy()) for now in (*attributes, *containers)]
        self._first = next((own, key) for own, key, name in self._places if name == self.names[0])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_places", "_held", "_first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    # Other shells -----------------------------------------------------------------------------------------------------

    def renewed(self) -> "Shell":
        """The network as it is now."""
        return Shell(self.source, self.names, self.autocast)

    def with_names(self, names: list[str], part: str = "") -> "Shell":
        """Returns this copy, or a part of it, with other random weights."""
        other = copy.copy(self)
        if part:
            other._originals = [
                (n.removeprefix(f"{part}."), p) for n, p in other._originals if n.startswith(f"{part}.")
            ]
        other._take(self.module.get_submodule(part), names)
        return other

    def own(self) -> None:
        """Copies random weights that are shared still."""
        shared = {name: p for name, p, _ in self._shared if name in self.shapes}
        with torch.no_grad():
            shared = {name: own_parameter(p, True) for name, p in shared.items()}
            for own, key, name in self._places:
                own[key] = shared.get(name, own[key])
        self._shared = [of for of in self._shared if of[0] not in self.shapes]
        self._look()

    def in_float64(self) -> "Shell":
        """A copy in float64, without `autocast`."""
        other = copy.copy(self)
        with LOCK, torch.inference_mode(False):
            module = private_copy(self.module, lambda _, p: own_parameter(p, p.requires_grad, _doubled(p)))
            for part in module.modules():
                part._buffers.update({n: b if b is None else b.to(_doubled(b)) for n, b in part._buffers.items()})
        other._originals, other.autocast, other._shared = [*self._originals, *self.module.named_parameters()], None, []
        other._take(module, self.names)
        return other

    def check(self, call: str) -> None:
        """Raises if weights that the copy shares were changed in place since it was made.

        Raises:
            ValueError: if so.
        """
        changed = [name for name, p, version in self._shared if p._version != version]
        if changed:
            raise ValueError(
                f"`{call}`: the weights {changed[:4]} of the model, which are not random and so are not copied, were "
                "changed in place since the fit. Fit again, or give `LinearisedLaplace` a `copy.deepcopy(model)`."
            )

    # Weights ----------------------------------------------------------------------------------------------------------

    @property
    def _some_weight(self) -> Tensor:
        own, key = self._first
        return own[key]

    @property
    def device(self) -> torch.device:
        return self._some_weight.device

    @property
    def module_dtype(self) -> torch.dtype:
        """The dtype of the first of the random weights, on behalf of all; of a complex one that of its real part."""
        return self._some_weight.dtype.to_real()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors, products and outputs: that of the weights, but float32 for half precision."""
        dtype = self.module_dtype
        return torch.float32 if dtype in HALF else dtype

    def random(self) -> Weights:
        """The random weights, without a graph; whole, also if they are shared out over processes.

        Complex ones are pairs of real numbers, `[..., 2]`.
        """
        with LOCK:
            found = {name: own[key] for own, key, name in self._places}
            weights = {name: found[name] for name in self.names}
        weights = {name: _plain(whole(w)) for name, w in weights.items()}
        return weights | {name: torch.view_as_real(weights[name].resolve_conj()) for name in self._complex}

    def leaves(self) -> Weights:
        """The random weights as leaves of a graph of their own."""
        return {name: w.requires_grad_() for name, w in self.random().items()}

    def unflatten(self, v: Tensor) -> Weights:
        """Views of `[..., P]` in the shapes of the weights, by name."""
        parts = v.split(self.sizes, dim=-1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def write(self, gradients: Iterable[list[Tensor | None]], rows: Float[Tensor, "K P"]) -> None:
        """Writes gradients by weight, of some vectors after others, to rows."""
        # Rows are written in place: a list of gradients that is stacked would take their memory twice.
        zero, start = rows.new_zeros(1, 1), 0
        for by_weight in gradients:
            num = next((len(gradient) for gradient in by_weight if gradient is not None), 1)
            # A weight that the output does not depend on has derivative zero.
            flat = [
                zero.expand(num, size) if gradient is None else gradient.reshape(num, -1)
                for size, gradient in zip(self.sizes, by_weight, strict=True)
            ]
            torch.cat(flat, 1, out=rows[start : start + num])
            start += num

    def layers(self) -> tuple[list[str], Tensor]:
        """The names of the modules that own the weights, and for each weight the index of its module, `[P]`."""
        owners = [name.rpartition(".")[0] or "(root)" for name in self.names]
        layers = list(dict.fromkeys(owners))
        sizes = torch.tensor(self.sizes)
        return layers, torch.repeat_interleave(torch.tensor([layers.index(owner) for owner in owners]), sizes)

    # Calls ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The copy for one product: other threads wait, and what passes have left behind in it is taken away."""
        with exclusive:
            try:
                with _eager(), nullcontext() if self.mesh is None else gathering(self.module, self.names):
                    yield
            finally:
                # Hooks of weight normalisation leave differentiated weights as attributes, and caches hold what has a
                # graph that is gone.
                for now, before in self._held:
                    if isinstance(now, list):
                        if len(now) != len(before) or not all(map(is_, now, before)):
                            now[:] = before
                    elif len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                        now.clear()
                        now.update(before)

    def __call__(self, weights: Weights | None, x: Any, *, composed: bool = False) -> Float[Tensor, "N ..."]:
        """`f(w, x)` for some of the weights by name; those of several heads flat.

        Args:
            weights: in place of those of the copy; `None` for its own.
            x: inputs.
            composed: whether layers without forward derivatives are replaced for this call.
        """
        return self.with_layout(weights, x, composed=composed)[0]

    def with_layout(
        self, weights: Weights | None, x: Any, *, composed: bool = False
    ) -> tuple[Float[Tensor, "N ..."], Layout]:
        """The outputs as by a call, and their layout."""
        args, kwargs = arguments(self._copied(x))
        dtype = self.dtype
        lowered = torch.autocast(self.device.type, self.autocast, self.autocast is not None, cache_enabled=False)
        # A mode that replaces layers takes time for every call of torch, so only the network is called inside of it.
        with lowered, cpu_out_of_memory, ComposedLayers() if composed else nullcontext(), self._with(weights):
            output = self.module(*args, **kwargs)
        output, layout = read(output, num_rows(x))
        output = _plain(output)
        return output if output.dtype == dtype else output.to(dtype), layout  # a `to` without effect takes time, too

    @contextmanager
    def _with(self, weights: Weights | None) -> Iterator[None]:
        """The copy with some weights in the place of its own."""
        if weights is None:
            weights = {}
        elif self._complex:
            weights = weights | {n: torch.complex(*weights[n].unbind(-1)) for n in self._complex if n in weights}
        places = [(own, key, own[key], weights[name]) for own, key, name in self._places if name in weights]
        for own, key, _, weight in places:
            own[key] = weight
        try:
            yield
        finally:
            for own, key, before, _ in places:
                own[key] = before

    def outputs(self, x: Any) -> Callable[..., Float[Tensor, "N C"]]:
        """Returns the function that maps the random weights, by name as in `random`, to the outputs at `x`, `[N, C]`.

        During its calls, layers that have no forward derivatives are replaced by equal ones that have them.
        """
        num = num_rows(x)

        def outputs(weights: Weights) -> Tensor:
            output = self(weights, x, composed=True)
            return output if output.dim() == 2 else output.reshape(num, -1)

        return outputs

    def forward(self, x: Any) -> Float[Tensor, "N C"]:
        """The outputs that Jacobian products differentiate, at the trained weights."""
        return self.outputs(x)(self.random())

    def evaluate(self, x: Any) -> tuple[Float[Tensor, "N ..."], Layout]:
        """What the module itself returns, and its layout."""
        args, kwargs = arguments(self._copied(x))
        with self.explained(x), cpu_out_of_memory:
            output, layout = read(self.module(*args, **kwargs), num_rows(x))
            return as_plain(output), layout

    @contextmanager
    def explained(self, x: Any) -> Iterator[None]:
        """Errors that torch raises inside say what the network was given."""
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_of_torch(error):
                raise
            own = " and ".join(sorted({str(p.dtype) for p in self.module.parameters()}))
            given = ", ".join(f"{list(t.shape)} in {t.dtype}" for t in batched(x)[0])
            advice = f"Convert inputs by `x.to({self.module_dtype})`; numbers of numpy are in float64."
            if all(t.dtype == self.module_dtype for t in batched(x)[0]):
                advice = "The first axis of inputs is that of the batch, which a single input gets by `x[None]`."
            if "does not require grad" in str(error):
                advice = "Put `with torch.enable_grad():` around what the network differentiates in its forward."
            raise ValueError(
                f"{type(self.module).__name__}, whose weights are in {own}, fails on inputs of shape {given}. torch "
                f"says: {str(error).rstrip('. ')}. {advice}"
            ) from error

    def plain_gradient(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, " Q"]:
        """`Σ_n φ(x_n)ᵀ u_n` in all elements of the parameters that have random weights, with the copy's own weights.

        Gradients that a function of autograd adds to the parameters itself, in its backward pass, count as well.
        """
        found = {name: own[key] for own, key, name in self._places}
        parameters = [found[name] for name in self.names]
        # A tensor that was once computed of a weight of the network, and kept, has it in its graph still.
        originals = [(name, p) for name, p in self._originals if name in self.shapes and p.requires_grad]
        try:
            outputs = self(None, x, composed=True)
            parts = {name: torch.zeros_like(p) for name, p in zip(self.names, parameters, strict=True)}
            if outputs.requires_grad:
                wanted = [*zip(self.names, parameters, strict=True), *originals]
                u = u.to(outputs.dtype).reshape(outputs.shape)
                gradients = torch.autograd.grad(outputs, [p for _, p in wanted], u, allow_unused=True)
                for (name, p), gradient in zip(wanted, gradients, strict=True):
                    added = [g for g in (gradient, p.grad if p is found[name] else None) if g is not None]
                    parts[name] = sum(added, parts[name])
        finally:
            for p in parameters:
                p.grad = None
        # The gradient in a complex number has those in its two parts as its parts.
        real = [torch.view_as_real(part) if part.is_complex() else part for part in parts.values()]
        return torch.cat([part.detach().reshape(-1).to(self.dtype) for part in real])

    def _copied(self, x: Any) -> Any:
        """Inputs that the network may change in place, narrowed to its own precision if that is half."""
        tensors, rebuild = batched(x)
        dtype = self.module_dtype
        narrow = dtype in HALF
        return rebuild([t.to(dtype, copy=True) if narrow and t.is_floating_point() else t.clone() for t in tensors])

    def least(self, value: float) -> float:
        """The smallest value that a process has, of those that share out the weights; they take the same decisions."""
        return value if self.mesh is None else agreed(int(value), self.mesh)

    def fingerprint(self) -> Tensor:
        """SHA-256 of all weights and buffers, `[32]` bytes: tells whether a network is the one that was fitted.

        Raises:
            ValueError: if processes that share out the weights have other buffers.
        """
        with LOCK:
            tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
            found = digest((name, whole(tensor)) for name, tensor in tensors)
        number = int.from_bytes(found[:4])
        if not agreed(agreed(number, self.mesh) == number, self.mesh):
            raise ValueError(
                f"The processes that share out {type(self.module).__name__} have other buffers, such as statistics of "
                "batch normalisation: send those of one process to all, by `torch.distributed.broadcast`."
            )
        return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def _doubled(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.complex128
    return torch.float64 if tensor.is_floating_point() else tensor.dtype


def real_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight as real numbers, which a complex one is a pair of."""
    return torch.Size((*weight.shape, 2)) if weight.is_complex() else weight.shape


def _plain(tensor: Tensor) -> Tensor:
    """A plain tensor in place of one whose class changes nothing that is computed; others may be what a layer needs."""
    kind = type(tensor)
    if kind is Tensor:
        return tensor
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    usual = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
    return as_plain(tensor) if function in usual else tensor


def _is_of_torch(error: Exception) -> bool:
    """Whether an error was raised inside torch, or what replaces it, and not by the user's own lines."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == "torch" or module == ComposedLayers.__module__


def _eager() -> AbstractContextManager[Any]:
    """For parts that the user has compiled; the compiler takes a second to import, and each change of it 30 µs."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
