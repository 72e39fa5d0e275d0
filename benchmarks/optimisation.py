"""`python -m benchmarks.optimisation [--seeds 10] [--steps 30] [--quick] [--out FILE]`: tangents in place of a process.

Bayesian optimisation of Branin, Hartmann-3 and Ackley in five dimensions by log expected improvement, from the same
random inputs for all methods. Every model is fitted anew at each step.

- `SingleTaskGP`: the default of BoTorch, whose kernel has a length for each input.
- trained tangent: `TangentSurrogate` of a network that is trained on the observations at each step.
- initial tangent: the tangent kernel of the same network with random weights.
- trained, initial tangent + stationary: the sum of a tangent kernel and the default kernel of BoTorch.

The others but the last, random inputs, are a `SingleTaskGP(covar_module=...)`. Tables have the simple regret, which is
the distance of the best value so far to the optimum, with standard errors over seeds; the difference of the last regret
from that of `SingleTaskGP`, seed by seed; and which share of intervals of 90 % covers the function at random inputs at
the start.
"""

import argparse
import contextlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gpytorch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.exceptions import ModelFittingError
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior as stationary
    from botorch.optim import optimize_acqf
    from botorch.test_functions import Ackley, Branin, Hartmann

    from laplace_sampling.gp.botorch import TangentSurrogate
    from laplace_sampling.gp.tangent_kernel import TangentKernel

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "Branin": lambda: Branin(negate=True),
    "Hartmann-3": lambda: Hartmann(dim=3, negate=True),
    "Ackley-5": lambda: Ackley(dim=5, negate=True),
}
INITIAL, WIDTH, TRAINING, DECAY = 8, 50, 100, 1e-3
SEARCH: dict[str, Any] = {"num_restarts": 3, "raw_samples": 64, "options": {"maxiter": 40}}
# Random inputs at which intervals are judged, and half the width of one of 90 %.
ELSEWHERE, HALF_WIDTH = 256, 1.645


def network(inputs: int, seed: int) -> nn.Module:
    """Two hidden layers with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        ).double()


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """The network after L-BFGS on squared loss and weight decay."""
    net = network(x.shape[1], seed)
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=TRAINING, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        decay = torch.stack([p.square().sum() for p in net.parameters()]).sum()
        loss = (net(x) - y).square().sum() + DECAY * decay
        loss.backward()
        return loss

    optimiser.step(closure)
    return net


def tangent(net: nn.Module, x: Tensor) -> TangentKernel:
    """The tangent kernel, with a mean variance of one at the observations to start with."""
    kernel = TangentKernel(net)
    variances: Any = kernel(x, diag=True)
    kernel.prior_precision = variances.detach().mean()
    return kernel


def process(x: Tensor, y: Tensor, kernel: gpytorch.kernels.Kernel | None = None) -> Any:
    model = SingleTaskGP(x, y, covar_module=kernel).to(x)
    # Near the end of a search observations are nearly equal, and a factor may fail: hyperparameters stay as they are.
    with contextlib.suppress(ModelFittingError):
        fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
    return model.eval()


def initial(x: Tensor, seed: int) -> TangentKernel:
    return tangent(network(x.shape[1], seed), x)


# The model of some observations in the unit cube, whose targets have mean zero and variance one.
METHODS: dict[str, Callable[[Tensor, Tensor, int], Any] | None] = {
    "SingleTaskGP": lambda x, y, seed: process(x, y),
    "trained tangent": lambda x, y, seed: TangentSurrogate(trained(x, y, seed), x, y),
    "initial tangent": lambda x, y, seed: process(x, y, initial(x, seed)),
    "trained tangent + stationary": lambda x, y, seed: process(
        x, y, tangent(trained(x, y, seed), x) + stationary(ard_num_dims=x.shape[1])
    ),
    "initial tangent + stationary": lambda x, y, seed: process(
        x, y, initial(x, seed) + stationary(ard_num_dims=x.shape[1])
    ),
    "random": None,
}


def covered(model: Any, values: Tensor, x: Tensor) -> float:
    """The share of intervals of 90 % that has the function in it."""
    with torch.no_grad():
        posterior = model.posterior(x)
    return float(((values - posterior.mean).abs() <= HALF_WIDTH * posterior.variance.sqrt()).double().mean())


def run(function: str, method: str, seed: int, steps: int) -> dict[str, Any]:
    """The regret after each evaluation, from the end of the initial ones on; all methods of a seed start alike."""
    target = FUNCTIONS[function]().to(torch.float64)
    low, high = target.bounds.double()
    D, make = len(low), METHODS[method]
    elsewhere = torch.rand(ELSEWHERE, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def values(x: Tensor) -> Tensor:
        return target(low + (high - low) * x)[:, None]

    coverage = math.nan
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        x = torch.rand(INITIAL, D, dtype=torch.float64)
        y = values(x)
        for step in range(steps):
            new = torch.rand(1, D, dtype=torch.float64)
            if make is not None:
                mean, deviation = y.mean(), y.std()
                scaled = (y - mean) / deviation
                model = make(x, scaled, seed)
                if not step:
                    coverage = covered(model, (values(elsewhere) - mean) / deviation, elsewhere)
                bounds = torch.stack([torch.zeros(D), torch.ones(D)]).double()
                new, _ = optimize_acqf(LogExpectedImprovement(model, scaled.max()), bounds, 1, **SEARCH)
            x, y = torch.cat([x, new]), torch.cat([y, values(new)])
    regrets = target.optimal_value - y[:, 0].cummax(0).values[INITIAL - 1 :]
    row = {"function": function, "method": method, "seed": seed, "coverage": coverage}
    return row | {"regrets": regrets.tolist()}


def shown(values: Sequence[float]) -> str:
    """A mean and its standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    error = f" ± {float(numbers.std() / math.sqrt(len(numbers))):.2g}" if len(numbers) > 1 else ""
    return f"{float(numbers.mean()):.3g}{error}"


def report(function: str, rows: list[dict[str, Any]], steps: int) -> None:
    """Prints the table of one function."""
    at = sorted({steps // 3, 2 * steps // 3, steps})
    heads = [*(f"regret, {INITIAL + step} evaluations" for step in at), "beside SingleTaskGP", "covered"]
    print(f"\n{function}\n\n| method | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    alone = {row["seed"]: row["regrets"][-1] for row in rows if row["method"] == "SingleTaskGP"}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        if own:
            cells = [shown([row["regrets"][step] for row in own]) for step in at]
            beside = [row["regrets"][-1] - alone[row["seed"]] for row in own if row["seed"] in alone]
            cells += [shown(beside) if beside else "", f"{sum(row['coverage'] for row in own) / len(own):.2f}"]
            print(f"| {method} | {' | '.join(cells)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="one seed and two steps of one function")
    parser.add_argument("--out", type=Path, help="a file to which runs are added, and whose runs are not repeated")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps, options.functions = 1, 2, ["Branin"]
    rows: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        kept = (json.loads(line) for line in options.out.read_text().splitlines())
        rows = [row for row in kept if len(row["regrets"]) == options.steps + 1]
    done = {(row["function"], row["method"], row["seed"]) for row in rows}
    out: Path | None = options.out
    for seed in range(options.seeds):
        for function, method in product(options.functions, options.methods):
            if (function, method, seed) not in done:
                rows.append(run(function, method, seed, options.steps))
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    for function in options.functions:
        report(function, [row for row in rows if row["function"] == function], options.steps)


if __name__ == "__main__":
    main()
