"""Models of GPyTorch on data that their kernels take."""

from typing import Any

import gpytorch
import torch
from torch import Tensor, nn

from laplace_sampling.gp.tangent_kernel import TangentKernel
from laplace_sampling.kernels import TanimotoKernel

kernels: Any = gpytorch.kernels


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, kernel: Any, noise: float | Tensor) -> None:
        if isinstance(noise, Tensor):
            likelihood: Any = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
        else:
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            likelihood.noise = noise
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.mean_module.constant.data.fill_(0.3)
        self.covar_module = kernel

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def scaled(kernel: Any, variance: float = 0.7) -> Any:
    kernel = kernels.ScaleKernel(kernel)
    kernel.outputscale = variance
    return kernel


def with_lengthscale(kernel: Any, *lengthscale: float) -> Any:
    kernel.lengthscale = torch.tensor(lengthscale)
    return kernel


def index() -> Any:
    torch.manual_seed(0)
    return kernels.IndexKernel(num_tasks=3, rank=2, active_dims=[3])


def tangent() -> Any:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return TangentKernel(network, prior_precision=4.0, active_dims=[0, 1, 2])


# Inputs have three columns of numbers, one of labels and sixteen of counts.
NUMBERS = {"active_dims": [0, 1, 2]}
COUNTS = list(range(4, 20))


def rational_quadratic() -> Any:
    kernel = with_lengthscale(kernels.RQKernel(**NUMBERS), 0.8)
    kernel.alpha = 1.5
    return kernel


def periodic() -> Any:
    kernel = with_lengthscale(kernels.PeriodicKernel(active_dims=[0, 1]), 1.5)
    kernel.period_length = 0.9
    return kernel


KERNELS = {
    "rbf": lambda: with_lengthscale(kernels.RBFKernel(ard_num_dims=3, **NUMBERS), 0.5, 1.0, 2.0),
    "matern-1/2": lambda: with_lengthscale(kernels.MaternKernel(nu=0.5, **NUMBERS), 1.0),
    "matern-3/2": lambda: with_lengthscale(kernels.MaternKernel(nu=1.5, **NUMBERS), 0.7),
    "matern-5/2": lambda: scaled(with_lengthscale(kernels.MaternKernel(nu=2.5, active_dims=[2, 0]), 0.7)),
    "rational quadratic": rational_quadratic,
    "periodic": periodic,
    "linear": lambda: kernels.LinearKernel(active_dims=[1, 2]),
    "index": index,
    "tanimoto": lambda: TanimotoKernel(active_dims=COUNTS),
    "tangent": tangent,
    "sum": lambda: scaled(kernels.RBFKernel(active_dims=[0])) + kernels.LinearKernel(active_dims=[1]),
    "product": lambda: scaled(kernels.RBFKernel(active_dims=[0, 1]) * kernels.MaternKernel(nu=1.5, active_dims=[2])),
    "of tasks": lambda: (kernels.MaternKernel(active_dims=[0, 1]) + kernels.ConstantKernel()) * index(),
    "of molecules": lambda: TanimotoKernel(active_dims=COUNTS) * kernels.RBFKernel(active_dims=[0, 1]),
    "network and rest": lambda: scaled(tangent(), 0.5) + scaled(kernels.RBFKernel(**NUMBERS)),
}


def inputs(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (n, 1), generator=generator).double()
    counts = torch.poisson(torch.full((n, 16), 0.7, dtype=torch.float64), generator=generator)
    return torch.cat([numbers, labels, counts], dim=1)


def model(kernel: Any, n: int = 150, noise: float | Tensor = 0.05) -> Model:
    x = inputs(n)
    generator = torch.Generator().manual_seed(1)
    y = (4 * x[:, 0]).sin() + 0.3 * x[:, 3] + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return Model(x, y, kernel, noise).double().eval()
