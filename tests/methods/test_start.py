"""The start of a fit from an earlier posterior."""

from functools import partial

import pytest
import torch
from problems import built, dense_model
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.sampling import draw, sample_posterior
from laplace_sampling.methods.problem import Start
from laplace_sampling.solvers.krylov import BlockKrylov

DRAWS = Draws(6, 1, Stream.SAMPLES)


def start_at(prior, samples=None) -> Start:
    return Start(prior, Gaussian(2.0), samples, DRAWS)


@pytest.mark.parametrize("recipe", ["isotropic", "g-prior"])
def test_of_the_same_problem_it_is_the_solution(recipe: str) -> None:
    model = dense_model("classification")
    prior, ggn = built(recipe, model, 0.7), model.ggn(model.network_outputs)
    solver = BlockKrylov(1e-6)
    sampled = draw(ggn, prior, DRAWS, solver, rows=100, dtype=torch.float64)
    solution = sample_posterior(ggn, prior, DRAWS, solver)
    delta = start_at(prior, sampled.samples).delta(DRAWS, prior)
    assert_close(delta, solution.delta, rtol=1e-6, atol=1e-8)
    # Only the product that shows it is left to make.
    init = partial(start_at(prior, sampled.samples).delta, prior=prior)
    again = draw(ggn, prior, DRAWS, solver, rows=4, dtype=torch.float64, init=init)
    assert again.passes == 6
    assert_close(again.samples, sampled.samples)


@pytest.mark.parametrize("recipe", ["isotropic", "g-prior"])
def test_what_data_do_not_determine_is_the_prior_sample_at_every_precision(recipe: str) -> None:
    model = dense_model("classification")
    old, new = built("isotropic", model, 0.7), built(recipe, model, 20.0)
    white = DRAWS.prior(len(old.scale)).double()
    prior_samples = white / old.diagonal().sqrt()
    delta = start_at(old, prior_samples).delta(DRAWS, new)
    assert_close(delta, torch.zeros_like(delta), rtol=0, atol=1e-12)


def test_other_draws_have_no_start() -> None:
    model = dense_model("classification")
    prior = built("isotropic", model, 1.0)
    start = start_at(prior, torch.zeros(6, len(prior.scale), dtype=torch.float64))
    assert start.delta(Draws(6, 1, Stream.SAMPLES + 1), prior) is None
    assert start.delta(Draws(6, 2, Stream.SAMPLES), prior) is None
    assert start.delta(Draws(8, 1, Stream.SAMPLES), prior) is None
    assert start_at(prior).delta(DRAWS, prior) is None
    assert start.delta(Draws(2, 1, Stream.SAMPLES, first=4), prior).shape == (2, len(prior.scale))


def test_the_noise_is_carried_over_where_it_is_learnt() -> None:
    start = start_at(built("isotropic", dense_model("classification"), 1.0))
    assert float(start.likelihood_from(Gaussian(5.0)).noise_precision) == 2.0
    assert float(start.likelihood_from(Gaussian(5.0, learn=False)).noise_precision) == 5.0


def test_an_error_of_a_warm_solve_is_bounded_in_the_norm_of_the_precision() -> None:
    """`‖e‖_H ≤ ‖r‖/√α`, which is `2ε ‖Φζ‖_B` where the bound of `function_error` is `ε`."""
    model = dense_model("classification")
    prior, ggn = built("isotropic", model, 0.3), model.ggn(model.network_outputs)
    generator = torch.Generator().manual_seed(0)
    exact = sample_posterior(ggn, prior, DRAWS, BlockKrylov(1e-10))
    init = exact.delta + 0.3 * torch.randn(exact.delta.shape, generator=generator, dtype=torch.float64)
    solution = sample_posterior(ggn, prior, DRAWS, BlockKrylov(0.1), init=init)
    error = solution.value - exact.value
    in_data = (error * ggn.matmul(error)).sum(1)
    squared = in_data + 0.3 * error.square().sum(1)
    energy = (solution.value * ggn.matmul(solution.value)).sum(1)
    assert bool((squared.sqrt() <= 2 * solution.error * energy.sqrt()).all())
    assert bool((in_data.sqrt() <= solution.error * energy.sqrt()).all())
    assert float(error.norm()) > 0
