"""Bayesian optimisation with the tangent kernel of a trained network, beside a stationary kernel.

By itself the tangent makes hardly any progress: a network that was trained on so few observations fits them exactly,
and its error bars are too narrow. As one part of the kernel of a `SingleTaskGP`, whose other part is BoTorch's default,
it is level with `SingleTaskGP` (`docs/benchmarks.md`).

    python examples/bayesian_optimisation.py --function hartmann --steps 20 --seeds 3

Each step trains a small network on all observations, fits the Gaussian process anew, and chooses the next input by
expected improvement. The table has the best value so far as a mean over seeds; higher is better.
"""

import argparse
import warnings
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
    from botorch.optim import optimize_acqf
    from botorch.test_functions import Branin, Hartmann
    from gpytorch.mlls import ExactMarginalLogLikelihood

    from laplace_sampling.gp.botorch import TangentSurrogate
    from laplace_sampling.gp.tangent_kernel import TangentKernel

METHODS = ("SingleTaskGP", "tangent + stationary", "tangent")


def train(x: Tensor, y: Tensor, seed: int, width: int = 50, steps: int = 200, decay: float = 1e-3) -> nn.Module:
    """A network with two hidden layers, trained by L-BFGS on squared loss and weight decay."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        ).double()
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = ((net(x) - y) ** 2).sum() + decay * sum((p**2).sum() for p in net.parameters())
        loss.backward()
        return loss

    optimiser.step(closure)
    return net.requires_grad_(True)


def propose(method: str, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """The next input in the unit cube, `[1, D]`."""
    y = (y - y.mean()) / y.std()
    if method == "tangent":
        surrogate = TangentSurrogate(train(x, y, seed), x, y, mean="affine")
    else:
        kernel = get_covar_module_with_dim_scaled_prior(ard_num_dims=x.shape[1])
        if method == "tangent + stationary":
            tangent = TangentKernel(train(x, y, seed))
            variances: Any = tangent(x, diag=True)
            tangent.prior_precision = variances.detach().mean()  # a variance of one to start from
            kernel = tangent + kernel
        surrogate = SingleTaskGP(x, y, covar_module=kernel)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(surrogate.likelihood, surrogate))
    acquisition = LogExpectedImprovement(surrogate, y.max())
    bounds = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).double()
    return optimize_acqf(acquisition, bounds, 1, num_restarts=4, raw_samples=64)[0]


def run(function: str, method: str, steps: int, initial: int, seed: int) -> list[float]:
    """The best value after each step; the first entry is that of the initial observations."""
    target = {"branin": Branin, "hartmann": Hartmann}[function](negate=True).to(torch.float64)
    low, high = target.bounds.double()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = torch.rand(initial, len(low), dtype=torch.float64)
        y = target(low + (high - low) * x)[:, None]
        best = [float(y.max())]
        for step in range(steps):
            new = propose(method, x, y, 1000 * seed + step)
            x, y = torch.cat([x, new]), torch.cat([y, target(low + (high - low) * new)[:, None]])
            best.append(float(y.max()))
    return best


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Runs all methods, prints the table, and returns the means over seeds by method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", choices=["branin", "hartmann"], default="hartmann")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--initial", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    table = {}
    for method in METHODS:
        runs = [run(options.function, method, options.steps, options.initial, s) for s in range(options.seeds)]
        table[method] = torch.tensor(runs).mean(0).tolist()
        shown = range(0, options.steps + 1, max(1, options.steps // 5))
        print(f"{method:20s}" + "".join(f"  {step}: {table[method][step]:7.3f}" for step in shown), flush=True)
    return table


if __name__ == "__main__":
    main()
