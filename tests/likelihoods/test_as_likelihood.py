import json

import pytest
import torch
from cases import make_case

from laplace_sampling import LinearisedLaplace, from_loss
from laplace_sampling.likelihoods.as_likelihood import (
    LIKELIHOODS,
    as_likelihood,
    likelihood_from_recipe,
    recipe_of_likelihood,
)
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson


def test_names_give_likelihoods() -> None:
    assert as_likelihood("regression") == Gaussian()
    assert as_likelihood("classification") == Categorical()
    assert as_likelihood("binary") == Bernoulli()
    own = Gaussian(2.0)
    assert as_likelihood(own) is own
    with pytest.raises(ValueError, match="student"):
        as_likelihood("student")


def test_a_dictionary_gives_a_likelihood_for_each_head() -> None:
    heads = {"value": Gaussian(2.0, learn=False), "count": "poisson"}
    assert as_likelihood(heads) == MultiTask({"value": Gaussian(2.0, learn=False), "count": Poisson()})
    with pytest.raises(ValueError, match="noise precision"):
        as_likelihood({"value": "regression"})
    with pytest.raises(TypeError, match="'count'"):
        MultiTask({"count": "poisson"})  # pyright: ignore[reportArgumentType]


class Doubled(Poisson):
    """A likelihood that the library does not have."""

    def settings(self) -> dict:
        return {}


def test_a_new_likelihood_is_a_line_in_the_table(monkeypatch) -> None:
    with pytest.raises(ValueError, match="Doubled"):
        likelihood_from_recipe(recipe_of_likelihood(Doubled()))
    monkeypatch.setitem(LIKELIHOODS, "doubled", Doubled)
    assert type(as_likelihood("doubled")) is Doubled
    assert type(likelihood_from_recipe(recipe_of_likelihood(Doubled()))) is Doubled
    case = make_case("poisson")
    la = LinearisedLaplace(case.model, "doubled", num_samples=2).fit([(case.x, case.y)], progress=False)
    assert la.predict(case.x).mean.shape == case.y.shape


def test_a_class_is_no_likelihood() -> None:
    with pytest.raises(TypeError, match="likelihood=Gaussian"):
        as_likelihood(Gaussian)  # pyright: ignore[reportArgumentType]


def test_only_a_gaussian_likelihood_is_quadratic() -> None:
    class Own(type(from_loss(lambda f, y: (f - y).square().sum()))):
        quadratic = True

    with pytest.raises(TypeError, match="quadratic"):
        as_likelihood(Own(lambda f, y: (f - y).square().sum()))


KNOWN = [
    Gaussian(0.1),
    Gaussian(torch.tensor([0.1, 2.0]), learn=False),
    Categorical(class_dim=-1, ignore_index=9),
    Bernoulli(),
    Poisson(),
    HeteroscedasticGaussian(),
    MultiTask({"name": Categorical(2), "class": Gaussian(3.0, learn=False)}),
]


@pytest.mark.parametrize("likelihood", KNOWN, ids=lambda likelihood: likelihood.name)
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
