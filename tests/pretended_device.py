"""A device without hardware, which finds tensors on the wrong device on a machine without a GPU.

    with pretended_device() as device:            # torch.device("xpu", 0)
        model.to(device)                          # its tensors are marked: `model.weight.device` is "xpu:0"
        LinearisedLaplace(model, "classification").fit_hyperparameters(loader)

All tensors stay in the memory of the CPU, and all operations run there, so that results equal those of the CPU. The
storage of a tensor on the device carries a mark, which views share. A result is on the device if an operand is, or if
`device=` says so. As on a GPU, an operation whose operands are on two devices raises an error, with three exceptions:
copies, numbers (tensors without axes) of the CPU in pointwise operations, and indices of the CPU into tensors of the
device. Threads that start inside of the context are watched as well. Files and pickles do not keep the mark.

A GPU finds more: sparse tensors and tensors that are made inside of custom backward functions have no mark, no branch
`device.type == "cuda"` is taken, and no operation or dtype is missing. Tests with the marker `gpu` cover these.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE, CPU = torch.device("xpu", 0), torch.device("cpu")
# Marks of storages. A storage of the CPU has none. torch makes some tensors inside of derivatives, of which nobody has
# said where they are: they go with tensors of both.
ON_DEVICE, ANYWHERE = "on the device", "anywhere"

INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index")
BETWEEN_DEVICES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::set_", "aten::_pack_padded_sequence")
# Operations that take a number of the CPU although they are not pointwise, and a pointwise one that takes none.
TAKES_NUMBERS = ("aten::masked_fill", "aten::index_fill", "aten::fill", "aten::_foreach")
TAKES_NO_NUMBERS = ("aten::clamp.Tensor",)

# What is asked most often, and has nothing to do with devices.
SAME_EVERYWHERE = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "requires_grad")}
ASKS_DEVICE, ASKS_CPU, ASKS_XPU = Tensor.device.__get__, Tensor.is_cpu.__get__, Tensor.is_xpu.__get__
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
MADE_ANEW = (Tensor.new_tensor, Tensor.new, Tensor.__deepcopy__, *FROM_DATA)
MOVES = {Tensor.to: None, Tensor.type_as: None, Tensor.cpu: CPU, Tensor.xpu: DEVICE}

# Where the tensor is that is made at the moment, if the call says so.
made_on: ContextVar[torch.device | None] = ContextVar("made_on", default=None)


class DeviceMemory:
    """The bytes of all tensors on the device, and the most that there were; more than there are is an error."""

    def __init__(self, total: float) -> None:
        self.total, self.used, self.peak = total, 0, 0

    def take(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        if self.used + num_bytes > self.total:
            raise torch.OutOfMemoryError(
                f"Tried to allocate {num_bytes:,} bytes on {DEVICE}, where {self.used:,} of {self.total:,} are in use."
            )
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        weakref.finalize(storage, self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes


memory_of_device: DeviceMemory = DeviceMemory(0)


def memory_of(device: torch.device) -> DeviceMemory:
    assert device == DEVICE
    return memory_of_device


@contextmanager
def pretended_device(memory: float = 16 * 2**30) -> Iterator[torch.device]:
    """See above.

    Args:
        memory: bytes of the device. Those of temporary tensors inside of an operation are not counted.
    """
    global memory_of_device
    memory_of_device = DeviceMemory(memory)
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        with _Operations(), _Functions():
            run(thread)

    with ExitStack() as stack:
        stack.enter_context(patch.object(threading.Thread, "run", watched))
        stack.enter_context(patch("torch.Generator", _Generator))
        for name, value in {
            # As by torch's allocator, an eighth is reserved although no tensor uses it.
            "mem_get_info": lambda device=None: (memory - memory_of_device.used - memory / 8, memory),
            "memory_reserved": lambda device=None: memory_of_device.used + memory / 8,
            "memory_allocated": lambda device=None: memory_of_device.used,
        }.items():
            stack.enter_context(patch.object(torch.xpu, name, value))
        stack.enter_context(_Operations())
        stack.enter_context(_Functions())
        yield DEVICE


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage below the wrappers of `vmap`, `jvp` and `vjp`; sparse tensors have none."""
    return torch.func.debug_unwrap(tensor).untyped_storage() if tensor.layout == torch.strided else None


def _mark(tensor: Tensor) -> str | None:
    storage = _storage(tensor)
    return ANYWHERE if storage is None else getattr(storage, "mark", None)


def _put(tensor: Tensor, mark: str) -> None:
    if (storage := _storage(tensor)) is not None:
        if mark == ON_DEVICE and getattr(storage, "mark", None) != mark:
            memory_of_device.take(storage)
        storage.mark = mark  # pyright: ignore[reportAttributeAccessIssue]


def _is_on_device(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and _mark(tensor) == ON_DEVICE


def _is_device(device: object) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device).type == DEVICE.type


def _tensors(*tree: Any) -> list[Tensor]:
    # Arguments are tensors, numbers, lists and dictionaries of these: torch's `tree_leaves` takes five times as long.
    found: list[Tensor] = []
    for item in tree:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += _tensors(*item)
        elif isinstance(item, dict):
            found += _tensors(*item.values())
    return found


