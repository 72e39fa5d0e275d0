"""Costly functions whose results somebody may keep; they, and the solvers that call them, know nothing of files.

A fit is deterministic: from the results of its costly functions all the rest follows, bit for bit, by the same code. So
whoever keeps these can repeat a fit up to any point at little cost. Such a function is a sum over all data or a
decomposition: much work, few numbers. It is a function of its arguments, and changes nothing else that matters later.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Recorder(Protocol):
    """Keeps results."""

    def result(self, name: str, arguments: Sequence[Any], compute: Callable[[], Result]) -> Result:
        """The result of a call: one that is known, or what is computed now.

        Args:
            name: of the function.
            arguments: the arguments of the call, which distinguish it from others.
            compute: gives tensors, numbers, `None`, or tuples and lists of these.
        """
        ...


# Of each thread its own: predictions in other threads are no part of a fit.
_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, `recorder` keeps the results of recorded functions."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def stop_recording() -> None:
    """Until the end of `recording`: for what goes on otherwise than a call without an interrupt would."""
    _RECORDER.set(None)


def unrecorded(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """A call of what is no part of a fit, such as a function of the user."""
    token = _RECORDER.set(None)
    try:
        return function(*args, **kwargs)
    finally:
        _RECORDER.reset(token)


def recorded(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function whose results are kept inside of `recording`; those that it calls itself are a part of it."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        recorder = _RECORDER.get()
        if recorder is None:
            return function(*args, **kwargs)
        result = partial(function, *args, **kwargs)
        return unrecorded(recorder.result, name, (*args, *kwargs.values()), result)

    return wrapper
