"""The network as a function of its random weights, and the precision of products around its calls.

The module is held, never changed: weights are given to it by `torch.func.functional_call`, and where it takes its own
from elsewhere than its parts, from a list or a closure, operations are given others in their place. Its state is put
back after each call (`evaluation_mode`).
"""

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from laplace_sampling.data.batches import Layout, arguments, as_plain, batched, num_rows, read
from laplace_sampling.data.digest import digest
from laplace_sampling.networks.batching import cpu_out_of_memory
from laplace_sampling.networks.module_state import ModuleState
from laplace_sampling.networks.sharded import Shards, agreed, is_dtensor, mesh_of, reshard, whole
from laplace_sampling.networks.undisturbed import (
    LOCK,
    handle_signals,
    outside_of_compiled_code,
    signals_wait,
    undisturbed,
)

Weights = dict[str, Tensor]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

HALF = (torch.bfloat16, torch.float16)


class HeldModule:
    """A module `f(w, x)` as a function of its random weights, which are one flat vector of `P` numbers.

    Args:
        module: the trained network.
        names: the random weights, in the order of the flat vector.
        autocast: dtype of the operations that `torch.autocast` lowers.
        composed_layers: the context in which layers without forward derivatives are replaced.

    Attributes:
        shapes: of the random weights, by name.
        shards: of a module that `fully_shard` has shared out over processes, else `None`.

    Raises:
        ValueError: for an `autocast` that is not narrower than the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        autocast: torch.dtype | None = None,
        composed_layers: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.module, self.names, self.autocast, self._composed_layers = module, names, autocast, composed_layers
        self._copied_from: HeldModule | None = None
        self.shards = Shards.of(module, names)
        self._complex = [name for name, parameter in self._random().items() if parameter.is_complex()]
        self.shapes = {name: real_shape(parameter) for name, parameter in self._random().items()}
        self._path = names[0].split(".")
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self._all_random = len(names) == len(dict(module.named_parameters()))
        self._state: ModuleState | None = None
        if autocast is not None and (autocast not in HALF or self.module_dtype != torch.float32):
            raise ValueError(
                f"`autocast={autocast}` must be torch.bfloat16 or torch.float16, of a network in float32, but the "
                f"network is in {self.module_dtype}; leave it out, or call `model.float()`."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the state of the module, which is of objects of this process."""
        return {**self.__dict__, "_state": None}

    def state(self) -> ModuleState:
        """What the module holds now: the same object as before if nothing has changed."""
        if self.shards is not None:
            reshard(self.module)
        if self._state is None or not self._state.holds():
            self._state = ModuleState(self.module)
        return self._state

    def random(self) -> Weights:
        """The random weights of the module, without a graph; whole, also if they are shared out over processes.

        Complex ones are pairs of real numbers, `[..., 2]`.
        """
        weights = self._random()
        if self.shards is None:
            weights = {name: _plain(w.detach()) for name, w in weights.items()}
        else:
            weights = self.shards.random(weights)
        return weights | {name: torch.view_as_real(weights[name].resolve_conj()) for name in self._complex}

    def _random(self) -> Weights:
        with LOCK:
            parameters = dict(self.module.named_parameters())
        if missing := [name for name in self.names if name not in parameters]:
            raise self._lost(missing)
        return {name: parameters[name] for name in self.names}

    def _lost(self, names: list[str]) -> ValueError:
        return ValueError(
            f"The model has no parameters {names} any more, which it had when it was linearised: put them back, or "
            "construct the `LinearisedLaplace` again."
        )

    def leaves(self) -> Weights:
        """The random weights as leaves of a graph of their own."""
        return {name: w.requires_grad_() for name, w in self.random().items()}

    def fixed(self) -> Weights:
        """The weights that are not random, so that no gradient reaches those of the module.

        Without those that are shared out over processes, which the network gathers as constants while it runs.
        """
        if self._all_random:
            return {}
        with LOCK:
            parameters = self.module.named_parameters()
            fixed = {name: p.detach() for name, p in parameters if name not in self.shapes and not is_dtensor(p)}
        return {name: _plain(p) for name, p in fixed.items()}

    def _some_weight(self) -> Tensor:
        """One of the random weights; a walk through the module would take as long as a small layer."""
        *owners, name = self._path
        part: nn.Module | None = self.module
        try:
            with LOCK:
                for owner in owners:
                    part = part._modules[owner]  # pyright: ignore[reportOptionalMemberAccess]
                if (weight := part._parameters[name]) is not None:  # pyright: ignore[reportOptionalMemberAccess]
                    return weight
        except (KeyError, AttributeError):
            pass
        raise self._lost(self.names[:1])

    @property
    def device(self) -> torch.device:
        return self._some_weight().device

    @property
    def module_dtype(self) -> torch.dtype:
        """The dtype of the weights; of complex ones that of their parts."""
        return self._some_weight().dtype.to_real()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors, products and outputs: that of the weights, but float32 for half precision."""
        dtype = self.module_dtype
        return torch.float32 if dtype in HALF else dtype

    def __call__(self, weights: Weights | None, x: Any, *, composed: bool = False) -> Float[Tensor, "N ..."]:
        """`f(w, x)` for some of the weights by name; those of several heads flat.

        Args:
            weights: in place of those of the module; `None` for its own.
            x: inputs.
            composed: whether layers without forward derivatives are replaced for this call.
        """
        handle_signals()
        if self._complex and weights is not None:
            weights = weights | {n: torch.complex(*weights[n].unbind(-1)) for n in self._complex if n in weights}
        args, kwargs = arguments(self._copied(x))
        dtype = self.dtype
        lowered = torch.autocast(self.device.type, self.autocast, self.autocast is not None, cache_enabled=False)
        # A mode that replaces layers takes time for every call of torch, so only the network is called inside of it.
        graph = nullcontext() if self.shards is None else self.shards.graph()
        with lowered, cpu_out_of_memory, graph, self._composed_layers() if composed else nullcontext():
            if weights is None:
                output = self.module(*args, **kwargs)
            else:
                tied = self._state is None or self._state.tied
                with self._weights_elsewhere(weights):
                    output = functional_call(self.module, weights, args, kwargs, tie_weights=tied)
        output = _plain(read(output, num_rows(x))[0])
        return output if output.dtype == dtype else output.to(dtype)  # even a `to` without effect takes time

    @contextmanager
    def _weights_elsewhere(self, weights: Weights) -> Iterator[None]:
        """Operations inside also take these weights where the module holds its own in a list or a closure, say.

        A mode takes time for every call of torch, so it is left out after a fit in which no data needed it.
        """
        state = self._state
        # Who holds a weight of `fully_shard` elsewhere holds a part of it, with which the module itself cannot run.
        if self.shards is not None or (state is not None and state.weights_elsewhere is False):
            yield
            return
        held, in_place_of = self, dict[int, Tensor]()
        while held is not None:  # a closure in a copy of a module still has the weights of the module
            parameters = held.module.named_parameters()
            in_place_of |= {id(p): weights[name] for name, p in parameters if name in weights}
            held = held._copied_from
        with _Substitution(in_place_of) as mode:
            yield
        if state is not None and mode.needed:
            state.weights_elsewhere = True

    def expect_weights_elsewhere(self, expected: bool) -> None:
        """Whether they are looked for: from the start of a fit on; and after it where products have met any."""
        state = self._state
        if state is not None and not state.weights_elsewhere:
            state.weights_elsewhere = None if expected else False

    def outputs(self, x: Any) -> Callable[..., Float[Tensor, "N C"]]:
        """`w ↦ f(w, x)` of the random weights, from layers with forward derivatives."""
        fixed, num = self.fixed(), num_rows(x)

        def outputs(weights: Weights, composed: bool = True) -> Tensor:
            output = self({**fixed, **weights}, x, composed=composed)
            return output if output.dim() == 2 else output.reshape(num, -1)

        return outputs

    def forward(self, x: Any) -> Float[Tensor, "N C"]:
        """The outputs that Jacobian products differentiate, at the trained weights."""
        return self.outputs(x)(self.random())

    def evaluate(self, x: Any) -> tuple[Float[Tensor, "N ..."], Layout]:
        """What the module itself returns, and its layout."""
        args, kwargs = arguments(self._copied(x))
        try:
            with cpu_out_of_memory:
                output, layout = read(self.module(*args, **kwargs), num_rows(x))
                return as_plain(output), layout
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            explained = self._explained(error, x)
            if explained is error:
                raise
            raise explained from error

    def _copied(self, x: Any) -> Any:
        """Inputs that the network may change in place, narrowed to its own precision if that is half."""
        tensors, rebuild = batched(x)
        dtype = self.module_dtype
        narrow = dtype in HALF
        return rebuild([t.to(dtype, copy=True) if narrow and t.is_floating_point() else t.clone() for t in tensors])

    def _explained(self, error: Exception, x: Any) -> Exception:
        """An error of torch in the network with what it is of, and what the user can do; one of its own as it is."""
        name = type(self.module).__name__
        if "does not require grad" in str(error):
            return RuntimeError(
                f"{name} differentiates in its forward, which is run under "
                f"`torch.no_grad()`: {error}. Put `with torch.enable_grad():` around that part of it, "
                "and call `requires_grad_()` there on what it differentiates in."
            )
        if isinstance(error, torch.OutOfMemoryError) or not _is_of_torch(error):
            return error
        tensors = batched(x)[0]
        dtypes = sorted({str(t.dtype) for t in tensors if t.dtype != self.module_dtype})
        if dtypes and "type" in str(error):
            return TypeError(
                f"{name}, whose weights are in {self.module_dtype}, fails on inputs in "
                f"{', '.join(dtypes)}: {error} Convert the inputs, as by `x.to({self.module_dtype})` (numbers of "
                "numpy are in float64), or the model."
            )
        own = sorted({str(p.dtype) for p in self.module.parameters()})
        several = f", and its weights are in {' and '.join(own)}: convert it to one of them" if len(own) > 1 else ""
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(
            f"{name} fails on inputs of shape {', '.join(str(list(t.shape)) for t in tensors)} in "
            f"{', '.join(sorted({str(t.dtype) for t in tensors}))}{several}. torch says: {error}"
        )

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

    def least(self, value: float) -> float:
        """The smallest value that a process has, of those that share out the weights; they take the same decisions."""
        return value if self.shards is None else agreed(int(value), mesh_of(self.module.parameters()))

    def layers(self) -> tuple[list[str], Tensor]:
        """The names of the modules that own the weights, and for each weight the index of its module, `[P]`."""
        owners = [name.rpartition(".")[0] or "(root)" for name in self.names]
        layers = list(dict.fromkeys(owners))
        sizes = torch.tensor(self.sizes)
        return layers, torch.repeat_interleave(torch.tensor([layers.index(owner) for owner in owners]), sizes)

    def in_float64(self) -> "HeldModule":
        """A copy of the module in float64, without `autocast`."""
        with LOCK:
            module = copy.deepcopy(self.module).double() if self.shards is None else self.shards.in_float64()
            if self._complex:  # which `double` leaves as they are
                module._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)
        held = HeldModule(module, self.names, composed_layers=self._composed_layers)
        held._copied_from = self
        return held

    def fingerprint(self) -> Tensor:
        """SHA-256 of all weights and buffers, `[32]` bytes: tells whether a network is the one that was fitted.

        Raises:
            ValueError: if processes that share out the weights have other buffers.
        """
        with LOCK:
            self.state()
            tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
            found = digest((name, whole(tensor)) for name, tensor in tensors)
        number, mesh = int.from_bytes(found[:4]), mesh_of(tensor for _, tensor in tensors)
        if not agreed(agreed(number, mesh) == number, mesh):
            raise ValueError(
                f"The processes that share out {type(self.module).__name__} have other buffers, such as statistics of "
                "batch normalisation: send those of one process to all, by `torch.distributed.broadcast`."
            )
        return torch.frombuffer(bytearray(found), dtype=torch.uint8)


class _Substitution(TorchFunctionMode):
    """Functions of torch take other tensors in place of some, by identity.

    Attributes:
        needed: whether one of these tensors was met.
    """

    def __init__(self, in_place_of: dict[int, Tensor]) -> None:
        super().__init__()
        self._in_place_of, self.needed = in_place_of, False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*self._replaced(args), **self._replaced(kwargs or {}))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            other = self._in_place_of.get(id(value))
            self.needed = self.needed or other is not None
            return value if other is None else other
        if type(value) in (list, tuple):
            return type(value)(map(self._replaced, value))
        return {key: self._replaced(item) for key, item in value.items()} if type(value) is dict else value


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
    """Whether an error was raised inside torch, and not by the user's own lines."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


