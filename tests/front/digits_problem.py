"""The tangent model of a network for digits, with its Jacobian in memory, so that the dense reference is exact.

`SubsampledNoise` minimises the objective of Antorán et al. (2023), `L(ζ) = ½ ‖E − Φζ‖²_B + ½ ‖ζ − θ⁰‖²_A`, of which a
mini-batch sees its part of `E` only, in place of `L′`.
"""

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from laplace_sampling.hyperparameters.em import EMResult, fit_em
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, GPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver

DEMO = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "demo.py"))


@dataclass(frozen=True)
class Problem:
    """The tangent model of a trained network on digits, dense, and test features `[n, C, P]`."""

    model: LinearModel
    layers: tuple[list[str], Tensor]
    test_features: Tensor

    def prior(self, precision: float) -> GaussianPrior:
        f = self.model.network_outputs
        ggn = self.model.ggn(f)
        return GPrior(precision).build(ggn, self.layers, Draws(1, 0).noise(10))

    def ggn(self) -> GGN:
        return self.model.ggn(self.model.network_outputs)


def problem(num_train: int = 1400, noise: float = 0.0, num_test: int = 100) -> Problem:
    data, test_data = DEMO["digits"](num_train, noise)
    with torch.random.fork_rng():
        network = Linearisation(DEMO["trained"](data, 60))
    x, y = data.tensors
    features = DenseFeatures(torch.cat([network.jacobian(part) for part in x.split(200)]))
    f = network(x)
    model = LinearModel(features, torch.zeros_like(f), f, y, Categorical())
    return Problem(model, network.layers(), network.jacobian(test_data.tensors[0][:num_test]))


def exact(p: Problem, prior: GaussianPrior, draws: Draws) -> Tensor:
    """The samples that dense algebra gives for the same draws, in scaled coordinates."""
    return sample_posterior(p.ggn(), prior, draws, Dense()).value.float()


def function_error(p: Problem, prior: GaussianPrior, samples: Tensor, truth: Tensor) -> float:
    """`‖Φ(ζ − ζ*)‖²_B / ‖Φζ*‖²_B` over all samples."""
    ggn = p.ggn()

    def norm(v: Tensor) -> float:
        v = v * prior.scale
        return float((v * ggn.matmul(v)).double().sum())

    return norm(samples - truth) / norm(truth)


@dataclass(frozen=True)
class SubsampledQuadratic(Quadratic):
    """A `Quadratic` of which a mini-batch has its part of the linear term, `linear_batch(batch)`, only."""

    linear_batch: Callable[[Tensor], Tensor]

    def gradient(self, delta: Tensor, batch: Tensor) -> Tensor:
        weight = self.operator.num_data / len(batch)
        fit = self.operator.matmul(self.centre + delta, batch) - self.linear_batch(batch)
        return weight * fit + self.precision * delta


@dataclass(frozen=True)
class SubsampledNoise(Solver):
    """A solver for `sample_posterior` that minimises `L` in place of `L'`: `draws` must be those of the samples."""

    solver: SGD
    draws: Draws

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        ggn = problem.operator
        assert isinstance(ggn, GGN)
        noise = self.draws.noise(ggn.features.num_outputs)
        subsampled = SubsampledQuadratic(**vars(problem), linear_batch=partial(ggn.root_matmul, noise))
        return self.solver.solve(subsampled, init, description=description)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        return self.solver.minimise(objective, init, description=description)


def solve(
    p: Problem, prior: GaussianPrior, draws: Draws, solver: Solver, *, objective: str = "L'", **settings
) -> Solution:
    """Posterior samples by `L'`, or by an `SGD` on `L`."""
    if objective == "L":
        assert isinstance(solver, SGD)
        solver = SubsampledNoise(solver, draws)
    return sample_posterior(p.ggn(), prior, draws, solver, **settings)


def jump(p: Problem, draws: Draws, before: float = 100.0, after: float = 0.1, min_steps: int = 800) -> dict[str, float]:
    """The ratio of the test variance to the exact one for the same draws, after a jump of α and one warm E-step."""
    solver = SGD(min_steps=min_steps, finish_passes=0)  # conjugate gradients would finish what a bad start leaves
    old, new = p.prior(before), p.prior(after)
    warm = solve(p, old, draws, solver)
    truth = exact(p, new, draws)
    starts = {
        "delta": warm.delta * math.sqrt(before / after),  # what `fit_em` does
        "raw": warm.value - draws.prior(len(new.scale)) / math.sqrt(after),  # ζ itself kept
    }

    def variance(samples: Tensor) -> float:
        return float((torch.einsum("ncp,kp->knc", p.test_features, samples * new.scale) ** 2).mean())

    return {
        name: variance(solve(p, new, draws, solver, init=start).value) / variance(truth)
        for name, start in starts.items()
    }


def em(p: Problem, start: float, num_samples: int = 32, max_steps: int = 8) -> EMResult:
    return fit_em(p.model, p.prior(start), Draws(num_samples, 0), SGD(), max_steps=max_steps)


def dense_fixed_point(p: Problem, near: float, tolerance: float = 3e-3) -> float:
    """MacKay's fixed point by dense algebra in float64, from a starting point that only saves time."""
    features = p.model.features
    assert isinstance(features, DenseFeatures)
    f = p.model.network_outputs.double()
    model = replace(p.model, features=DenseFeatures(features.matrix.double()), offset=0 * f, network_outputs=f)
    prior = p.prior(near).to(f.device, torch.float64)
    result = fit_em(model, prior, Draws(1, 0), Dense(), max_steps=30, tolerance=tolerance)
    assert result.converged
    return float(result.prior.precision)
