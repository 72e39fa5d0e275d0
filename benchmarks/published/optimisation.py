"""Bayesian optimisation of Branin, Hartmann-6 and Ackley: the tangent of a small network, beside a `SingleTaskGP`."""

import copy
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.published.curves import Axes, curves, final
from benchmarks.published.setup import Cells, Rows, Setup, Study

__all__ = ["STUDY", "targets"]

METHODS = ("random", "SingleTaskGP, EI", "tangent, EI", "tangent, Thompson")
FUNCTIONS = {"Branin": 15, "Hartmann-6": 20, "Ackley, D = 4": 20}
SEEDS, INITIAL = 10, 10
# The first layer has weights of this standard deviation, so that its sines vary within the unit cube.
WIDTH, FREQUENCY, FIRST_STEPS, STEPS, DECAY = 64, 1.5, 150, 50, 1e-2
# The functions have no noise. With so few data the evidence is often largest for noise alone, so that it is not learnt.
NOISE_PRECISION = 1e4
SEARCH = {"num_restarts": 3, "raw_samples": 64, "options": {"maxiter": 40}}
AXES = Axes("evaluations after the start", "regret", "published_optimisation.png", log=True)
# Regrets below are drawn as this.
LEAST = 1e-6


def targets() -> dict[str, Any]:
    """The functions, to be maximised."""
    from botorch.test_functions import Ackley, Branin, Hartmann

    made = (Branin(negate=True), Hartmann(negate=True), Ackley(dim=4, negate=True))
    return dict(zip(FUNCTIONS, (function.to(torch.float64) for function in made), strict=True))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def sines(inputs: int) -> nn.Module:
    """One hidden layer of sines, whose tangent kernel before training is nearly stationary."""
    first, last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, 1)
    nn.init.normal_(first.weight, 0.0, FREQUENCY)
    nn.init.uniform_(first.bias, -math.pi, math.pi)
    return nn.Sequential(first, Sine(), last).double()


def trained(network: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """A copy that L-BFGS trained further, on squared loss and weight decay."""
    network = copy.deepcopy(network)
    optimiser = torch.optim.LBFGS(network.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        decay = torch.stack([p.square().sum() for p in network.parameters()]).sum()
        loss = (network(x) - y).square().sum() + DECAY * decay
        loss.backward()
        return loss

    optimiser.step(closure)
    return network


def proposed(method: str, network: nn.Module, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """The next input in the unit cube, `[1, D]`."""
    from botorch.acquisition import LogExpectedImprovement, PosteriorMean
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    from laplace_sampling.gp.botorch import TangentSurrogate

    if method == "random":
        return torch.rand(1, x.shape[1], dtype=torch.float64)
    model: Any
    if method.startswith("tangent"):
        model = TangentSurrogate(network, x, y, mean="homogeneous", noise_precision=NOISE_PRECISION)
    else:
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    thompson = method.endswith("Thompson")
    value = PosteriorMean(model.sample_paths(seed=seed)) if thompson else LogExpectedImprovement(model, y.max())
    bounds = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).double()
    return optimize_acqf(value, bounds, 1, **SEARCH)[0]


def run(setup: Setup, function: str, method: str, seed: int) -> Rows:
    """One row: the regret after each evaluation. All methods of a seed start from the same inputs."""
    target, steps = targets()[function], setup.size(FUNCTIONS[function], 1)
    low, high = target.bounds.double()

    def values(x: Tensor) -> Tensor:
        return target(low + (high - low) * x)[:, None]

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        x = torch.rand(INITIAL, len(low), dtype=torch.float64)
        network = sines(x.shape[1])
        y = values(x)
        regrets = [float(target.optimal_value - y.max())]
        for step in range(steps):
            scaled = (y - y.mean()) / y.std()
            if method.startswith("tangent"):
                network = trained(network, x, scaled, setup.size(STEPS if step else FIRST_STEPS, 10))
            new = proposed(method, network, x, scaled, 1000 * seed + step)
            x, y = torch.cat([x, new]), torch.cat([y, values(new)])
            regrets.append(float(target.optimal_value - y.max()))
    found = {"function": function, "method": method, "seed": seed, "at": list(range(steps + 1))}
    return [found | {"curve": [max(regret, LEAST) for regret in regrets]}]


def cells(setup: Setup) -> Cells:
    return {
        f"{function}, {method}, seed {seed}": partial(run, setup, function, method, seed)
        for seed in setup.runs(SEEDS)
        for function in FUNCTIONS
        for method in METHODS
    }


def section(rows: Rows, images: Path) -> str:
    groups = {name: [row for row in rows if row["function"] == name] for name in FUNCTIONS}
    groups = {name: chosen for name, chosen in groups.items() if chosen}
    image = curves(groups, AXES, images)
    tables = [f"{name}:\n\n{final(chosen, 'regret at the end', 'mean regret')}" for name, chosen in groups.items()]
    return "\n\n".join(
        [
            f"![Regret against evaluations]({image})",
            *tables,
            f"Regret is the distance of the best value so far to the optimum: lower is better. All start at {INITIAL} "
            f"random inputs. The tangent is that of a network of one hidden layer of {WIDTH} sines, which is trained "
            "on from its last weights after each evaluation; its prior precision has the largest evidence, and its "
            "noise is given. "
            "`SingleTaskGP` is that of BoTorch, with its default kernel and priors. Bands are standard errors.",
        ]
    )


STUDY = Study("Bayesian optimisation", cells, section)
