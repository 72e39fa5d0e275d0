"""Likelihoods as dictionaries that JSON can hold, and back: what a saved file keeps of them."""

from collections.abc import Mapping
from typing import Any

from laplace_sampling.likelihoods.as_likelihood import LIKELIHOODS
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask


def recipe_of_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """The name and the class of a likelihood, and its settings if the class is one of this library's."""
    recipe = {"name": likelihood.name, "class": type(likelihood).__name__}
    if type(likelihood) not in (*LIKELIHOODS.values(), MultiTask):
        return recipe
    return {**recipe, **{name: _encoded(value) for name, value in likelihood.settings().items()}}


def likelihood_from_recipe(recipe: dict[str, Any]) -> Likelihood:
    """The likelihood of a recipe.

    Raises:
        ValueError: if its class is not one of this library's.
    """
    settings = dict(recipe)
    name, class_name = settings.pop("name"), settings.pop("class")
    # `MultiTask` is not in the table: users give a dictionary in place of its name.
    classes = {known.__name__: known for known in (*LIKELIHOODS.values(), MultiTask)}
    if class_name not in classes:
        raise ValueError(
            f"`load`: the likelihood {name!r} was a {class_name}, which the file does not hold; give it as "
            "`likelihood=`."
        )
    return classes[class_name](**{key: _decoded(value) for key, value in settings.items()})


def _encoded(value: Any) -> Any:
    if isinstance(value, Likelihood):
        return recipe_of_likelihood(value)
    return {name: _encoded(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if {"name", "class"} <= set(value) and isinstance(value["class"], str):  # heads may have these names
        return likelihood_from_recipe(dict(value))
    return {name: _decoded(part) for name, part in value.items()}
