"""A module that is held and never changed: what is inside its wrappers, its evaluation mode, where it failed."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["evaluation_mode", "unwrapped", "where"]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which share its weights.

    Raises:
        TypeError: if it is no module, or a scripted one, whose operations cannot be differentiated forwards.
    """
    while True:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"`Linearisation(module)` got a {type(module).__name__} of torch.jit, which has no Jacobian products. "
                "Pass the module that was scripted or traced."
            )
        if not isinstance(module, nn.Module):
            raise TypeError(f"`Linearisation(module)` needs a torch.nn.Module, but got {type(module).__name__}.")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]  # pyright: ignore
        else:
            _check_parts(module)
            return module


def _check_parts(module: nn.Module) -> None:
    """Raise for parts that cannot be differentiated, or whose weights change when they are called."""
    for name, part in module.named_modules():
        at = f"`{name}` of the model is" if name else "The model is"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{at} a {type(part).__name__} of torch.jit, which has no Jacobian products. Put the module that was "
                "scripted or traced in its place."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{at} an `nn.{type(part).__name__}(max_norm=...)`, which changes its weights in the forward pass. "
                "Renormalise them once, and set `max_norm` to None."
            )
        for kind, p in [*part._parameters.items(), *part._buffers.items()]:
            if p is None:
                continue
            if is_lazy(p):
                raise ValueError(
                    f"{at} a {type(part).__name__} without weights as yet: run the model on a batch first."
                )
            if p.is_meta:
                raise ValueError(
                    f"`{kind}` of {name or 'the model'} is on the device 'meta', which holds no numbers: load its "
                    "weights first."
                )
            if p.is_inference():
                raise ValueError(
                    f"`{kind}` of {name or 'the model'} was made in `torch.inference_mode()`, so that torch does not "
                    "differentiate it: make or load the model outside of it, or pass `copy.deepcopy(model)`."
                )


# Attributes of every module, which are not its user's.
_OF_ALL = frozenset(nn.Module().__dict__)


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """The lists, dictionaries and sets among the attributes of a module, and copies of them."""
    found = [value for name, value in module.__dict__.items() if name not in _OF_ALL]
    return [(value, value.copy()) for value in found if type(value) in (list, dict, set)]


def _put_back(value: Any, before: Any) -> None:
    """The elements of a container that a forward pass may have written to."""
    if isinstance(value, list):
        value[:] = before
    else:
        value.clear()
        value.update(before)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode in every submodule; modes, parameters, buffers and attributes are put back to what they were."""
    saved = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    containers = [pair for m, *_ in saved for pair in _containers(m)]
    # A forward pass may write to buffers, as counters and caches do.
    held = [b for *_, buffers in saved for b in buffers.values() if b is not None]
    values = [(b, b._version, b.detach().clone()) for b in held]
    try:
        # The attribute, not `eval()`: modules that override `train` would not come back as they were.
        for m, *_ in saved:
            if m.training:
                m.training = False
        with torch.compiler.set_stance("force_eager"):  # for parts that are compiled
            yield
    finally:
        for m, attributes, parameters, buffers in saved:
            # Hooks of weight normalisation leave differentiated weights behind as attributes, and `functional_call`
            # plain tensors in a module that is registered under two names.
            if not _same(m.__dict__, attributes):  # a dictionary that was filled anew is slower
                m.__dict__.clear()
                m.__dict__.update(attributes)
            if any(m._parameters.get(name) is not p for name, p in parameters.items()):
                m._parameters.update(parameters)
            if any(m._buffers.get(name) is not b for name, b in buffers.items()):
                m._buffers.update(buffers)
        for pair in containers:
            _put_back(*pair)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)


def _same(found: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same objects in the same order."""
    same = len(found) == len(saved) and all(map(is_, found, saved))
    return same and all(map(is_, found.values(), saved.values()))


def where(error: BaseException, module: nn.Module) -> str:
    """What an error of a module, or of a copy of it, says, the innermost part that it came from, and the line there."""
    names: dict[int, str] = {}
    found, line = module, ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        owner, code = traceback.tb_frame.f_locals.get("self"), traceback.tb_frame.f_code
        if not names and isinstance(owner, type(module)):
            names = {id(m): name for name, m in owner.named_modules()}
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = owner
            # of the module's own code: torch does not name custom functions
            own = code.co_name not in ("_call_impl", "_wrapped_call_impl")
            line = linecache.getline(code.co_filename, traceback.tb_lineno).strip()[:80] if own else ""
        traceback = traceback.tb_next
    name = names.get(id(found), "")
    # torch explains at length what a user can do about `vmap`
    said = next(iter(str(error).strip().splitlines()), type(error).__name__).split(". ")[0].removesuffix(".")
    return f"{said} — in {f'`{name}`, ' if name else ''}a {type(found).__name__}{line and f': `{line}`'}"
