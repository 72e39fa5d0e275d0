"""How posteriors are found: each method is one file with a frozen settings object and one interface, `Method`.

`Auto` chooses one; `Exact`, `Krylov`, `Stochastic`, `Dual`, `Factored` and `Contour` fit. A new method is a file here
and a line in `METHODS`.
"""

from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import torch

from laplace_sampling.methods.method import Method
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
    "diagonal": ("factored", "Factored", {"kind": "diagonal"}),
    "ciq": ("contour", "Contour", {}),
}


def as_method(method: str | Method) -> Method:
    """The method of a name, with its defaults; a `Method` is returned as it is."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"`method={method!r}` is not known; use one of {list(METHODS)} or a Method.")
    file, name, settings = METHODS[method]
    return getattr(import_module(f"{__name__}.{file}"), name)(**settings)


def recipe_of_method(method: Method) -> dict[str, Any]:
    """The class and the settings of a method, as JSON."""
    return _recipe(method)


def method_from_recipe(recipe: dict[str, Any]) -> Method:
    """The method of a `recipe_of_method`.

    Raises:
        ValueError: if it is not one of the library's own.
    """
    own = {name: file for file, name, _ in METHODS.values()}
    if recipe["class"] not in own:
        raise ValueError(
            f"`load`: the method was a {recipe['class']}, which is not of this library; give it as `method=`."
        )
    settings = {name: _setting(value) for name, value in recipe.items() if name != "class"}
    return getattr(import_module(f"{__name__}.{own[recipe['class']]}"), recipe["class"])(**settings)


def _recipe(settings: Any) -> Any:
    """Settings as JSON: a dataclass by its class and fields, a dtype by its name."""
    if is_dataclass(settings):
        values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.compare}
        return {"class": type(settings).__name__, **{name: _recipe(value) for name, value in values.items()}}
    return str(settings) if isinstance(settings, torch.dtype) else settings


def _setting(value: Any) -> Any:
    """The setting of a `_recipe`."""
    if isinstance(value, dict):
        solver = {"SGD": SGD, "SVRG": SVRG}[value["class"]]
        return solver(**{name: number for name, number in value.items() if name != "class"})
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value
