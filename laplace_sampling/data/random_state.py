"""Random state that users have: what a fit draws from a loader is put back, so that training goes on as without it.

A shuffled loader draws from torch's global generator or one of its own, samplers may draw from numpy's or python's, or
change lists of their own. `BorrowedRandomness` finds these and swaps their states: the data are read in a random state
of their own, which begins as the user's, and the user's is put back after each reading.
"""

import inspect
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["BorrowedRandomness"]

# Containers with more entries hold data, and how deep generators are looked for: definitions. Samplers inside of
# samplers are two or three deep.
_FEW, _DEPTH = 100, 8

# Puts a state back.
Restore = Callable[[], object]


class BorrowedRandomness:
    """The random state of a process and of the objects that a loader draws from.

    Args:
        loader: whose samplers, dataset and functions are searched for generators.
    """

    def __init__(self, loader: Any) -> None:
        self._found = list(_reachable(loader))
        self._own: list[Restore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # In another process, or a copy, these are not the user's.
        return {"_found": [], "_own": None}

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, what is drawn goes on from where the last use stopped; at the end the user's state is put back."""
        with _GLOBALS:
            users = self._snapshot()
            # A stream that was half read goes on with the state in which it stopped.
            for restore in self._own or []:
                restore()
            try:
                yield
            finally:
                self._own = [*_global_states(), *self._snapshot()]
                for restore in users:
                    restore()

    def _snapshot(self) -> list[Restore]:
        return [restore for thing in self._found for restore in _states_of(thing)]


class _Globals:
    """The generators of the process, which threads may borrow at the same time: the last one puts them back."""

    def __init__(self) -> None:
        self.lock, self.borrowers = threading.Lock(), 0
        self.users: list[Restore] = []

    def __enter__(self) -> None:
        with self.lock:
            if self.borrowers == 0:
                self.users = list(_global_states())
            self.borrowers += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.borrowers -= 1
            if self.borrowers == 0:
                for restore in self.users:
                    restore()


_GLOBALS = _Globals()


def _global_states() -> Iterator[Restore]:
    yield partial(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    yield partial(np.random.set_state, np.random.get_state())  # noqa: NPY002 it is the user's
    yield partial(random.setstate, random.getstate())


def _states_of(thing: Any) -> Iterator[Restore]:
    """What puts a generator, or the attributes of a sampler and what is in them, back."""
    if isinstance(thing, torch.Generator):
        yield partial(thing.set_state, thing.get_state())
    elif isinstance(thing, random.Random):
        yield partial(thing.setstate, thing.getstate())
    elif isinstance(thing, np.random.RandomState):
        yield partial(thing.set_state, thing.get_state())
    elif isinstance(thing, np.random.Generator):
        yield partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    else:
        yield partial(_put_back, thing, dict(vars(thing)), _copies(thing))


def _copies(thing: Any) -> list[tuple[Any, Any]]:
    """The lists and arrays of an object, and copies: some samplers shuffle their own."""
    values = vars(thing).values()
    return [(value, value[:].copy()) for value in values if type(value) in (list, np.ndarray) and len(value)] + [
        (value, value.clone()) for value in values if type(value) is Tensor and value.dim()
    ]


def _put_back(thing: Any, attributes: dict[str, Any], copies: list[tuple[Any, Any]]) -> None:
    vars(thing).clear()
    vars(thing).update(attributes)
    for value, copy in copies:
        value[:] = copy


_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def _reachable(loader: Any) -> Iterator[Any]:
    """Generators, and objects that choose data, that a loader reaches by attributes, functions and small containers."""
    seen: set[int] = set()
    level, samplers = [loader], {id(getattr(loader, name, None)) for name in ("sampler", "batch_sampler")}
    for _ in range(_DEPTH):
        following = []
        for thing in level:
            if id(thing) in seen or isinstance(thing, type | ModuleType | nn.Module | str | bytes):
                continue
            seen.add(id(thing))
            if isinstance(thing, _GENERATORS):
                yield thing
                continue
            chooses = id(thing) in samplers and hasattr(thing, "__dict__")
            if chooses:
                yield thing
                # What a sampler holds may itself choose data.
                samplers |= {id(part) for part in vars(thing).values() if _may_choose(part)}
            following += _parts(thing)
        level = following


def _may_choose(part: Any) -> bool:
    return isinstance(part, Iterable) and hasattr(part, "__dict__") and not isinstance(part, Dataset | Tensor)


def _parts(thing: Any) -> Iterator[Any]:
    """What an object holds, or its functions use."""
    if isinstance(thing, Mapping):
        yield from thing.values() if len(thing) <= _FEW else ()
    elif isinstance(thing, list | tuple | set):
        yield from thing if len(thing) <= _FEW else ()
    elif isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif inspect.ismethod(thing):
        yield from (thing.__self__, thing.__func__)
    elif inspect.isfunction(thing):
        # Generators that are variables of the user's script, too.
        used = inspect.getclosurevars(thing)
        yield from (value for value in (*used.nonlocals.values(), *used.globals.values()) if not callable(value))
    elif not isinstance(thing, Tensor):
        yield from getattr(thing, "__dict__", {}).values()
        for name in ("__iter__", "__getitem__", "__call__"):
            method = getattr(type(thing), name, None)
            # Only the user's own functions: those of libraries take their generators as arguments.
            if inspect.isfunction(method) and not method.__module__.startswith("torch."):
                yield method
