"""Solvers and EM on digits, beside dense algebra."""

import functools
import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laplace_sampling.hyperparameters.em import fit_em
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, GPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import BlockKrylov
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Solution, Solver

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("digits")]

DEMO = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "demo.py"))


@dataclass(frozen=True)
class Problem:
    """The tangent model of a trained network, with its Jacobian in memory."""

    model: LinearModel
    layers: tuple[list[str], Tensor]

    def prior(self, precision: float) -> GaussianPrior:
        ggn = self.model.ggn(self.model.network_outputs)
        return GPrior(precision).build(ggn, self.layers, Draws(1, 0).noise(10))


@functools.cache
def problem(num_train: int) -> Problem:
    data, _ = DEMO["digits"](num_train, 0.0)
    with torch.random.fork_rng():
        network = Linearisation(DEMO["trained"](data, 60))
    x, y = data.tensors
    features = DenseFeatures(torch.cat([network.jacobian(part) for part in x.split(200)]))
    f = network(x)
    return Problem(LinearModel(features, torch.zeros_like(f), f, y, Categorical()), network.layers())


def sampled(solver: Solver, num_samples: int) -> tuple[Solution, float]:
    """Samples by a solver, and `‖Φ(ζ − ζ*)‖²_B / ‖Φζ*‖²_B` beside exact ones of the same draws."""
    p, draws = problem(1400), Draws(num_samples, 0)
    prior, ggn = p.prior(3.5), p.model.ggn(p.model.network_outputs)
    solution, exact = (sample_posterior(ggn, prior, draws, s) for s in (solver, Dense()))

    def norm(v: Tensor) -> float:
        v = v * prior.scale
        return float((v * ggn.matmul(v)).double().sum())

    return solution, norm(solution.value - exact.value.float()) / norm(exact.value.float())


@pytest.mark.nightly
def test_sgd_is_accurate_in_40_epochs_without_a_step_size() -> None:
    solution, error = sampled(SGD(epochs=40, finish_passes=0), 8)
    assert error <= 0.03
    # It is judged by a bound of the error, which is far larger.
    assert error <= float(solution.error.max()) <= 0.3


def test_64_samples_by_block_krylov() -> None:
    solution, error = sampled(BlockKrylov(), 64)
    assert error <= 1e-3
    assert error <= float(solution.error.max()) ** 2
    assert solution.passes + 32 <= 500


@pytest.mark.nightly
def test_em_ends_near_the_dense_fixed_point() -> None:
    p = problem(120)
    found = fit_em(p.model, p.prior(100.0), Draws(32, 0), SGD(), max_steps=8).prior.precision
    features, f = p.model.features, p.model.network_outputs.double()
    assert isinstance(features, DenseFeatures)
    model = replace(p.model, features=DenseFeatures(features.matrix.double()), offset=0 * f, network_outputs=f)
    prior = p.prior(float(found)).to(f.device, torch.float64)
    exact = fit_em(model, prior, Draws(1, 0), Dense(), max_steps=30, tolerance=3e-3)
    assert exact.converged
    assert float(found) == pytest.approx(float(exact.prior.precision), rel=0.05)
