"""How posteriors are found: each method is one file with a frozen settings object and one interface, `Method`.

`Auto` chooses one; `Exact`, `Krylov`, `Stochastic`, `Dual`, `Factored`, `Subset` and `Head` fit. A new method is a
file here and a line in `METHODS`.
"""

from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import torch

from laplace_sampling.methods.method import Method
from laplace_sampling.solvers.checks import refuse_class
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.svrg import SVRG

__all__ = ["METHODS", "as_method", "method_from_recipe", "recipe_of_method"]

# What each string stands for: a file, the class in it, and settings. Files are imported when they are used.
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": ("auto", "Auto", {}),
    "exact": ("exact", "Exact", {}),
    "krylov": ("krylov", "Krylov", {}),
    "stochastic": ("stochastic", "Stochastic", {}),
    "dual": ("dual", "Dual", {}),
    "kfac": ("factored", "Factored", {"kind": "kfac"}),
    "last_layer": ("head", "Head", {}),
    "diagonal": ("factored", "Factored", {"kind": "diagonal"}),
    "subset": ("subset", "Subset", {}),
}


def as_method(method: str | Method) -> Method:
    """The method of a name, with its defaults; a `Method` is returned as it is."""
    if isinstance(method, Method):
        return method
    refuse_class("method", method)
    if isinstance(method, SGD | SVRG):
        raise TypeError(
            f"`method` is a solver; give it to a method, as `Stochastic(solver={type(method).__name__}(...))`."
        )
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"`method={method!r}` is not known; use one of {list(METHODS)} or a Method.")
    file, name, settings = METHODS[method]
    return _class_of(f"{__name__}.{file}.{name}")(**settings)


def recipe_of_method(method: Method) -> dict[str, Any]:
    """The class and the settings of a method, as JSON; only the name of a class that is not in the table."""
    if _is_own(method):
        return _recipe(method)
    return {"class": type(method).__name__}


def method_from_recipe(recipe: dict[str, Any], otherwise: Method | None = None) -> Method:
    """The method of a `recipe_of_method`.

    Args:
        recipe: from there.
        otherwise: in place of one that is not in the table.

    Raises:
        ValueError: if it is not in the table, and there is nothing in its place.
    """
    if "." in recipe["class"]:
        return _setting(recipe)
    if otherwise is None:
        raise ValueError(
            f"`load`: the method was a {recipe['class']}, which is not of this library; give it as `method=`."
        )
    return otherwise


def _is_own(method: Method) -> bool:
    return any(type(method) is _class_of(f"{__name__}.{file}.{name}") for file, name, _ in METHODS.values())


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _recipe(value: Any) -> Any:
    """A setting as JSON: a dataclass by its class and fields, a dtype by its name."""
    if is_dataclass(value):
        settings = {field.name: _recipe(getattr(value, field.name)) for field in fields(value) if field.compare}
        return {"class": _path_of(type(value)), **settings}
    return str(value) if isinstance(value, torch.dtype) else value


def _path_of(kind: type) -> str:
    """Where a class is: that of a method by the table, so that a file holds what the table says."""
    for file, name, _ in METHODS.values():
        if _class_of(f"{__name__}.{file}.{name}") is kind:
            return f"{__name__}.{file}.{name}"
    return f"{kind.__module__}.{kind.__name__}"


def _setting(value: Any) -> Any:
    """The setting of a `_recipe`."""
    if isinstance(value, dict):
        if not value["class"].startswith(f"{__name__.partition('.')[0]}."):
            raise ValueError(f"`load`: {value['class']} is not of this library; give the method as `method=`.")
        return _class_of(value["class"])(**{name: _setting(part) for name, part in value.items() if name != "class"})
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value
