"""Variational posteriors of all weights with their evidence lower bound, no term of which has another weight than one.

The prior is that of Neal (1996), and the noise is learnt by the bound, unless it is given.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from benchmarks.comparison.predictions import Fitted
from benchmarks.posteriors.layers import DRAWS, Layers, by_draws

RATE, FINAL_DRAWS, HIDDEN_LOG_PRECISION = 1e-2, 100, 4.0


class Posterior(nn.Module, ABC):
    """An approximate posterior that is sampled; parameters of it are maximised over."""

    def __init__(self, layers: Layers, noise: float, learn_noise: bool = True) -> None:
        super().__init__()
        self.layers = layers
        self.log_stddev_of_noise = nn.Parameter(torch.tensor(0.5 * math.log(noise), dtype=torch.float64), learn_noise)

    @abstractmethod
    def sample(self, x: Tensor, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Outputs `[S, N]` at inputs of networks that are drawn, and estimates of `log p(w) − log q(w)`, `[S]`."""

    def elbo(self, x: Tensor, y: Tensor, num: int, generator: torch.Generator) -> Tensor:
        """The bound of `log p(y)` for all data, by so many draws."""
        outputs, log_ratio = self.sample(x, num, generator)
        return (Normal(outputs, self.log_stddev_of_noise.exp()).log_prob(y).sum(1) + log_ratio).mean()


class MeanField(Posterior):
    """Independent Gaussians, from given weights with small standard deviations."""

    def __init__(self, layers: Layers, start: Tensor, noise: float, learn_noise: bool = True) -> None:
        super().__init__(layers, noise, learn_noise)
        self.mean = nn.Parameter(start.clone())
        self.log_stddev = nn.Parameter(torch.full_like(start, math.log(0.01)))

    def sample(self, x: Tensor, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = torch.randn(num, len(self.mean), generator=generator, dtype=torch.float64)
        weights = self.mean + self.log_stddev.exp() * noise
        variances = self.layers.prior_variances
        # The divergence has a closed form.
        ratio = (2 * self.log_stddev).exp() / variances
        divergence = 0.5 * (ratio + self.mean.square() / variances - 1 - ratio.log()).sum()
        return self.layers(weights, x), -divergence.expand(num)


class GlobalInducing(Posterior):
    """Global inducing points (Ober & Aitchison 2021), which correlate all layers.

    Some inputs run through the network with the data. The weights of a layer have the posterior of Bayesian linear
    regression, from where these inputs have got to, on learnt targets with learnt precisions. Those of hidden layers
    start where a given network has them: from random ones the search ends where the network is constant.
    """

    def __init__(
        self,
        layers: Layers,
        inputs: Tensor,
        targets: Tensor,
        start: Tensor,
        noise: float,
        learn_noise: bool = True,
    ) -> None:
        super().__init__(layers, noise, learn_noise)
        num, hidden, h = len(inputs), [], inputs
        for matrix in layers.matrices(start)[:-1]:
            hidden.append(torch.cat([h, torch.ones_like(h[:, :1])], 1) @ matrix)
            h = layers.activation(hidden[-1])
        self.inputs = nn.Parameter(inputs.clone())
        self.targets = nn.ParameterList([*hidden, targets.reshape(num, 1)])
        starts = [HIDDEN_LOG_PRECISION] * len(hidden) + [-math.log(noise)]
        self.log_precisions = nn.ParameterList(torch.full((num, 1), value, dtype=torch.float64) for value in starts)

    def sample(self, x: Tensor, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        h = torch.cat([self.inputs, x]).expand(num, -1, -1)
        log_ratio, inducing = torch.zeros(num, dtype=torch.float64), len(self.inputs)
        last = len(self.layers.shapes) - 1
        for number, (fan_in, width) in enumerate(self.layers.shapes):
            h = torch.cat([h, torch.ones_like(h[..., :1])], -1)
            known, precisions = h[:, :inducing], self.log_precisions[number].exp()
            weighted = (known * precisions).mT
            # The prior has variance 1/fan_in, and hence precision fan_in.
            precision = fan_in * torch.eye(fan_in, dtype=torch.float64) + weighted @ known
            factor = torch.linalg.cholesky(precision)
            normal = torch.randn(num, fan_in, width, generator=generator, dtype=torch.float64)
            mean = torch.cholesky_solve(weighted @ self.targets[number], factor)
            weights = mean + torch.linalg.solve_triangular(factor.mT, normal, upper=True)
            squares = normal.square().sum((1, 2)) - fan_in * weights.square().sum((1, 2))
            log_determinants = 0.5 * fan_in * math.log(fan_in) - factor.diagonal(dim1=1, dim2=2).log().sum(1)
            log_ratio = log_ratio + 0.5 * squares + width * log_determinants
            h = h @ weights
            h = h if number == last else self.layers.activation(h)
        return h[:, inducing:, 0], log_ratio


def maximise(
    posterior: Posterior, x: Tensor, y: Tensor, steps: int, generator: torch.Generator, draws: int = 10
) -> float:
    """Adam on the bound, with steps that fall to zero; returns the bound by many draws."""
    optimiser = torch.optim.Adam([p for p in posterior.parameters() if p.requires_grad], RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (-posterior.elbo(x, y, draws, generator)).backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        return float(posterior.elbo(x, y, FINAL_DRAWS, generator))


def fitted(posterior: Posterior, x: Tensor, y: Tensor, steps: int, generator: torch.Generator) -> Fitted:
    """Maximises the bound; predictions by a mixture of draws. The score is the bound for each datum."""
    bound = maximise(posterior, x, y, steps, generator)
    seed, noise = generator.initial_seed(), math.exp(2 * float(posterior.log_stddev_of_noise.detach()))

    def outputs(at: Tensor) -> Tensor:
        # The same networks wherever they predict.
        return posterior.sample(at, DRAWS, torch.Generator().manual_seed(seed))[0]

    return by_draws(outputs, noise, score=bound / len(y), noise=noise)
