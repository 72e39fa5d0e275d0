"""Random state of the user: training goes on after a fit, bit for bit, as it would have without one.

A shuffled loader draws from torch's global generator or from one of its own, and samplers draw from numpy's or
python's, or change lists of their own. So data are read by a copy of the loader's samplers (`private_loader`) and in
global states of their own (`PrivateRandomness`).
"""

import copy
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader


def private_loader(loader: DataLoader) -> DataLoader:
    """A loader of the same dataset whose samplers, generator and workers are its own."""
    own, memo = copy.copy(loader), {id(loader.dataset): loader.dataset}
    if "base_dataloader" in vars(loader):  # a loader of Accelerate, which asks the one inside for all that it has not
        vars(own)["base_dataloader"] = private_loader(vars(loader)["base_dataloader"])
        return own
    # Workers of the user's that persist would go on from where these passes end.
    own._iterator = None
    # Set past `DataLoader.__setattr__`, which forbids it; with one memo, so that they still share what they share.
    vars(own).update({n: copy.deepcopy(vars(loader)[n], memo) for n in ("generator", "sampler", "batch_sampler")})
    return own


class PrivateRandomness:
    """Global random states that begin as the user's, and go on from one use to the next.

    Several threads may borrow the user's state at the same time: the first one keeps it, and the last one puts it back.
    """

    _lock = threading.Lock()
    _of_user: ClassVar[list[tuple[Any, ...]]] = []  # once for each thread that borrows it

    def __init__(self) -> None:
        self._own: tuple[Any, ...] | None = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside, what is drawn goes on from the last use; at the end the user's state is put back."""
        with self._lock:
            self._of_user.append(self._of_user[0] if self._of_user else _states())
        try:
            # A stream that was half read goes on with the state in which it stopped.
            if self._own is not None:
                _set_states(self._own)
            try:
                yield
            finally:
                self._own = _states()
        finally:
            with self._lock:
                states = self._of_user.pop()
                if not self._of_user:
                    _set_states(states)


def _states() -> tuple[Any, ...]:
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), of_cuda, np.random.get_state(), random.getstate()  # noqa: NPY002 it is the user's


def _set_states(states: tuple[Any, ...]) -> None:
    of_torch, of_cuda, of_numpy, of_python = states
    torch.set_rng_state(of_torch)
    if of_cuda is not None:
        torch.cuda.set_rng_state_all(of_cuda)
    np.random.set_state(of_numpy)  # noqa: NPY002
    random.setstate(of_python)
