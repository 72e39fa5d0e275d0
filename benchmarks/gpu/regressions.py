"""Regressions on the device beside the same fit on the CPU."""

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.networks import made, num_weights
from benchmarks.gpu.report import Cells, Job, Setup, number, words
from laplace_sampling import LinearisedLaplace

# All data go through the network at once. An epoch of so small a network is hardly any work, so that more are allowed.
NOISE, BATCH, BUDGET, MOST = 0.1, 20_000, 5000.0, 60.0


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
    la, took = _tuned(setup, network, loader, method)
    cells = {"peak, GB": setup.peak()}
    here, seconds = _precisions(la), number(took)
    outcome = "α = {}, noise variance {}".format(*map(number, here, [5, 5]))
    remarks = [f"{told_by(la)[1]} epochs of operations", "" if la.converged_ else "not converged"]
    if beside:
        la, took = _tuned(Setup(torch.device("cpu")), copy.deepcopy(network).cpu(), loader, method)
        there, seconds = _precisions(la), f"{seconds}; CPU: {number(took)}"
        outcome += "; CPU: {}, {}".format(*map(number, there, [5, 5]))
        distance = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
        remarks.append(f"device and CPU differ by {distance:.0e}")
    return {"outcome": outcome, "seconds": seconds, **cells, "remarks": words(*remarks)}


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


def _tuned(setup: Setup, network: nn.Module, loader: DataLoader, method: str) -> tuple[LinearisedLaplace, float]:
    """A fit and its seconds."""
    la = LinearisedLaplace(network, "regression", method=method)
    return la, setup.seconds(lambda: la.fit_hyperparameters(loader, budget=BUDGET, progress=False))


def _precisions(la: LinearisedLaplace) -> tuple[float, float]:
    """The prior precision and the variance of the noise."""
    assert la.noise_precision_ is not None
    return float(la.prior_precision_), 1 / float(la.noise_precision_)


def told_by(la: LinearisedLaplace) -> tuple[str, str]:
    """The method that was taken, and the epochs of operations that were counted, as `print(la)` tells them."""
    method, counted = (re.search(pattern, str(la)) for pattern in (r"→ '(\w+)'", r"The fit took (\S+)"))
    return method[1] if method else "–", counted[1] if counted else "–"
