"""Gaussian priors of the weights.

- `Prior`: the interface; a new one is a file here and a line in the table of `as_prior.py`.
- `IsotropicPrior`, `LayerwisePrior`, `GPrior`: what users ask for.
- `GaussianPrior`: what `Prior.build` makes for a problem, and algorithms use.
- `as_prior`: from a name; `recipe_of_prior` and `prior_from_recipe`: to and from a JSON-able dictionary.

A function that has the name of its file is not listed: import it from the file.
"""

from laplace_sampling.linear_model.priors.as_prior import prior_from_recipe as prior_from_recipe
from laplace_sampling.linear_model.priors.as_prior import recipe_of_prior as recipe_of_prior
from laplace_sampling.linear_model.priors.prior import GaussianPrior as GaussianPrior
from laplace_sampling.linear_model.priors.prior import GPrior as GPrior
from laplace_sampling.linear_model.priors.prior import IsotropicPrior as IsotropicPrior
from laplace_sampling.linear_model.priors.prior import LayerwisePrior as LayerwisePrior
from laplace_sampling.linear_model.priors.prior import Prior as Prior
