"""Observation models `p(y | f)`: how targets scatter around the outputs of a network, one likelihood a file.

- `Likelihood`: the interface; a new one is a file here and a line in the table of `as_likelihood.py`.
- `Gaussian`, `Categorical`, `Bernoulli`, `Poisson`, `HeteroscedasticGaussian`: one for each kind of target.
- `MultiTask`: one for each head of a network; `Weighted`: data that count more than once or less.
- `from_loss`: a likelihood from any convex loss.
- `as_likelihood`: from a name such as `"regression"`; `recipe_of_likelihood` and `likelihood_from_recipe`: to and from
  a JSON-able dictionary.
- `Measurement`: linear measurements `y = T f(x) + noise`, which a `Gaussian` may carry.

A function that has the name of its file is not listed: import it from the file.
"""

from laplace_sampling.likelihoods.as_likelihood import likelihood_from_recipe as likelihood_from_recipe
from laplace_sampling.likelihoods.as_likelihood import recipe_of_likelihood as recipe_of_likelihood
from laplace_sampling.likelihoods.bernoulli import Bernoulli as Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical as Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian as Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian as HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood as Likelihood
from laplace_sampling.likelihoods.measurement import Measurement as Measurement
from laplace_sampling.likelihoods.multi_task import MultiTask as MultiTask
from laplace_sampling.likelihoods.poisson import Poisson as Poisson
from laplace_sampling.likelihoods.weighted import Weighted as Weighted
