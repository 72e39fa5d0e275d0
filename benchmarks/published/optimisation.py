"""Bayesian optimisation of Branin, Hartmann-6 and Ackley: the tangent of a network, beside a `SingleTaskGP`."""

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison.report import table
from benchmarks.published.curves import Axes, curves, final
from benchmarks.published.setup import Cells, Rows, Setup, Study
from benchmarks.published.tables import mean

__all__ = ["STUDY", "targets"]

GP, UNTRAINED, THOMPSON, TRAINED = "SingleTaskGP, EI", "tangent, EI", "tangent, Thompson", "tangent after training, EI"
METHODS = ("random", GP, UNTRAINED, THOMPSON, TRAINED)
FUNCTIONS = {"Branin": 15, "Hartmann-6": 20, "Ackley, D = 4": 20}
SEEDS, INITIAL = 10, 10
# Standard deviations of the weights of the first layer, of which the evidence chooses: the kernel's inverse lengths.
WIDTH, FREQUENCIES = 512, (0.25, 0.5, 1.0, 2.0, 4.0)
TRAINED_WIDTH, TRAINED_FREQUENCY, FIRST_STEPS, STEPS, DECAY = 64, 1.5, 150, 50, 1e-2
# The functions have no noise. With so few data the evidence is often largest for noise alone, so that it is not learnt.
SETTINGS: dict[str, Any] = {"mean": "homogeneous", "noise_precision": 1e4}
SEARCH = {"num_restarts": 3, "raw_samples": 64, "options": {"maxiter": 40}}
AXES = Axes("evaluations after the start", "regret", "published_optimisation.png", log=True)
# Regrets below are drawn as this.
LEAST = 1e-6
# Random inputs where a surrogate is compared with the function.
ELSEWHERE = 256


def targets() -> dict[str, Any]:
    """The functions, to be maximised."""
    from botorch.test_functions import Ackley, Branin, Hartmann

    made = (Branin(negate=True), Hartmann(negate=True), Ackley(dim=4, negate=True))
    return dict(zip(FUNCTIONS, (function.to(torch.float64) for function in made), strict=True))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def sines(inputs: int, width: int, frequency: float, seed: int) -> nn.Module:
    """One hidden layer of sines, whose tangent kernel before training is nearly stationary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, last = nn.Linear(inputs, width), nn.Linear(width, 1)
        nn.init.normal_(first.weight, 0.0, frequency)
        nn.init.uniform_(first.bias, -math.pi, math.pi)
    return nn.Sequential(first, Sine(), last).double()


def untrained(setup: Setup, x: Tensor, y: Tensor, seed: int) -> Any:
    """The surrogate of the frequency whose evidence is largest, from networks of one seed that saw no data."""
    from laplace_sampling.gp.botorch import TangentSurrogate

    networks = [sines(x.shape[1], setup.size(WIDTH, 32), frequency, seed) for frequency in FREQUENCIES]
    surrogates = [TangentSurrogate(network, x, y, **SETTINGS) for network in networks]
    return max(surrogates, key=lambda surrogate: surrogate.optimum.log_evidence)


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


def process(x: Tensor, y: Tensor) -> Any:
    """BoTorch's default."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def proposed(model: Any, x: Tensor, y: Tensor, path: int | None) -> Tensor:
    """The next input in the unit cube, `[1, D]`: of largest expected improvement, or best on a path of this seed."""
    from botorch.acquisition import LogExpectedImprovement, PosteriorMean
    from botorch.optim import optimize_acqf

    value = LogExpectedImprovement(model, y.max()) if path is None else PosteriorMean(model.sample_paths(seed=path))
    bounds = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).double()
    return optimize_acqf(value, bounds, 1, **SEARCH)[0]


def error_in_deviations(model: Any, values: Callable[[Tensor], Tensor], inputs: int) -> float:
    """Root mean square of `(f(x) − mean)/standard deviation` at random inputs: about 1 where error bars are right."""
    x = torch.rand(ELSEWHERE, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        posterior = model.posterior(x[:, None])
    errors = values(x).flatten() - posterior.mean.flatten()
    return float((errors / posterior.variance.flatten().sqrt()).square().mean().sqrt())


def run(setup: Setup, function: str, method: str, seed: int) -> Rows:
    """One row: the regret after each evaluation. All methods of a seed start from the same inputs."""
    from laplace_sampling.gp.botorch import TangentSurrogate

    target, steps = targets()[function], setup.size(FUNCTIONS[function], 1)
    low, high = target.bounds.double()

    def values(x: Tensor) -> Tensor:
        return target(low + (high - low) * x)[:, None]

    found: dict[str, Any] = {"function": function, "method": method, "seed": seed, "at": list(range(steps + 1))}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        x = torch.rand(INITIAL, len(low), dtype=torch.float64)
        network = sines(x.shape[1], TRAINED_WIDTH, TRAINED_FREQUENCY, seed)
        y = values(x)
        regrets = [float(target.optimal_value - y.max())]
        for step in range(steps):
            centre, deviation = y.mean(), y.std()
            scaled = (y - centre) / deviation
            if method == "random":
                new = torch.rand(1, x.shape[1], dtype=torch.float64)
            else:
                if method == TRAINED:
                    network = trained(network, x, scaled, setup.size(STEPS if step else FIRST_STEPS, 10))
                    model = TangentSurrogate(network, x, scaled, **SETTINGS)
                else:
                    model = process(x, scaled) if method == GP else untrained(setup, x, scaled, seed)
                if not step:
                    found["error"] = error_in_deviations(
                        model, lambda x, c=centre, d=deviation: (values(x) - c) / d, x.shape[1]
                    )
                new = proposed(model, x, scaled, 1000 * seed + step if method == THOMPSON else None)
            x, y = torch.cat([x, new]), torch.cat([y, values(new)])
            regrets.append(float(target.optimal_value - y.max()))
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
    surrogates = [method for method in METHODS if any("error" in row for row in rows if row["method"] == method)]
    errors = [
        [method, *(mean([r for r in chosen if r["method"] == method], "error", 2) for chosen in groups.values())]
        for method in surrogates
    ]
    return "\n\n".join(
        [
            f"![Regret against evaluations]({image})",
            *tables,
            "Root mean square of the error over the predicted standard deviation, at "
            f"{ELSEWHERE} random inputs after the first {INITIAL}:",
            table(["method", *groups], errors),
            f"Regret is the distance of the best value so far to the optimum: lower is better. All start at {INITIAL} "
            f"random inputs. The tangent is that of a network of one hidden layer of {WIDTH} sines with random "
            "weights, which is not trained: the frequency of its sines, one of "
            f"{', '.join(f'{f:g}' for f in FREQUENCIES)}, and its prior precision have the largest evidence, and its "
            "noise is given. `SingleTaskGP` is that of BoTorch, with its default kernel, which has a length for each "
            "input, and its priors. Bands are standard errors.",
            f"After training ({TRAINED_WIDTH} sines of frequency {TRAINED_FREQUENCY:g}, trained on from the last "
            "weights after each evaluation) the tangent misleads: so few data are fitted exactly, by features that "
            "training has bent to them, and the evidence at the trained weights takes that fit for knowledge. Its "
            "error bars are then too narrow by the factors of the table.",
        ]
    )


STUDY = Study("Bayesian optimisation", cells, section)
