"""`evaluation_mode`: a module in evaluation mode, which is put back as it was, whatever its forward pass changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling.networks.undisturbed import undisturbed

__all__ = ["COMMON_ATTRIBUTES", "evaluation_mode"]

# Attributes that every module has; others are its user's.
COMMON_ATTRIBUTES = frozenset(nn.Module().__dict__)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode in every submodule; modes, parameters, buffers and attributes are restored at the end.

    Other threads and signals wait, see `undisturbed`.
    """
    with undisturbed:
        states = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in module.modules()]
        containers = [(value, value.copy()) for _, attributes, *_ in states for value in _containers(attributes)]
        # A forward pass may write to buffers, as counters and caches do.
        buffers = [b for *_, of_module in states for b in of_module.values() if b is not None]
        values = [(b, b._version, b.detach().clone()) for b in buffers]
        try:
            # The attribute is set, since modules that override `train` would not be restored by `eval()` and `train()`.
            for m, *_ in states:
                if m.training:
                    m.training = False
            with torch.compiler.set_stance("force_eager"):  # for parts that the user has compiled
                yield
        finally:
            for state in states:
                _restore_module(*state)
            for container, copied in containers:
                _restore_container(container, copied)
            with torch.no_grad():
                for buffer, version, value in values:
                    if buffer._version != version:
                        buffer.copy_(value)


def _containers(attributes: dict[str, Any]) -> list[Any]:
    """The lists, dictionaries and sets among the attributes of a module that are not those of every module."""
    own = attributes.keys() - COMMON_ATTRIBUTES
    return [attributes[name] for name in own if type(attributes[name]) in (list, dict, set)]


def _restore_module(
    module: nn.Module,
    attributes: dict[str, Any],
    parameters: dict[str, nn.Parameter | None],
    buffers: dict[str, Tensor | None],
) -> None:
    # Hooks of weight normalisation leave differentiated weights behind as attributes, and `functional_call` leaves
    # plain tensors in a module that is registered under two names.
    if not _same_objects(module.__dict__, attributes):  # a dictionary that was filled anew is slower
        module.__dict__.clear()
        module.__dict__.update(attributes)
    if any(module._parameters.get(name) is not p for name, p in parameters.items()):
        module._parameters.update(parameters)
    if any(module._buffers.get(name) is not b for name, b in buffers.items()):
        module._buffers.update(buffers)


def _restore_container(container: Any, copied: Any) -> None:
    if isinstance(container, list):
        container[:] = copied
    else:
        container.clear()
        container.update(copied)


def _same_objects(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same objects in the same order."""
    same = len(now) == len(before) and all(map(is_, now, before))
    return same and all(map(is_, now.values(), before.values()))