# What the user had set, for each context of `solving` that changed it; those of one thread, which holds the lock.
_users_settings: list[list[str]] = []
# torch 2.9 and later have a setting for each backend; before, there is one for all.
_BACKENDS: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
if not all(hasattr(backend, "fp32_precision") for backend in _BACKENDS):
    _BACKENDS = []
# Settings by which products are as precise as they can be.
_FULL = ("none", "ieee", "highest")


def precisions() -> list[str]:
    """The precision of float32 products now, on a GPU and on a CPU; one for both in torch before 2.9."""
    return [backend.fp32_precision for backend in _BACKENDS] or [torch.get_float32_matmul_precision()]


def _set_precisions(values: list[str]) -> None:
    if not _BACKENDS:
        torch.set_float32_matmul_precision(values[0])
    for backend, value in zip(_BACKENDS, values, strict=False):
        backend.fp32_precision = value


@contextmanager
def solving() -> Iterator[None]:
    """Float32 products without TF32 or bfloat16, and outside of inference mode.

    Solvers cannot orthogonalise by products of less precision, and tensors made in inference mode have no graph.
    """
    with signals_wait, _full_precision(), torch.inference_mode(False):
        yield


@contextmanager
def _full_precision() -> Iterator[None]:
    lowered = False
    try:
        with undisturbed:
            if any(value not in _FULL for value in precisions()):
                # The setting is one for all threads: others wait until it is put back.
                lowered = LOCK.acquire()
                _users_settings.append(precisions())
                _set_precisions(["ieee"] * len(_BACKENDS) or ["highest"])
        yield
    finally:
        if lowered:
            _set_precisions(_users_settings.pop())
            LOCK.release()


def solver_call(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A public call that solves: in the context `solving`, and not a part of code that the user compiles."""

    @wraps(call)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return outside_of_compiled_code(wrapper, *args, **kwargs)
        with solving():
            return call(*args, **kwargs)

    return wrapper


def users_precision() -> AbstractContextManager[None]:
    """Inside `solving`, the precision that the user has set outside of it."""
    return _users_precision() if _users_settings else nullcontext()


@contextmanager
def _users_precision() -> Iterator[None]:
    now = precisions()
    # Contexts of `solving` nest; what was set before the outermost is the user's.
    try:
        _set_precisions(_users_settings[0])
        yield
    finally:
        _set_precisions(now)
