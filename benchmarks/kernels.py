"""`python -m benchmarks.kernels --data DIR [--sets kin40k bike keggdirected] [--quick]`: processes on many data.

One model, a Matérn-3/2 kernel with a length for each input, whose hyperparameters have the largest evidence of 1,000
data (`tune`). `condition` on all data, by several numbers of passes and by inducing points, is beside Cholesky factors
of 2,000 and 20,000 of them and beside stochastic variational inducing points (SVGP; Hensman et al. 2013), which learn
their own hyperparameters. Errors and negative
log-likelihoods are of the standard test sets, for targets with variance one. `DIR` has the folder `uci-large`
(`data/uci.py`).
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.comparison.processes import Sparse, gpytorch
from benchmarks.data.uci import LARGE_SETS, Split, load_large
from laplace_sampling.kernels import condition, tune
from laplace_sampling.solvers.lapack import solve_

TUNED, EXACT, POINTS = 1000, (2000, 20_000), 1000
STEPS, BATCH, STEP_SIZE = 5000, 1000, 0.01

# The mean, and the variance with noise, of test data.
Predicted = tuple[Tensor, Tensor]


def kernel(dimension: int) -> gpytorch.kernels.Kernel:
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=dimension))


class Process(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel(x.shape[1])

    def forward(self, x: Tensor) -> Any:
        mean: Any = self.mean_module(x)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))


def standardised(split: Split) -> tuple[Tensor, ...]:
    """Inputs and targets of training and test data, in units of the training data."""
    found: list[Tensor] = []
    for train, test in ((split.x, split.x_test), (split.y, split.y_test)):
        mean, sd = train.mean(0), np.where(train.min(0) < train.max(0), train.std(0), 1)
        found += [torch.as_tensor((part - mean) / sd) for part in (train, test)]
    return found[0], found[2], found[1], found[3]


def of_samples(model: Process, x_test: Tensor, num_samples: int, **settings: Any) -> tuple[Predicted, str]:
    """By `condition`."""
    posterior = condition(model, num_samples, **settings)
    parts = [(posterior.mean(part), posterior.variance(part)) for part in x_test.split(1000)]
    mean, variance = (torch.cat(kind) for kind in zip(*parts, strict=True))
    return (mean, variance + posterior.noise_of_new()), f"{posterior.passes:.0f} passes, error {posterior.error:.2g}"


def exact_in_place(model: Any, x: Tensor, y: Tensor, x_test: Tensor, block: int = 2000) -> tuple[Predicted, str]:
    """Mean and variance by the factor of all data, in place of their kernel matrix; test data take three of theirs."""
    with torch.no_grad():
        noise, mean = model.likelihood.noise, model.mean_module(x[:1])
        matrix = torch.empty(len(x), len(x), dtype=torch.float64)
        for start in range(0, len(x), block):
            matrix[start : start + block] = model.covar_module(x[start : start + block], x).to_dense()
        matrix.diagonal().add_(noise)
        right = torch.cat([model.covar_module(x, x_test).to_dense(), y[:, None] - mean], 1)
        solved, cross = solve_(matrix, right), right[:, :-1]
        prior: Any = model.covar_module(x_test, diag=True)
        return (mean + cross.mT @ solved[:, -1], prior - (cross * solved[:, :-1]).sum(0) + noise), "a factor in place"


def variational(x: Tensor, y: Tensor, x_test: Tensor, points: int, steps: int) -> tuple[Predicted, str]:
    """Inducing points by mini-batches, in single precision."""
    generator = torch.Generator().manual_seed(0)
    model: Any = Sparse(x[torch.randperm(len(x), generator=generator)[:points]].float().clone())
    model.covar_module = kernel(x.shape[1])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the variational mean starts with noise
        for _ in range(steps):
            batch = torch.randint(len(y), (min(BATCH, len(y)),), generator=generator)
            optimiser.zero_grad()
            loss: Any = bound(model(x[batch].float()), y[batch].float())
            (-loss).backward()
            optimiser.step()
            schedule.step()
    with torch.no_grad():
        found = [likelihood(model.eval()(part.float())) for part in x_test.split(1000)]
        mean, variance = (torch.cat([getattr(p, kind) for p in found]) for kind in ("mean", "variance"))
    return (mean.double(), variance.double()), f"{steps} steps"


def rows(split: Split, num_samples: int, steps: int, passes: Sequence[int], exact: bool = False) -> Iterator[list[str]]:
    """A row for each method: its name, RMSE, negative log-likelihood, minutes, and what it took."""
    x, y, x_test, y_test = standardised(split)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))

    def row(name: str, run: Callable[[], tuple[Predicted, str]]) -> list[str]:
        start = time.perf_counter()
        (mean, variance), cost = run()
        minutes = (time.perf_counter() - start) / 60
        error = (y_test - mean).square()
        loss = 0.5 * (error / variance + (2 * torch.pi * variance).log()).mean()
        return [name, f"{float(error.mean().sqrt()):.3f}", f"{float(loss):.3f}", f"{minutes:.2f}", cost]

    model: Any = Process(x[order[:TUNED]], y[order[:TUNED]]).double()
    start = time.perf_counter()
    tuned = tune(model)
    cost = f"{tuned.evaluations} evaluations, noise {float(model.likelihood.noise.detach()):.2g}"
    yield [f"tune, {TUNED} data", "", "", f"{(time.perf_counter() - start) / 60:.2f}", cost]
    ways: list[tuple[str, Tensor, dict[str, Any]]] = [
        (f"exact, {num:,} data", order[:num], {"solver": "exact"}) for num in EXACT if num < len(x)
    ]
    ways += [(f"condition, {POINTS:,} inducing points", order, {"inducing": POINTS})]
    ways += [(f"condition, at most {num} passes", order, {"max_passes": num}) for num in passes]
    for name, chosen, settings in ways:
        model.set_train_data(x[chosen], y[chosen], strict=False)
        model.eval()
        yield row(name, lambda settings=settings: of_samples(model, x_test, num_samples, **settings))
    if exact:
        model.set_train_data(x, y, strict=False)
        yield row(f"exact, all {len(x):,} data", lambda: exact_in_place(model.eval(), x, y, x_test))
    yield row(f"SVGP, {POINTS} points", lambda: variational(x, y, x_test, POINTS, steps))


def made_up() -> Split:
    """A wave of two inputs, with noise."""
    random = np.random.default_rng(0)
    x = random.uniform(size=(600, 2))
    y = np.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * random.standard_normal(600)
    return Split(x[:500], y[:500], x[500:], y[500:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with `uci-large`")
    parser.add_argument("--sets", nargs="+", choices=LARGE_SETS, default=LARGE_SETS)
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--passes", type=int, nargs="+", default=[100], metavar="NUM", help="limits of `condition`")
    parser.add_argument("--exact", action="store_true", help="also the Cholesky factor of all data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="made-up data, for a moment")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if not options.quick and options.data is None:
        parser.error("--data is needed without --quick")
    print("| data | method | RMSE | negative log-likelihood | minutes | cost |\n|---|---|---|---|---|---|")
    for name in ("made up",) if options.quick else options.sets:
        split = made_up() if options.quick else load_large(options.data / "uci-large" / name, options.split)
        steps, num_samples = (100, 8) if options.quick else (STEPS, options.samples)
        for row in rows(split, num_samples, steps, options.passes, options.exact):
            print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
