"""Gaussian processes of GPyTorch as regressors: RBF on the inputs, and on the last hidden layer of a network."""

import copy
import math
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.gp.regression_task import Outcome, Task, gaussian
from laplace_sampling.gp.linear_operators import gpytorch, settings, to_dense, to_linear_operator

__all__ = ["Process", "deep_kernel", "fit_process", "gaussian_process"]

PROCESS_STEPS, KERNEL_STEPS = 50, 30  # of L-BFGS


class Process(gpytorch.models.ExactGP):
    """Constant mean, RBF kernel on the inputs or on features of them."""

    def __init__(self, task: Task, features: nn.Module | None = None) -> None:
        x, y = task.x, task.y
        bound = gpytorch.constraints.GreaterThan(task.noise_floor**2)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=bound).double())
        self.features = features or nn.Identity()
        self.mean_module = gpytorch.means.ConstantMean()
        rbf = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1] if features is None else None)
        self.covar_module = gpytorch.kernels.ScaleKernel(rbf)
        self.double()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        z = self.features(x)
        mean = cast(Tensor, self.mean_module(z))
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(z))


class Marginal(torch.autograd.Function):
    """`log N(r; 0, K)` of a dense matrix; its derivative by the inverse, a quarter of the work of autograd's."""

    @staticmethod
    def forward(ctx: Any, K: Tensor, r: Tensor) -> Tensor:
        with warnings.catch_warnings(), settings.cholesky_max_tries(8):
            warnings.simplefilter("ignore")  # where it adds to the diagonal
            factor = to_dense(to_linear_operator(K).cholesky())
        inverse = torch.cholesky_inverse(factor)
        a = inverse @ r
        ctx.save_for_backward(inverse, a)
        return -0.5 * (r @ a + len(r) * math.log(2 * math.pi)) - factor.diagonal().log().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inverse, a = ctx.saved_tensors
        return grads[0] * 0.5 * (torch.outer(a, a) - inverse), -grads[0] * a


def fit_process(model: Process, x_test: Tensor, steps: int) -> Outcome:
    """L-BFGS on the marginal likelihood; Cholesky factors throughout."""
    likelihood: Any = model.likelihood
    x, y = cast(tuple[Tensor], model.train_inputs), cast(Tensor, model.train_targets)
    model.train()
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, max_eval=steps * 5 // 4, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        prior = likelihood(model(*x))
        loss = -Marginal.apply(prior.covariance_matrix, y - prior.mean) / len(y)
        loss.backward()
        return loss

    with gpytorch.settings.max_cholesky_size(10**6), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimiser.step(closure)
        model.eval()
        with torch.no_grad():
            prediction = likelihood(model(x_test))
    return gaussian(prediction.mean, prediction.stddev, noise=float(likelihood.noise.detach()) ** 0.5)


def gaussian_process(task: Task) -> Outcome:
    return fit_process(Process(task), task.x_test, PROCESS_STEPS)


def deep_kernel(task: Task) -> Outcome:
    """RBF on the last hidden layer of the trained network, all weights trained on (Wilson et al. 2016)."""
    features = copy.deepcopy(task.map)
    assert isinstance(features, nn.Sequential)
    return fit_process(Process(task, features[:-1]), task.x_test, KERNEL_STEPS)
