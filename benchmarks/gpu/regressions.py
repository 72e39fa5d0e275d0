"""Regressions on the device beside the same fit on the CPU."""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.networks import made, num_weights
from benchmarks.gpu.report import Cells, Job, Setup, number
from laplace_sampling import LinearisedLaplace

__all__ = ["data", "fitted", "jobs", "mlp"]

NOISE, BATCH, MOST = 0.1, 2000, 60.0


def jobs(setup: Setup) -> Iterator[Job]:
    exact, dual, width = (150, 200, 16) if setup.quick else (4000, 20_000, 64)
    build = partial(mlp, width)
    weights = num_weights(build())
    for method, num, dtype in [("exact", exact, torch.float64), ("exact", exact, torch.float32), ("dual", dual, None)]:
        run = f"regression, {method}, N = {num:,}, {str(dtype or torch.float32).removeprefix('torch.')}"
        call = partial(regression, setup, build, method, num, dtype or torch.float32, beside=dtype is not None)
        yield Job(call, {"network": "MLP", "weights": weights, "run": run}, MOST)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def regression(
    setup: Setup, build: Callable[[], nn.Module], method: str, num: int, dtype: torch.dtype, beside: bool
) -> Cells:
    x, y = data(num)
    network = fitted(made(build, setup.device), x.to(setup.device), y.to(setup.device)).to(dtype)
    loader = DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), BATCH)
    setup.reset_peak()
    here, took = _tuned(setup, network, loader, method)
    peak = {"peak, GB": setup.peak()}
    outcome, seconds = "α = {}, noise variance {}".format(*map(number, here, [5, 5])), number(took)
    if not beside:
        return {"outcome": outcome, "seconds": seconds, **peak}
    there, took = _tuned(Setup(torch.device("cpu")), copy.deepcopy(network).cpu(), loader, method)
    outcome += "; CPU: {}, {}".format(*map(number, there, [5, 5]))
    distance = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
    seconds += f"; CPU: {number(took)}"
    return {"outcome": outcome, "seconds": seconds, **peak, "remarks": f"device and CPU differ by {distance:.0e}"}


def data(num: int) -> tuple[Tensor, Tensor]:
    """A smooth function of eight inputs, with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 8, generator=generator)
    f = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.3 * torch.cos(2 * x[:, 3:4])
    return x, f + NOISE * torch.randn(num, 1, generator=generator)


def fitted(network: nn.Module, x: Tensor, y: Tensor, steps: int = 500) -> nn.Module:
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()
    return network


def _tuned(setup: Setup, network: nn.Module, loader: DataLoader, method: str) -> tuple[tuple[float, float], float]:
    """The prior precision and the variance of the noise, and the seconds of the fit."""
    la = LinearisedLaplace(network, "regression", method=method)
    seconds = setup.seconds(lambda: la.fit_hyperparameters(loader, progress=False))
    assert la.noise_precision_ is not None
    return (float(la.prior_precision_), 1 / float(la.noise_precision_)), seconds
