"""Which weights are a layer's own, by its name."""

from collections.abc import Sequence

from torch import nn


def own_weights(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The floating-point weights of a part of a module itself, also those that it computes its weights from."""
    if "parametrizations" in name.split("."):
        return []
    part = module.get_submodule(name)
    weights = list(part.parameters(recurse=False))
    if nn.utils.parametrize.is_parametrized(part):
        weights += list(part.get_submodule("parametrizations").parameters())
    return [p for p in weights if p.is_floating_point()]


def linear_layer_of(module: nn.Module, names: list[str]) -> str | None:
    """The name of the linear layer inside a module of which weights are all, if they are those of one."""
    layer = names[0].rpartition(".")[0]
    part = module.get_submodule(layer)
    if not layer or type(part) is not nn.Linear or names_of(module, own_weights(module, layer)) != names:
        return None
    return layer


def has_matrix(module: nn.Module, name: str) -> bool:
    return any(weight.dim() > 1 for weight in own_weights(module, name))


def around(name: str) -> list[str]:
    """The names of the modules around a part, from outside, and its own."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def names_of(module: nn.Module, weights: Sequence[nn.Parameter]) -> list[str]:
    chosen = {id(p) for p in weights}
    return [name for name, p in module.named_parameters() if id(p) in chosen]
