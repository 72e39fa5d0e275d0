"""Parallel Thompson sampling in eight dimensions, on thousands of data.

    python examples/thompson_sampling.py --data 5000 --steps 10 --batch 100

The target is a function from the prior of a Matérn-3/2 kernel on [0, 1]⁸. Each step draws a batch of functions from the
posterior, and observes the target, with a little noise, at the maximum of each (Hernández-Lobato and others, 2017).
Functions are those of `condition` or of BoTorch, which has a Cholesky factor of all data at each step; the same
code maximises both. The table has the largest value of the target so far, as a mean over seeds with its standard error.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from botorch.models import SingleTaskGP
    from botorch.sampling.pathwise import draw_matheron_paths
    from gpytorch.kernels import MaternKernel, ScaleKernel

    from laplace_sampling.kernels import condition
    from laplace_sampling.kernels.botorch import ConditionedModel
    from laplace_sampling.kernels.prior_draws import PriorDraws

METHODS = ("random", "BoTorch", "condition, exact", "condition, cg")
DIMENSION, NOISE = 8, 1e-3  # a standard deviation
# Candidates of a batch at a time: BoTorch's paths hold the features of all of them for all samples.
BLOCK = 500


def kernel(lengthscale: float) -> ScaleKernel:
    base = MaternKernel(nu=1.5)
    base.lengthscale = lengthscale
    return ScaleKernel(base).double().requires_grad_(False)


def maximisers(paths: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, lengthscale: float, batch: int) -> Tensor:
    """The maximum of each path, `[batch, D]`: the best of many candidates, improved by Adam.

    A tenth of them are uniform, and the others are near good data, at half a length scale, as in the thesis.
    """
    best, highest = torch.empty(batch, DIMENSION).double(), torch.full((batch,), -torch.inf).double()
    for _ in range(8):
        good = x[torch.multinomial((y - y.min()).pow(4), BLOCK, replacement=True)]
        near = good + lengthscale / 2 * torch.randn_like(good)
        near[: BLOCK // 10] = torch.rand(BLOCK // 10, DIMENSION).double()
        candidates = near.clamp(0, 1)
        with torch.no_grad():
            values, chosen = paths(candidates).max(1)
        better = values > highest
        best[better], highest[better] = candidates[chosen[better]], values[better]
    # Each path takes its own input.
    points = best[:, None].clone().requires_grad_()
    optimiser = torch.optim.Adam([points], lr=1e-2, maximize=True)
    for _ in range(30):
        optimiser.zero_grad()
        paths(points).sum().backward()
        optimiser.step()
        points.data.clamp_(0, 1)
    return points.detach()[:, 0]


def run(method: str, options: argparse.Namespace, seed: int) -> tuple[list[float], float]:
    """The best value after each step, and the seconds of all steps."""
    torch.manual_seed(seed)
    prior = kernel(options.lengthscale)
    target = PriorDraws(prior, DIMENSION, 1, seed)
    x = torch.rand(options.data, DIMENSION).double()
    values = target(x)[0]
    y = values + NOISE * torch.randn_like(values)
    best, start = [float(values.max())], time.perf_counter()
    for step in range(options.steps):
        if method == "random":
            new = torch.rand(options.batch, DIMENSION).double()
        else:
            # The hyperparameters are known, as in the thesis.
            noise = torch.full_like(y[:, None], NOISE**2)
            model = SingleTaskGP(x, y[:, None], noise, covar_module=prior, outcome_transform=None).eval()
            if method != "BoTorch":
                solver = method.removeprefix("condition, ")
                model = ConditionedModel(condition(model, options.batch, solver=solver, seed=1000 * seed + step))
            with torch.no_grad():
                paths = draw_matheron_paths(model, torch.Size([options.batch]))
            new = maximisers(paths, x, y, options.lengthscale, options.batch)
        found = target(new)[0]
        x, y = torch.cat([x, new]), torch.cat([y, found + NOISE * torch.randn_like(found)])
        best.append(max(best[-1], float(found.max())))
    return best, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Runs all methods, prints the table, and returns the means over seeds by method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("data", 1000), ("steps", 4), ("batch", 25), ("seeds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengthscale", type=float, default=0.5)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    table = {}
    for method in METHODS:
        runs, seconds = zip(*(run(method, options, seed) for seed in range(options.seeds)), strict=True)
        numbers = torch.tensor(runs)
        table[method] = numbers.mean(0).tolist()
        error = float(numbers[:, -1].std() / options.seeds**0.5) if options.seeds > 1 else float("nan")
        shown = "".join(f"  {value:6.3f}" for value in table[method])
        print(f"{method:18s}{shown}  ± {error:.3f}  {sum(seconds) / len(seconds):6.1f} s", flush=True)
    return table


if __name__ == "__main__":
    main()
