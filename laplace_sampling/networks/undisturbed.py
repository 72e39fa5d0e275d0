"""What keeps the computations of a thread undisturbed by other threads, by Ctrl-C, and by `torch.compile` around them.

While a network is differentiated, its module holds other weights and modes than its user gave it, and torch is in a
state of which it has only one in a process: the level of forward mode, the stance of the compiler, the warnings filter.

- Other threads wait, by one lock for the process. It is held for one product at a time, so that the user's data and
  callbacks may wait for threads that predict. It is held for a whole call only where the user has lowered the precision
  of float32 products, a setting of the process: data and callbacks must not wait for other threads then.
- Signals wait until a product is done, or until its next pass through the network; then the handler that the user has
  is called, which for Ctrl-C raises `KeyboardInterrupt`. Elsewhere they wait only while a context is entered or left.
- Code around a public call that is compiled is left for the call.
"""

import os
import signal
import threading

# The functions of `signal` look each handler up in an enumeration, which takes as long as a small layer.
from _signal import getsignal  # pyright: ignore[reportMissingImports]
from _signal import signal as set_handler  # pyright: ignore[reportMissingImports]
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

Result = TypeVar("Result")

# Held by the thread whose product, or reading of a module, others must not see.
LOCK = threading.RLock()

# A process that is forked within another thread's product would have its state for good.
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


# Signals --------------------------------------------------------------------------------------------------------------

# Those whose handlers raise: Ctrl-C, the end of a job, and a timeout. Not every system has the last.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]


class _Waiting:
    """Signals that wait. Python calls handlers in the main thread only, which is the only one that changes this."""

    def __init__(self) -> None:
        self.contexts = 0  # contexts of this file that the main thread is in
        self.products = 0  # those in which signals wait all the time
        self.received: list[int] = []
        self.handlers: dict[int, Any] = {}  # the user's

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals inside of contexts."""
        if self.products or _changes_a_context(frame):
            if number not in self.received:
                self.received.append(number)
        else:
            self.handlers[number](number, frame)

    def handle(self) -> None:
        """Calls the user's handlers of signals that were received, which may raise."""
        if self.received:
            number = self.received.pop(0)
            try:
                self.handlers[number](number, None)
            finally:
                self.handle()

    def enter(self) -> None:
        """To be called within an `__enter__`, where signals wait as soon as this is their handler."""
        self.contexts += 1
        if self.contexts == 1:
            try:
                for number in _SIGNALS:
                    handler = getsignal(number)
                    if callable(handler) and handler != self.receive:
                        self.handlers[number] = handler
                        set_handler(number, self.receive)
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        """To be called at the end of an `__exit__`."""
        self.contexts -= 1
        try:
            if self.contexts == 0:
                self._put_back(list(self.handlers))
        finally:
            if self.received and self.products == 0:
                self.handle()

    def _put_back(self, numbers: list[int]) -> None:
        if numbers:
            try:
                if getsignal(numbers[0]) == self.receive:
                    set_handler(numbers[0], self.handlers[numbers[0]])
            finally:  # also if a handler raises that was put back
                self._put_back(numbers[1:])


_waiting = _Waiting()


def _changes_a_context(frame: FrameType | None) -> bool:
    """Whether a context is entered or left: an exception would leave its state behind."""
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


# The thread that forks is the main one of the child.
_main_thread = threading.main_thread().ident


def _become_main_thread() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_main_thread)


def _in_main_thread() -> bool:
    return threading.get_ident() == _main_thread


def handle_signals() -> None:
    """Handles the signals that wait, where an exception does no harm: `KeyboardInterrupt` after Ctrl-C."""
    if _waiting.received and _in_main_thread():
        _waiting.handle()


class _SignalsWait:
    """The context in which signals wait while contexts inside of it are entered or left."""

    def __enter__(self) -> None:
        if _in_main_thread():
            _waiting.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _in_main_thread():
            _waiting.leave()


class _Undisturbed:
    """The context in which signals and other threads wait."""

    def __enter__(self) -> None:
        in_main_thread = _in_main_thread()
        if in_main_thread:
            _waiting.enter()
            # The main thread may have to wait for another one, and can be interrupted then.
            while not LOCK.acquire(timeout=0.1):
                if _waiting.received and not _waiting.products:
                    _waiting.leave()
                    return self.__enter__()
            _waiting.products += 1
        else:
            LOCK.acquire()
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        LOCK.release()
        if _in_main_thread():
            _waiting.products -= 1
            _waiting.leave()


signals_wait, undisturbed = _SignalsWait(), _Undisturbed()


# Compiled code --------------------------------------------------------------------------------------------------------


@_disable_dynamo
def _eagerly(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    return call(*args, **kwargs)


def outside_of_compiled_code(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """`call(*args, **kwargs)`, for which code that `torch.compile` compiles is left."""
    torch._dynamo.graph_break(
        msg="Calls of laplace_sampling are not compiled, since they differentiate the network themselves: call them "
        "outside of the compiled function, or compile it with `fullgraph=False`."
    )
    return _eagerly(call, *args, **kwargs)
