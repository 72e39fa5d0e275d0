"""Gaussian priors of the weights.

- `prior`: `Prior`, the interface; `IsotropicPrior`, `LayerwisePrior`, `GPrior`, what users ask for; `GaussianPrior`,
  what `Prior.build` makes for a problem, and algorithms use.
- `filterwise`: `FilterwisePrior`, whose coordinates are no weights.
- `as_prior`: from a name; `recipe_of_prior` and `prior_from_recipe`: to and from a JSON-able dictionary. A new prior is
  a file here and a line in its table.
"""