class _Operations(TorchDispatchMode):
    """Compares where the operands of each operation are, and marks its results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name(), kwargs or {}
        marks = {_mark(tensor) for tensor in _tensors(args, kwargs)}
        if {ON_DEVICE, None} <= marks and not name.startswith(BETWEEN_DEVICES):
            self._check(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name.startswith(("aten::copy_", "aten::set_")):
            return result
        if (device := made_on.get()) is not None:
            mark = ON_DEVICE if device == DEVICE else None
        else:
            mark = ON_DEVICE if ON_DEVICE in marks else None if None in marks else ANYWHERE
        for tensor in _tensors(result):
            if mark is not None and not _is_on_device(tensor):
                _put(tensor, mark)
        return result

    @staticmethod
    def _check(func: Any, name: str, args: Any, kwargs: Any) -> None:
        indexing = name.startswith(INDEXING)
        in_place = name.split(".")[0].endswith("_")
        others = [tensor for tensor in _tensors(args[1:]) if _is_on_device(tensor)]
        into_cpu = isinstance(args[0], Tensor) and _mark(args[0]) is None
        if into_cpu and (any(tensor.dim() for tensor in others) if indexing else in_place):
            raise RuntimeError(f"{name}: the first tensor is on cpu, but others are on {DEVICE}.")
        pointwise = torch.Tag.pointwise in func.tags and not name.replace("_.", ".").startswith(TAKES_NO_NUMBERS)
        takes_numbers = pointwise or indexing or name.startswith(TAKES_NUMBERS)
        for tensor in _tensors(args[2:] if indexing else args, kwargs):
            if _mark(tensor) is None and not (takes_numbers and tensor.dim() == 0):
                raise RuntimeError(f"{name}: a tensor of shape {list(tensor.shape)} is on cpu, others are on {DEVICE}.")


class _Functions(TorchFunctionMode):
    """Answers what Python code asks for devices, moves tensors, and makes them where `device=` says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAME_EVERYWHERE:
            return func(*args)
        kwargs = dict(kwargs or {})
        if others := [kind for kind in types if not issubclass(kind, Tensor)]:  # such as a LinearOperator
            with self:
                return others[0].__torch_function__(func, types, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on_device, device = _is_on_device(first), kwargs.get("device")
        if func == ASKS_DEVICE:
            return DEVICE if on_device else func(first)
        if func in (ASKS_CPU, ASKS_XPU):
            return on_device == (func == ASKS_XPU)
        if on_device and func in (Tensor.get_device, Tensor.type) and len(args) == 1 and not kwargs:
            return DEVICE.index if func is Tensor.get_device else func(first).replace("torch", "torch.xpu")
        if on_device and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"can't convert a tensor on {DEVICE} to numpy. Use Tensor.cpu() first.")
        if func in MOVES or (func in FROM_DATA and first is not None and device is not None):
            return _moved(func, args, kwargs)
        tensors = _tensors(args, kwargs)
        there = any(map(_is_on_device, tensors)) if device is None else _is_device(device)
        generator = kwargs.get("generator")
        if generator is not None and getattr(generator, "pretended", False) != there:
            raise RuntimeError(f"{func.__name__}: the generator is not on the device of the tensor.")
        if device is not None:
            return _made(func, args, {**kwargs, "device": CPU if there else device}, there)
        if func in MADE_ANEW or not tensors:  # `torch.tensor` of a list is on the CPU, also of numbers of the device
            return _made(func, args, kwargs, on_device)
        for number in (tensor for tensor in tensors if there and tensor.dim() == 0 and not _is_on_device(tensor)):
            _send_gradients(number, there=False)
        return func(*args, **kwargs)


def _made(func: Any, args: Any, kwargs: Any, there: bool) -> Any:
    """The result of a function that makes a tensor, on the device or else on the CPU."""
    token = made_on.set(DEVICE if there else CPU)
    try:
        result = func(*args, **kwargs)
    finally:
        made_on.reset(token)
    if there and isinstance(result, Tensor):
        _put(result, ON_DEVICE)
    return result


def _moved(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`tensor.to(...)` and its kin: a copy if the device changes."""
    tensor, *rest = args
    device = kwargs.get("device", MOVES.get(func))
    if rest and isinstance(rest[0], Tensor):
        rest = [DEVICE if _is_on_device(rest[0]) else CPU, rest[0].dtype]
    if rest and isinstance(rest[0], torch.device | str):
        device = rest[0]
    rest = [value for value in rest if isinstance(value, torch.dtype)]
    kwargs = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format", "copy")}
    there = _is_on_device(tensor) if device is None else _is_device(device)
    if there == _is_on_device(tensor):
        return Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
    moved = _made(Tensor.to, (tensor, *rest), {**kwargs, "copy": True}, there)
    _send_gradients(moved, there=not there)
    return moved


def _send_gradients(tensor: Tensor, there: bool) -> None:
    """Gradients of a copy go back to the device that it is from."""

    def sent(gradient: Tensor) -> Tensor:
        copied = _made(Tensor.clone, (gradient,), {}, there)
        _send_gradients(copied, there=not there)  # second derivatives go the same way
        return copied

    if tensor.requires_grad and torch.func.debug_unwrap(tensor) is tensor:
        tensor.register_hook(sent)


_TorchGenerator = torch.Generator


class _InstancesOfTorch(type(_TorchGenerator)):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchGenerator)


class _Generator(_TorchGenerator, metaclass=_InstancesOfTorch):
    """Replaces `torch.Generator`; it can be on the pretended device."""

    pretended: bool

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls, CPU if _is_device(device) else device)
        made.pretended = _is_device(device)
        return made
