"""Gaussian processes of GPyTorch for the large regressions: inducing points by mini-batches (SVGP)."""

from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.comparison.predictions import Fitted, Prediction, Regressed
from benchmarks.comparison.training import Problem
from laplace_sampling.gp.linear_operators import gpytorch

__all__ = ["svgp"]

STEP_SIZE, BATCH = 0.01, 1024


class Process(gpytorch.models.ApproximateGP):
    """Matérn-3/2 with a length for each input, as in the thesis of Antorán; inducing points start at data."""

    def __init__(self, inducing: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing.clone(), distribution))
        self.mean_module = gpytorch.means.ConstantMean()
        matern = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=inducing.shape[1])
        self.covar_module = gpytorch.kernels.ScaleKernel(matern)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(cast(Tensor, self.mean_module(x)), self.covar_module(x))


def svgp(problem: Problem, inducing: int, epochs: int) -> Fitted:
    """The bound of Hensman et al. (2013), by Adam."""
    x, y = problem.data.train.x, problem.data.train.y.flatten()
    generator = torch.Generator().manual_seed(problem.seed)
    model: Any = Process(x[torch.randperm(len(x), generator=generator)[:inducing]])
    likelihood: Any = gpytorch.likelihoods.GaussianLikelihood()
    bound: Any = gpytorch.mlls.VariationalELBO(likelihood, model, len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], STEP_SIZE)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed)  # the variational mean starts with noise
        for _ in range(epochs):
            for batch in torch.randperm(len(y), generator=generator).split(BATCH):
                optimiser.zero_grad()
                (-bound(model(x[batch]), y[batch])).backward()
                optimiser.step()
    model.eval()
    noise = float(likelihood.noise.detach())

    def predict(x: Tensor) -> Prediction:
        with torch.no_grad():
            posteriors = [model(part) for part in x.split(BATCH)]
            mean, variance = (torch.cat([getattr(p, name) for p in posteriors]) for name in ("mean", "variance"))
        return Regressed(mean, variance + noise, mean[None], noise)

    return Fitted(predict, passes=epochs, details={"noise": noise})
