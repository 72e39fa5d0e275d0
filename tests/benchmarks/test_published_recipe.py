from dataclasses import replace

import pytest
import torch
from cases import make_case
from torch.testing import assert_close

from benchmarks.solvers.published_recipe import AveragingSGD, SubsampledNoise
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.sgd import SGD


@pytest.fixture
def problem() -> tuple[LinearModel, GaussianPrior]:
    model = make_case("classification_many_data").linear_model()
    model = replace(model, features=DenseFeatures.of(model.features))
    ggn, noise = model.ggn(model.network_outputs), Draws(1, 0).noise(model.features.num_outputs)
    return model, IsotropicPrior().build(ggn, ([], torch.zeros(0)), noise)


@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize("subsampled", [False, True])
def test_every_variant_converges_to_the_samples_of_dense_algebra(problem, averaging: bool, subsampled: bool) -> None:
    model, prior = problem
    ggn, draws = model.ggn(model.network_outputs), Draws(4, 0)
    kind = AveragingSGD if averaging else SGD
    solver = kind(min_steps=3000, batch_size=5 if averaging else 10, step=0.1, finish_passes=0)
    samples = sample_posterior(ggn, prior, draws, SubsampledNoise(solver, draws) if subsampled else solver).value
    exact = sample_posterior(ggn, prior, draws, Dense()).value
    assert float((samples - exact).norm() / exact.norm()) < 0.1


def test_averaging_ends_nearer_than_the_last_of_constant_steps(problem) -> None:
    model, prior = problem
    ggn, draws = model.ggn(model.network_outputs), Draws(4, 0)
    solver = AveragingSGD(min_steps=2000, batch_size=5, finish_passes=0)
    exact = sample_posterior(ggn, prior, draws, Dense()).value

    class LastIterate(AveragingSGD):
        _run = SGD._run

    averaged, last = (sample_posterior(ggn, prior, draws, s).value for s in (solver, LastIterate(**vars(solver))))
    assert float((averaged - exact).norm()) < 0.5 * float((last - exact).norm())


def test_on_all_data_both_objectives_are_the_same(problem) -> None:
    model, prior = problem
    ggn, draws = model.ggn(model.network_outputs), Draws(4, 0)
    solver = SGD(epochs=20, batch_size=25)
    both = [sample_posterior(ggn, prior, draws, s).value for s in (solver, SubsampledNoise(solver, draws))]
    assert_close(*both, rtol=1e-6, atol=1e-6)


def test_the_mode_is_found(problem) -> None:
    model, prior = problem
    mode = linear_model_mode(model, prior, AveragingSGD(min_steps=2000)).value
    assert_close(mode, linear_model_mode(model, prior, Dense()).value, rtol=0.02, atol=0.02)
