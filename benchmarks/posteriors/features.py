"""Gaussian processes whose kernel takes the last hidden layer of a network: frozen, or trained with the kernel."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import Fitted, Prediction, Regressed
from benchmarks.comparison.processes import NOISE_FLOOR
from benchmarks.posteriors.layers import DRAWS

Kernel = Callable[[Tensor, Tensor], Tensor]


def linear(precision: float) -> Kernel:
    """The kernel of a linear layer with a bias, whose weights have this prior precision."""
    return lambda a, b: (a @ b.mT + 1) / precision


def rbf(log_variance: Tensor, log_length: Tensor) -> Kernel:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.mT
        return (log_variance - 0.5 * squares.clamp_min(0) * (-2 * log_length).exp()).exp()

    return kernel


@dataclass(frozen=True)
class Process:
    """A process of mean zero, given targets `y` `[N]` at features `z` `[N, D]` with Gaussian noise of a variance."""

    kernel: Kernel
    noise: Tensor
    z: Tensor
    y: Tensor

    @cached_property
    def factor(self) -> Tensor:
        return torch.linalg.cholesky(self.kernel(self.z, self.z) + self.noise * torch.eye(len(self.y)).to(self.z))

    @property
    def log_evidence(self) -> Tensor:
        whitened = torch.linalg.solve_triangular(self.factor, self.y[:, None], upper=False)
        constant = 0.5 * len(self.y) * math.log(2 * math.pi)
        return -0.5 * whitened.square().sum() - self.factor.diagonal().log().sum() - constant

    def predict(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the function, without noise."""
        cross = torch.linalg.solve_triangular(self.factor, self.kernel(self.z, z), upper=False)
        whitened = torch.linalg.solve_triangular(self.factor, self.y[:, None], upper=False)
        return (cross.mT @ whitened)[:, 0], self.kernel(z, z) - cross.mT @ cross


def feature_process(network: nn.Sequential, x: Tensor, y: Tensor, joint: bool, steps: int, seed: int) -> Fitted:
    """An RBF kernel by L-BFGS on the evidence; `joint` trains all weights on by the same loss afterwards."""
    features, x, y = copy.deepcopy(network[:-1]).double(), x.double(), y.flatten().double()
    with torch.no_grad():
        # A length far from the distances of features would have no slope to start with.
        length = torch.pdist(features(x)).mean().log()
    logs = torch.stack([torch.zeros_like(length), length, torch.full_like(length, math.log(0.1))]).requires_grad_()

    def process() -> Process:
        # The last term is for a Cholesky factor of a kernel that has become nearly singular.
        noise = NOISE_FLOOR**2 + (2 * logs[2]).exp() + 1e-10 * logs[0].exp()
        return Process(rbf(logs[0], logs[1]), noise, features(x), y)

    for variables in [[logs], [logs, *features.parameters()]][: 1 + joint]:
        optimiser = torch.optim.LBFGS(variables, max_iter=steps, max_eval=2 * steps, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            features.zero_grad()
            logs.grad = None
            value = -process().log_evidence
            value.backward()
            return value

        optimiser.step(loss)
    with torch.no_grad():
        fitted = process()
        noise, evidence = float(fitted.noise), float(fitted.log_evidence) / len(y)

    def predict(at: Tensor) -> Prediction:
        with torch.no_grad():
            mean, covariance = fitted.predict(features(at.double()))
            values, vectors = torch.linalg.eigh(covariance)
            normal = torch.randn(DRAWS, len(at), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            samples = mean + (normal * values.clamp_min(0).sqrt()) @ vectors.mT
            variance = covariance.diagonal().clamp_min(0) + noise
        return Regressed(mean, variance, samples, noise, gaussian=True)

    return Fitted(predict, details={"score": evidence, "noise": noise})
