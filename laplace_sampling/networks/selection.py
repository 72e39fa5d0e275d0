"""Which parameters of a network are random: names, globs, a predicate, or all that are trained."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["Selection", "select"]

Selection = Sequence[str] | str | Callable[[str, nn.Parameter], bool] | None


def select(module: nn.Module, selection: Selection) -> list[str]:
    """Names of the random weights, in the order of `module.named_parameters()`."""
    parameters = dict(module.named_parameters())
    if selection is None:
        names = [name for name, p in parameters.items() if p.requires_grad and p.is_floating_point()]
        fixed = [name for name, p in parameters.items() if not p.is_floating_point()]
        if fixed:
            warnings.warn(
                f"Parameters {fixed} are not floating point: they are left out and stay as they are.", stacklevel=4
            )
        if not names:
            raise ValueError(
                "No parameter of the model requires a gradient, so none is random. "
                f"{_quantised(module) or 'Name some with `parameters=[...]`, or call `requires_grad_(True)` on them.'}"
            )
    elif callable(selection):
        names = [name for name, p in parameters.items() if selection(name, p)]
    else:
        patterns = [selection] if isinstance(selection, str) else selection
        if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
            found = type(patterns).__name__
            if isinstance(patterns, Sequence):
                found += f" of {', '.join(sorted({type(pattern).__name__ for pattern in patterns}))}"
            raise TypeError(
                f"`parameters` takes names, globs, a predicate `(name, parameter) -> bool` or masks by name, but got a "
                f"{found}; the names are those of `model.named_parameters()`."
            )
        names = _matching(module, list(patterns))
    if not names:
        raise ValueError(f"`parameters` selects nothing; the model has {list(parameters)}.")
    wrong = [name for name in names if not parameters[name].is_floating_point()]
    if wrong:
        raise ValueError(f"Parameters {wrong} are not floating point; leave them out with `parameters=`.")
    return names


def _quantised(module: nn.Module) -> str:
    if any(True for _ in module.parameters()):
        return ""
    layers = sorted({type(m).__name__ for m in module.modules() if ".quantized" in type(m).__module__})
    return f"Its layers {layers} are quantised and have none: pass the model before it was quantised." if layers else ""


def _matching(module: nn.Module, patterns: list[str]) -> list[str]:
    """Names that match a pattern and none with a leading `"!"`; with these alone, of all that require a gradient.

    What is a name is no pattern. Tied weights have several names.
    """
    parameters = dict(module.named_parameters())
    first = {id(p): name for name, p in parameters.items()}
    names_of: dict[str, list[str]] = {name: [] for name in parameters}
    aliases: dict[str, list[str]] = {name: [] for name in parameters}
    for name, p in module.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        names_of[first[id(p)]].append(name)
        aliases[first[id(p)]] += [name, f"{type(module.get_submodule(owner)).__name__}.{own}"]
    exact = {name for names in names_of.values() for name in names}

    def matches(name: str, pattern: str) -> bool:
        pattern = pattern.removeprefix("!")
        if pattern in exact:
            return pattern in names_of[name]
        return any(fnmatchcase(alias, pattern) for alias in aliases[name])

    unknown = [pattern for pattern in patterns if not any(matches(name, pattern) for name in parameters)]
    if unknown:
        raise ValueError(f"`parameters={unknown}` match no parameter of the model; it has {list(parameters)}.")
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    if wanted or not patterns:
        names = [name for name in parameters if any(matches(name, pattern) for pattern in wanted)]
    else:
        names = [name for name, p in parameters.items() if p.requires_grad and p.is_floating_point()]
    return [name for name in names if not any(matches(name, p) for p in patterns if p.startswith("!"))]
