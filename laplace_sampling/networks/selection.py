"""The module that is linearised, inside its wrappers, and which of its parameters are random."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from laplace_sampling.networks.sharded import MANAGED, is_dtensor, reshard

Selection = Sequence[str] | str | Callable[[str, nn.Parameter], bool] | None


def select(module: nn.Module, selection: Selection) -> list[str]:
    """Names of the random weights, in the order of `module.named_parameters()`.

    Raises:
        TypeError: for what is no selection.
        ValueError: if it selects nothing, names nothing, or takes weights that are not floating point.
    """
    parameters = dict(module.named_parameters())
    if selection is None:
        names = _trained(module)
    elif callable(selection):
        names = [name for name, p in parameters.items() if selection(name, p)]
    else:
        names = _matching(module, _patterns(selection))
    if not names:
        raise ValueError(f"`parameters` selects nothing; the model has {list(parameters)}.")
    fixed = [name for name in names if not _has_derivatives(parameters[name])]
    if fixed:
        raise ValueError(f"Parameters {fixed} are not floating point; leave them out with `parameters=`.")
    return names


def _trained(module: nn.Module) -> list[str]:
    names = _require_gradient(module)
    if not names:
        raise ValueError(
            "No parameter of the model requires a gradient, so none is random. Name some with `parameters=[...]`, or "
            "call `requires_grad_(True)` on them. A quantised layer has none: pass the model before it was quantised."
        )
    return names


def _require_gradient(module: nn.Module) -> list[str]:
    # Weights that were frozen in training are not at a mode of the loss in their own directions.
    return [name for name, p in module.named_parameters() if p.requires_grad and _has_derivatives(p)]


def _has_derivatives(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _patterns(selection: Sequence[str] | str) -> list[str]:
    patterns = [selection] if isinstance(selection, str) else selection
    if isinstance(patterns, Iterable) and all(isinstance(pattern, str) for pattern in patterns):
        return list(patterns)
    raise TypeError(
        f"`parameters` takes names, globs, a predicate `(name, parameter) -> bool` or masks by name, but got "
        f"a {type(patterns).__name__}; the names are those of `model.named_parameters()`."
    )


def _matching(module: nn.Module, patterns: list[str]) -> list[str]:
    """Names that match a pattern and none with a leading `"!"`; with these alone, of all that require a gradient."""
    parameters = dict(module.named_parameters())
    names_of, classes_of = _all_names(module)
    existing = {name for names in names_of.values() for name in names}

    def matches(name: str, pattern: str) -> bool:
        pattern = pattern.removeprefix("!")
        if pattern in existing:  # brackets in a name are no glob
            return pattern in names_of[name]
        return any(fnmatchcase(alias, pattern) for alias in (*names_of[name], *classes_of[name]))

    # A pattern with a misprint would otherwise select nothing without a word, or exclude nothing.
    unknown = [pattern for pattern in patterns if not any(matches(name, pattern) for name in parameters)]
    if unknown:
        raise ValueError(f"`parameters={unknown}` match no parameter of the model; it has {list(parameters)}.")
    included = [pattern for pattern in patterns if not pattern.startswith("!")]
    excluded = [pattern for pattern in patterns if pattern.startswith("!")]
    if included or not patterns:
        names = [name for name in parameters if any(matches(name, pattern) for pattern in included)]
    else:
        names = _require_gradient(module)
    return [name for name in names if not any(matches(name, pattern) for pattern in excluded)]


def _all_names(module: nn.Module) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The names of each parameter, of which tied weights have several, and `Class.name` of the modules that own it."""
    parameters = dict(module.named_parameters())
    # By identity: tied weights are one parameter, random once, under whichever of its names the user selects it.
    first_name = {id(p): name for name, p in parameters.items()}
    names_of: dict[str, list[str]] = {name: [] for name in parameters}
    classes_of: dict[str, list[str]] = {name: [] for name in parameters}
    for name, p in module.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        names_of[first_name[id(p)]].append(name)
        classes_of[first_name[id(p)]].append(f"{type(module.get_submodule(owner)).__name__}.{last}")
    return names_of, classes_of


# The module ---------------------------------------------------------------------------------------------------------


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which share its weights.

    Raises:
        TypeError: if it is no module, or a scripted one, whose operations cannot be differentiated forwards; if its
            weights are shared out over processes in another way than by `fully_shard`.
        ValueError: if a part of it has weights that cannot be differentiated, or that change when it is called.
    """
    while isinstance(module, nn.Module):
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules and not isinstance(module, torch.jit.ScriptModule):
            module = module._modules["_orig_mod"]  # pyright: ignore
        else:
            reshard(module)
            for name, part in module.named_modules():
                _check_part(part, f"`{name}` of the model" if name else "The model")
            return module
    raise TypeError(f"`Linearisation(module)` needs a torch.nn.Module, but got {type(module).__name__}.")


def _check_part(part: nn.Module, subject: str) -> None:
    kind = type(part).__name__
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError(f"{subject} is a {kind} of torch.jit, which has no Jacobian products: pass its plain module.")
    if kind == "FullyShardedDataParallel":
        raise TypeError(
            f"{subject} is a {kind}, whose parameters are flattened: apply `fully_shard` to the model instead."
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise ValueError(
            f"{subject} is an `nn.{kind}(max_norm=...)`, which changes its weights in its forward: renormalise them "
            "once, and set `max_norm` to None."
        )
    for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
        if tensor is None:
            continue
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{subject} is a {kind} whose `{name}` holds no numbers, being "
                f"{'lazy: run the model on a batch' if is_lazy(tensor) else 'on `meta`: load its weights'} first."
            )
        if tensor.is_inference():
            raise ValueError(
                f"{subject} is a {kind} whose `{name}` was made in `torch.inference_mode()`: make or load the model "
                "outside of it, or pass `copy.deepcopy(model)`."
            )
        if is_dtensor(tensor) and not _is_shared_by_fsdp_alone(tensor, part):
            raise TypeError(
                f"{subject} is a {kind} whose `{name}` is shared out in another way than by `fully_shard` alone, as by "
                "`parallelize_module`: load the full weights into a model that is not parallelised."
            )


def _is_shared_by_fsdp_alone(tensor: Any, part: nn.Module) -> bool:
    *replicated, last = tensor.placements
    by_fsdp = getattr(part, MANAGED, False) and not getattr(part, "_distribute_module_applied", False)
    return by_fsdp and last.is_shard() and all(placement.is_replicate() for placement in replicated)
