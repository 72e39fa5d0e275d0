"""A regression on one split of a UCI data set, the networks that several methods share, and what a method returns.

Inputs and targets are standardised, everything is in float64 and deterministic by seed, and nothing sees test targets.
What has to be chosen is chosen on a fifth of the training data that the networks for it have not seen.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.optimize
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.networks.linearisation import Linearisation

__all__ = ["MEMBERS", "Method", "Outcome", "Task", "best_noise", "gaussian", "predict", "train"]

WIDTH, MEMBERS = 50, 5
# Weight decays `λ` of the objective `½Σ(y − f)² + ½λ‖w‖²`, tried in this order until the validation error rises.
WEIGHT_DECAYS = (10.0, 1.0, 0.1, 0.01, 0.001)
NETWORK_STEPS = 500  # of L-BFGS

Method = Callable[["Task"], "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """Predictive distribution of the test targets, a mixture of Gaussians for each, and what was fitted."""

    distribution: MixtureSameFamily
    details: dict[str, float]


def gaussian(mean: Tensor, stddev: Tensor | float, **details: float) -> Outcome:
    """A mixture of `K` Gaussians for each of `M` targets, `mean` `[M]` or `[K, M]`, of equal weights."""
    means = mean.detach().reshape(-1, mean.shape[-1]).T
    weights = Categorical(torch.ones_like(means))
    scales = torch.as_tensor(stddev).to(means).detach()
    scales = scales[:, None] if scales.dim() else scales
    return Outcome(MixtureSameFamily(weights, Normal(means, scales.expand_as(means))), details)


def mlp(inputs: int, depth: int, seed: int, dropout: float = 0.0) -> nn.Sequential:
    """Hidden layers of 50 units, tanh."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size in [inputs] + [WIDTH] * (depth - 1):
            layers += [nn.Linear(size, WIDTH), nn.Tanh()] + ([nn.Dropout(dropout)] if dropout else [])
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()


def train(x: np.ndarray, y: np.ndarray, depth: int, seed: int, weight_decay: float, steps: int) -> np.ndarray:
    """Weights: the minimum of `½Σ(y − f)² + ½λ‖w‖²` near a random start, by L-BFGS on all data."""
    network, inputs, targets = mlp(x.shape[1], depth, seed), torch.from_numpy(x), torch.from_numpy(y)
    parameters = list(network.parameters())

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        vector_to_parameters(torch.tensor(w), parameters)
        loss = 0.5 * (network(inputs)[:, 0] - targets).square().sum()
        gradients = torch.autograd.grad(loss, parameters)
        flat = torch.cat([g.flatten() for g in gradients]).numpy()
        return float(loss.detach()) + 0.5 * weight_decay * float(w @ w), flat + weight_decay * w

    start = parameters_to_vector(parameters).detach().numpy()
    options = {"maxiter": steps, "maxfun": 2 * steps, "maxcor": 40, "ftol": 1e-5}
    return scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x


def best_noise(means: Tensor, y: Tensor) -> tuple[float, float]:
    """The noise of largest log-likelihood of a mixture with means `[K, M]`, and that mean log-likelihood."""

    def loss(log_noise: float) -> float:
        return -float(gaussian(means, math.exp(log_noise)).distribution.log_prob(y).mean())

    optimum: Any = scipy.optimize.minimize_scalar(loss, bounds=(math.log(1e-4), math.log(3.0)), method="bounded")
    return math.exp(optimum.x), -float(optimum.fun)


@dataclass(frozen=True, eq=False)
class Task:
    """Standardised data of a split, and networks that several methods share.

    Attributes:
        x: `[N, D]`; `y` `[N]`; `x_test` `[M, D]`.
        depth: hidden layers of networks.
        seed: of all randomness.
        noise_floor: no less noise than this is believed. Where targets are rounded and inputs come twice, as wines of
            an integer quality do, the evidence of Gaussian processes is unbounded without.
        train: `train`, or the same with a memory.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    depth: int
    seed: int
    noise_floor: float
    train: Callable[..., np.ndarray] = train

    @cached_property
    def held_out(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Four fifths of the training data and one: inputs and targets of each."""
        first, second = train_test_split(np.arange(len(self.y)), test_size=0.2, random_state=self.seed)
        return self.x[first], self.y[first], self.x[second], self.y[second]

    def network(self, member: int = 0, dropout: float = 0.0) -> nn.Sequential:
        """A network before training."""
        return mlp(self.x.shape[1], self.depth, 1000 * self.seed + member, dropout)

    def trained(self, x: Tensor, y: Tensor, weight_decay: float, member: int = 0) -> nn.Module:
        """A network after training."""
        seed = 1000 * self.seed + member
        weights = self.train(x.numpy(), y.numpy(), self.depth, seed, weight_decay, NETWORK_STEPS)
        network = self.network(member)
        vector_to_parameters(torch.tensor(weights), network.parameters())
        return network.eval()

    @cached_property
    def _validated(self) -> tuple[float, nn.Module]:
        """The weight decay of least validation error, and its network."""
        x, y, x_new, y_new = self.held_out
        best, least = None, math.inf
        for decay in WEIGHT_DECAYS:
            network = self.trained(x, y, decay)
            error = float((predict(network, x_new) - y_new).square().mean())
            if best is not None and error > least:
                break
            best, least = (decay, network), error
        assert best is not None
        return best

    @property
    def weight_decay(self) -> float:
        return self._validated[0]

    @property
    def held_out_map(self) -> nn.Module:
        """The network that is trained on four fifths."""
        return self._validated[1]

    @cached_property
    def held_out_means(self) -> Tensor:
        """Predictions of the held-out data by networks trained on the others, `[K, M]`; the first is that of MAP."""
        x, y, x_new, _ = self.held_out
        others = [predict(self.trained(x, y, self.weight_decay, k), x_new) for k in range(1, MEMBERS)]
        return torch.stack([predict(self.held_out_map, x_new), *others])

    @cached_property
    def map(self) -> nn.Module:
        """The network that is trained on all training data."""
        return self.trained(self.x, self.y, self.weight_decay)

    @cached_property
    def tangent(self) -> tuple[Linearisation, DenseFeatures, DenseFeatures]:
        """The network of MAP, linearised, and its Jacobians on training and test inputs."""
        network = Linearisation(self.map)
        x, x_test = (DenseFeatures.of(features_at(network, v, 256)) for v in (self.x, self.x_test))
        return network, x, x_test

    @cached_property
    def held_out_noise(self) -> float:
        """Standard deviation of the held-out residuals of MAP."""
        _, _, x_new, y_new = self.held_out
        return best_noise(predict(self.held_out_map, x_new)[None], y_new)[0]


def predict(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return network(x)[:, 0]
