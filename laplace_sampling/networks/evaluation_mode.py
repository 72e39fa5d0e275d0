"""`evaluation_mode`: a module in evaluation mode, which is put back as it was, whatever its forward pass changed."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from laplace_sampling.networks.held_module import HeldModule
from laplace_sampling.networks.undisturbed import undisturbed


def _eager() -> AbstractContextManager[Any]:
    """For parts that the user has compiled; the compiler takes a second to import, and each change of it 30 µs."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def evaluation_mode(held: HeldModule) -> Iterator[None]:
    """Evaluation mode in every submodule; modes, parameters, buffers and attributes are restored at the end.

    Other threads and signals wait, see `undisturbed`.
    """
    with undisturbed:
        state = held.state()
        # A forward pass may write to buffers, as counters and caches do.
        values = [(b, b._version, b.detach().clone()) for b in state.buffers]
        try:
            # The attribute is set, since modules that override `train` would not be restored by `eval()` and `train()`.
            for part in state.training:
                part.training = False
            with _eager(), nullcontext() if held.shards is None else held.shards.opened():
                yield
        finally:
            for part in state.training:
                part.training = True
            # Hooks of weight normalisation leave differentiated weights behind as attributes, and `functional_call`
            # leaves plain tensors in a module that is registered under two names.
            if not state.is_restored():
                state.restore()
            if any(buffer._version != version for buffer, version, _ in values):
                with torch.no_grad():
                    for buffer, version, value in values:
                        if buffer._version != version:
                            buffer.copy_(value)
