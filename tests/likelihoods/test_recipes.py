import json

import pytest
import torch

from laplace_sampling.likelihoods.as_likelihood import likelihood_from_recipe, recipe_of_likelihood
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.from_loss import from_loss
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson

LIKELIHOODS = [
    Gaussian(0.1),
    Gaussian(torch.tensor([0.1, 2.0]), learn=False),
    Categorical(class_dim=-1, ignore_index=9),
    Bernoulli(),
    Poisson(),
    HeteroscedasticGaussian(),
    MultiTask({"name": Categorical(2), "class": Gaussian(3.0, learn=False)}),
]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.name)
def test_a_likelihood_comes_back_from_its_recipe(likelihood: Likelihood) -> None:
    recipe = json.loads(json.dumps(recipe_of_likelihood(likelihood)))
    restored = likelihood_from_recipe(recipe)
    assert type(restored) is type(likelihood)
    assert recipe_of_likelihood(restored) == recipe
    assert restored.settings() == likelihood.settings()


def test_a_likelihood_of_another_class_is_refused() -> None:
    recipe = recipe_of_likelihood(from_loss(lambda f, y: f.sum() ** 2, "own"))
    assert recipe == {"name": "own", "class": "LossLikelihood"}
    with pytest.raises(ValueError, match="LossLikelihood"):
        likelihood_from_recipe(recipe)
