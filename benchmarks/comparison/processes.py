"""Gaussian processes of GPyTorch beside networks: RBF kernels on inputs, on hidden units, and with inducing points."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import Fitted, Prediction, Regressed
from benchmarks.comparison.training import Problem

__all__ = ["deep_kernel", "gaussian_process", "sparse_process"]

SAMPLES, NOISE_FLOOR = 64, 1e-3


def gaussian_process(problem: Problem) -> Fitted:
    """RBF kernel with a length for each input, tuned by marginal likelihood, without a network."""
    return exact(problem, None)


def deep_kernel(problem: Problem) -> Fitted:
    """RBF on the last hidden layer of the network, all weights trained on by it (Wilson et al. 2016)."""
    network = problem.trained().double()
    assert isinstance(network, nn.Sequential)
    return exact(problem, network[:-1])


def exact(problem: Problem, features: nn.Module | None) -> Fitted:
    # Both import gpytorch, which most methods do without.
    from benchmarks.gp import processes
    from benchmarks.gp.regression_task import Task

    train = problem.data.train
    x, y, x_test = (t.double() for t in (train.x, train.y.flatten(), problem.data.test.x))
    task = Task(x, y, x_test, 1, problem.seed, NOISE_FLOOR)
    model = processes.Process(task, features)
    steps = processes.PROCESS_STEPS if features is None else processes.KERNEL_STEPS
    noise = processes.fit_process(model, task.x_test, steps).details["noise"] ** 2

    def posterior(x: Tensor) -> Any:
        with processes.gpytorch.settings.max_cholesky_size(10**6):
            return model(x.double())

    return Fitted(predictions(posterior, noise, problem.seed), details={"noise": noise})


def sparse_process(problem: Problem, **settings: Any) -> Fitted:
    """Inducing points by mini-batches (Hensman et al. 2013); settings are those of `fit_sparse_process`."""
    from benchmarks.gp.sparse import fit_sparse_process

    train = problem.data.train
    model, noise = fit_sparse_process(train.x, train.y.flatten(), problem.seed, **settings)
    return Fitted(predictions(model, noise, problem.seed), details={"noise": noise})


def predictions(posterior: Callable[[Tensor], Any], noise: float, seed: int) -> Callable[[Tensor], Prediction]:
    """Of the function's distribution at inputs; joint draws within 1,000 of them, which are a matrix of that size."""

    def predict(x: Tensor) -> Prediction:
        found = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where it adds to the diagonal
            torch.manual_seed(seed)
            for part in x.split(1000):
                p = posterior(part)
                found.append((p.mean.float(), p.variance.float(), p.rsample(torch.Size([SAMPLES])).float()))
        mean, variance, samples = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        return Regressed(mean, variance + noise, samples, noise, gaussian=True)

    return predict
