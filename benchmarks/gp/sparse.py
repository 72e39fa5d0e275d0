"""A sparse variational Gaussian process of GPyTorch, for regressions of more data than a Cholesky factor takes."""

from typing import Any

import torch
from torch import Tensor

from laplace_sampling.gp.linear_operators import gpytorch

__all__ = ["SparseProcess", "fit_sparse_process"]

INDUCING, STEPS, BATCH, STEP_SIZE = 512, 2000, 512, 0.01


class SparseProcess(gpytorch.models.ApproximateGP):
    """Constant mean and a kernel times a scale; inducing points start at data."""

    def __init__(self, inducing: Tensor, kernel: gpytorch.kernels.Kernel) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        mean: Any = self.mean_module(x)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))


def fit_sparse_process(
    x: Tensor,
    y: Tensor,
    seed: int,
    *,
    num_inducing: int | None = None,
    steps: int | None = None,
    kernel: gpytorch.kernels.Kernel | None = None,
) -> tuple[SparseProcess, float]:
    """The process after steps of Adam on the bound of the evidence, `x` `[N, D]`, `y` `[N]`; and its noise variance.

    By default with an RBF kernel that has a length for each input.
    """
    steps, generator = steps or STEPS, torch.Generator().manual_seed(seed)
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1]) if kernel is None else kernel
    order = torch.randperm(len(x), generator=generator)
    model = SparseProcess(x[order[: num_inducing or INDUCING]].clone(), kernel)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the variational mean starts with noise
        for _ in range(steps):
            batch = torch.randint(len(y), (min(BATCH, len(y)),), generator=generator)
            optimiser.zero_grad()
            loss: Any = bound(model(x[batch]), y[batch])
            (-loss).backward()
            optimiser.step()
            schedule.step()
    return model.eval(), float(likelihood.noise.detach())
