"""The table of likelihoods that have a name; likelihoods from what a user gives, and as dictionaries in files."""

from collections.abc import Mapping
from typing import Any

from laplace_sampling.arguments import refuse_class
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson

# A new likelihood is a line here: users can then give its name, and saved files can hold it.
LIKELIHOODS: dict[str, type[Likelihood]] = {
    "regression": Gaussian,
    "classification": Categorical,
    "binary": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}


def as_likelihood(likelihood: str | Likelihood | Mapping[str, str | Likelihood]) -> Likelihood:
    """The likelihood of a name, for instance `"regression"`; a `Likelihood` is returned as it is.

    Args:
        likelihood: a name, a likelihood, or a dictionary of these for the heads of a network.

    Raises:
        ValueError: for a name that is not in the table.
    """
    refuse_class("likelihood", likelihood)
    if isinstance(likelihood, Likelihood):
        if likelihood.quadratic and not isinstance(likelihood, Gaussian):
            raise TypeError(
                f"The likelihood {likelihood.name!r} sets `quadratic`, which is for subclasses of `Gaussian` only: "
                "derive it from that, or leave `quadratic` out; its curvature is used as it is."
            )
        return likelihood
    if isinstance(likelihood, Mapping):
        return MultiTask({head: as_likelihood(of_head) for head, of_head in likelihood.items()})
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        names = ", ".join(f'"{name}"' for name in LIKELIHOODS)
        raise ValueError(f"`likelihood={likelihood!r}` is not known; use {names} or a Likelihood.")
    return LIKELIHOODS[likelihood]()


def recipe_of_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """The name and the class of a likelihood, and its settings if the class is one of this library's."""
    recipe = {"name": likelihood.name, "class": type(likelihood).__name__}
    if isinstance(likelihood, MultiTask):
        return {**recipe, "heads": {name: recipe_of_likelihood(head) for name, head in likelihood.heads.items()}}
    return {**recipe, **likelihood.settings()} if type(likelihood) in LIKELIHOODS.values() else recipe


def likelihood_from_recipe(recipe: dict[str, Any]) -> Likelihood:
    """The likelihood of a recipe.

    Raises:
        ValueError: if its class is not one of this library's.
    """
    settings = dict(recipe)
    name, class_name = settings.pop("name"), settings.pop("class")
    if class_name == MultiTask.__name__:
        return MultiTask({head: likelihood_from_recipe(of_head) for head, of_head in settings["heads"].items()})
    classes = {known.__name__: known for known in LIKELIHOODS.values()}
    if class_name not in classes:
        raise ValueError(
            f"`load`: the likelihood {name!r} was a {class_name}, which the file does not hold; give it as "
            "`likelihood=`."
        )
    return classes[class_name](**settings)
