"""The table of priors that have a name; priors from names, and from the dictionaries that saved files hold."""

from dataclasses import asdict
from typing import Any

from laplace_sampling.arguments import refuse_class
from laplace_sampling.linear_model.priors.filterwise import FilterwisePrior
from laplace_sampling.linear_model.priors.prior import GPrior, IsotropicPrior, LayerwisePrior, Prior

# A new prior is a line here: users can then give its name, and saved files can hold it.
PRIORS: dict[str, type[Prior]] = {
    "filterwise": FilterwisePrior,
    "g-prior": GPrior,
    "isotropic": IsotropicPrior,
    "layerwise": LayerwisePrior,
}


def as_prior(prior: str | Prior) -> Prior:
    """The prior of a name, as `"g-prior"` or `"isotropic"`; a `Prior` is returned as it is."""
    if isinstance(prior, Prior):
        return prior
    refuse_class("prior", prior)
    if not isinstance(prior, str) or prior not in PRIORS:
        raise ValueError(f"`prior={prior!r}` is not known; use one of {list(PRIORS)} or a Prior.")
    return PRIORS[prior]()


def recipe_of_prior(prior: Prior) -> dict[str, Any]:
    """The class and the fields of a prior, in a form that JSON can hold."""
    return {"class": type(prior).__name__, **asdict(prior)}


def prior_from_recipe(recipe: dict[str, Any]) -> Prior:
    """The prior of a recipe.

    Raises:
        ValueError: if its class is not in the table.
    """
    fields = dict(recipe)
    class_name = fields.pop("class")
    classes = {prior.__name__: prior for prior in PRIORS.values()}
    if class_name not in classes:
        raise ValueError(f"`load`: the prior was a {class_name}, which is not of this library; give it as `prior=`.")
    return classes[class_name](**fields)
