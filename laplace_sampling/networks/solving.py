"""Settings that torch has once in a process: who changes them holds one lock, and puts them back.

While a network is differentiated, torch has a level of forward mode, a stance of its compiler and a precision of
products that hold for all threads. So one product runs at a time: others wait. The lock is held for one product and not
for a fit, so that the data of a fit may wait for threads that predict; it is held for a whole call only where the user
has lowered the precision of float32 products. Signals whose handlers raise, as Ctrl-C, wait until a product is done.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LOCK = threading.RLock()
# A process that is forked within another thread's product would have its settings for good.
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
# Ctrl-C, the end of a job, and a timeout. Not every system has the last.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]


class _Exclusive:
    """The context of a product: other threads wait, and so do signals, which Python handles in the main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Any] = {}
        self._received: list[int] = []

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._defer()
            self._depth += 1  # from here on no signal comes between
        LOCK.acquire()

    def __exit__(self, *error: object) -> None:
        LOCK.release()
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore()

    def _defer(self) -> None:
        """Keep signals for later; one that comes before that is done is raised, and all is as before."""
        try:
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._receive)
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Put the handlers back, and call those whose signals have come."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        received, self._received = self._received, []
        for number in received:
            handlers[number](number, None)


exclusive = _Exclusive()


# Precision ------------------------------------------------------------------------------------------------------------

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


def _is_lowered() -> bool:
    return any(value not in _FULL for value in precisions())


@contextmanager
def solving() -> Iterator[None]:
    """Float32 products without TF32 or bfloat16, and outside of inference mode.

    Solvers cannot orthogonalise by products of less precision, and tensors made in inference mode have no graph.
    """
    with _full_precision(), torch.inference_mode(False):
        yield


@contextmanager
def _full_precision() -> Iterator[None]:
    lowered = False
    try:
        with LOCK:  # no signals are set aside for it, as most calls have nothing to change
            change = _is_lowered()
        if change:
            with exclusive:
                # The setting is one for all threads: others wait until it is put back.
                if _is_lowered():
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
            return _eagerly(wrapper, *args, **kwargs)
        with solving():
            return call(*args, **kwargs)

    return wrapper


@_disable_dynamo
def _eagerly(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    return call(*args, **kwargs)


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
