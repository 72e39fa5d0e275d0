"""Gaussian processes of GPyTorch beside networks: RBF kernels on inputs, on hidden units, and with inducing points."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import Fitted, Prediction, Regressed
from benchmarks.comparison.training import Problem

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports torch.jit.script
    import gpytorch

SAMPLES, NOISE_FLOOR = 64, 1e-3  # wines come twice, with rounded targets: without a floor the evidence is unbounded
PROCESS_STEPS, KERNEL_STEPS = 50, 30  # of L-BFGS
INDUCING, STEPS, BATCH, STEP_SIZE = 512, 2000, 512, 0.01


class Exact(gpytorch.models.ExactGP):
    """Constant mean, RBF kernel on the inputs or on features of them."""

    def __init__(self, x: Tensor, y: Tensor, features: nn.Module | None) -> None:
        floor = gpytorch.constraints.GreaterThan(NOISE_FLOOR**2)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=floor))
        self.features = features or nn.Identity()
        self.mean_module = gpytorch.means.ConstantMean()
        rbf = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1] if features is None else None)
        self.covar_module = gpytorch.kernels.ScaleKernel(rbf)
        self.double()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        z = self.features(x)
        return gpytorch.distributions.MultivariateNormal(cast(Tensor, self.mean_module(z)), self.covar_module(z))


class Sparse(gpytorch.models.ApproximateGP):
    """Constant mean, RBF kernel with a length for each input; inducing points start at data."""

    def __init__(self, inducing: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        rbf = gpytorch.kernels.RBFKernel(ard_num_dims=inducing.shape[1])
        self.covar_module = gpytorch.kernels.ScaleKernel(rbf)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(cast(Tensor, self.mean_module(x)), self.covar_module(x))


def gaussian_process(problem: Problem) -> Fitted:
    """RBF kernel with a length for each input, tuned by marginal likelihood, without a network."""
    return exact(problem, None, PROCESS_STEPS)


def deep_kernel(problem: Problem) -> Fitted:
    """RBF on the last hidden layer of the network, all weights trained on by it (Wilson et al. 2016)."""
    network = problem.trained().double()
    assert isinstance(network, nn.Sequential)
    return exact(problem, network[:-1], KERNEL_STEPS)


def exact(problem: Problem, features: nn.Module | None, steps: int) -> Fitted:
    """Cholesky factors throughout; L-BFGS on the marginal likelihood."""
    x, y = problem.data.train.x.double(), problem.data.train.y.flatten().double()
    model = Exact(x, y, features).train()
    likelihood: Any = model.likelihood
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, max_eval=steps * 5 // 4, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -cast(Tensor, marginal(model(x), y))
        loss.backward()
        return loss

    with gpytorch.settings.max_cholesky_size(10**6), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where it adds to the diagonal
        optimiser.step(closure)
    model.eval()
    noise = float(likelihood.noise.detach())

    def posterior(x: Tensor) -> Any:
        with gpytorch.settings.max_cholesky_size(10**6):
            return model(x.double())

    return Fitted(predictions(posterior, noise, problem.seed), details={"noise": noise})


def sparse_process(problem: Problem) -> Fitted:
    """Inducing points by mini-batches (Hensman et al. 2013), for more data than a Cholesky factor takes."""
    x, y = problem.data.train.x, problem.data.train.y.flatten()
    generator = torch.Generator().manual_seed(problem.seed)
    model = Sparse(x[torch.randperm(len(x), generator=generator)[:INDUCING]].clone()).train()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed)  # the variational mean starts with noise
        for _ in range(STEPS):
            batch = torch.randint(len(y), (min(BATCH, len(y)),), generator=generator)
            optimiser.zero_grad()
            loss: Any = bound(model(x[batch]), y[batch])
            (-loss).backward()
            optimiser.step()
            schedule.step()
    model.eval()
    noise = float(likelihood.noise.detach())
    return Fitted(predictions(model, noise, problem.seed), details={"noise": noise})


def predictions(posterior: Callable[[Tensor], Any], noise: float, seed: int) -> Callable[[Tensor], Prediction]:
    """Of the function's distribution at inputs; joint draws within 1,000 of them, which are a matrix of that size."""

    def predict(x: Tensor) -> Prediction:
        found = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            for part in x.split(1000):
                p = posterior(part)
                found.append((p.mean.float(), p.variance.float(), p.rsample(torch.Size([SAMPLES])).float()))
        mean, variance, samples = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        return Regressed(mean, variance + noise, samples, noise, gaussian=True)

    return predict
