"""How posteriors are found: each method is a frozen settings object with one interface, `Method`.

`Auto` chooses one; `Exact`, `Factored`, `Subset` and `Head` have closed forms, `Krylov`, `Stochastic` and `Dual` solve
linear systems. A new method is a class in a file of its own and a line in `METHODS`.
"""

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from laplace_sampling.arguments import refuse_class
from laplace_sampling.methods.closed_form import Exact, Factored, Head, Subset
from laplace_sampling.methods.method import Method
from laplace_sampling.methods.plan import Auto
from laplace_sampling.methods.solves import Dual, Krylov, Stochastic
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.svrg import SVRG

# What each string stands for.
METHODS: dict[str, Method] = {
    "auto": Auto(),
    "exact": Exact(),
    "krylov": Krylov(),
    "stochastic": Stochastic(),
    "dual": Dual(),
    "kfac": Factored(),
    "last_layer": Head(),
    "diagonal": Factored(kind="diagonal"),
    "subset": Subset(),
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
    return METHODS[method]


def _known() -> dict[str, type]:
    """The classes that a file may name: of methods, and of solvers in their settings."""
    return {kind.__name__: kind for kind in [*map(type, METHODS.values()), SGD, SVRG]}


def recipe_of_method(method: Method) -> dict[str, Any]:
    """The class and the settings of a method, as JSON; only the name of a class that is not in the table."""
    name = type(method).__name__
    return _recipe(method) if _known().get(name) is type(method) else {"class": name}


def method_from_recipe(recipe: dict[str, Any], otherwise: Method | None = None) -> Method:
    """The method of a `recipe_of_method`; another one in place of a class that is not in the table.

    Raises:
        ValueError: if it is not in the table, and there is nothing in its place.
    """
    if recipe["class"] in _known():
        return _setting(recipe)
    if otherwise is None:
        raise ValueError(
            f"`load`: the method was a {recipe['class']}, which is not of this library; give it as `method=`."
        )
    return otherwise


def _recipe(value: Any) -> Any:
    """A setting as JSON: a dataclass by its class and fields, a dtype by its name."""
    if is_dataclass(value):
        settings = {field.name: _recipe(getattr(value, field.name)) for field in fields(value) if field.compare}
        return {"class": type(value).__name__, **settings}
    return str(value) if isinstance(value, torch.dtype) else value


def _setting(value: Any) -> Any:
    """The setting of a `_recipe`."""
    if isinstance(value, dict):
        return _known()[value["class"]](**{name: _setting(part) for name, part in value.items() if name != "class"})
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value
