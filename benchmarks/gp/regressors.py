"""Regressors that `benchmarks.gp.uci` compares: each gives the predictive distribution of a test set."""

import copy
import warnings
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gp.processes import deep_kernel, gaussian_process
from benchmarks.gp.regression_task import MEMBERS, Method, Outcome, Task, best_noise, gaussian, predict
from laplace_sampling.gp.evidence import HyperparameterBounds, Optimum
from laplace_sampling.gp.posterior import GramCovariance, GramPosterior, of_largest_evidence
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.as_prior import as_prior

__all__ = ["METHODS", "WITHOUT_NETWORK", "fit_tangent"]

DROPOUT_RATES, DROPOUT_STEPS, DROPOUT_SAMPLES = (0.01, 0.05), 300, 100


def map_training(task: Task) -> Outcome:
    noise = float((predict(task.map, task.x) - task.y).square().mean().sqrt())
    return gaussian(predict(task.map, task.x_test), noise, noise=noise, weight_decay=task.weight_decay)


def map_held_out(task: Task) -> Outcome:
    noise = task.held_out_noise
    return gaussian(predict(task.map, task.x_test), noise, noise=noise, weight_decay=task.weight_decay)


@lru_cache(maxsize=8)
def fit_tangent(task: Task, prior: str, linear_model: str, noise_at: str) -> tuple[GramPosterior, Optimum]:
    """The tangent model with prior and noise precision from the evidence, exactly, in observation space."""
    network, features, _ = task.tangent
    f = network(task.x)
    offset = torch.zeros_like(f)
    if linear_model == "affine":
        offset = f - features.outputs(network.weights[None])[0]
    model = LinearModel(features, offset, f, task.y.reshape(f.shape), Gaussian(noise_at=noise_at))
    start = as_prior(prior).build(model.ggn(f), network.layers(), Draws(64, 0).noise(1))
    return of_largest_evidence(model, start, HyperparameterBounds(noise=(1e-12, task.noise_floor**-2)))


def ours(prior: str, linear_model: str, *, noise_at: str = "network", mean: str = "network") -> Method:
    """The linearised Laplace approximation; its mean is the network's output, or that of the tangent model."""

    def method(task: Task) -> Outcome:
        network, _, features = task.tangent
        posterior, optimum = fit_tangent(task, prior, linear_model, noise_at)
        alpha, b = posterior.precisions
        stddev = GramCovariance(posterior, features).variance()[:, 0].sqrt()
        means = network(task.x_test)[:, 0]
        if mean == "tangent":
            offset = means - features.outputs(network.weights[None])[0, :, 0] if linear_model == "affine" else 0.0
            means = offset + features.outputs(posterior.mode_weights()[None])[0, :, 0]
        return gaussian(
            means,
            (stddev.square() + 1 / b).sqrt(),
            noise=b**-0.5,
            precision=alpha,
            function=float(stddev.mean()),
            effective_dimension=posterior.effective_dimension(),
            log_evidence=optimum.log_evidence / len(task.y),
        )

    return method


def laplace_torch(task: Task) -> Outcome:
    """Its full Hessian, prior and noise by its documented recipe: 1,000 steps of Adam on its marginal likelihood.

    Log determinants come from the eigenvalues of its Hessian, the same numbers as from its own factorisation of the
    posterior precision in each step, which would take hours.
    """
    # an optional package, of the extra `bench`
    from laplace import FullLaplace  # pyright: ignore[reportMissingImports]
    from laplace.curvature import BackPackGGN  # pyright: ignore[reportMissingImports]

    class Full(FullLaplace):
        @cached_property
        def _eigenvalues(self) -> Tensor:
            zeros = torch.zeros(max(0, self.n_params - len(task.y)), dtype=torch.float64)
            return torch.cat([torch.linalg.eigvalsh(J @ J.T if len(zeros) else J.T @ J).clamp_min(0), zeros])

        @property
        def log_det_posterior_precision(self) -> Tensor:
            return (self._H_factor * self._eigenvalues + self.prior_precision).log().sum()

    network, J = copy.deepcopy(task.map), task.tangent[1].matrix[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Full(network, "regression", backend=BackPackGGN)
        la.fit(DataLoader(TensorDataset(task.x, task.y[:, None]), batch_size=256))
        log_prior = torch.ones(1, dtype=torch.float64, requires_grad=True)
        log_noise = torch.ones(1, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([log_prior, log_noise], lr=0.1)
        for _ in range(1000):
            optimiser.zero_grad()
            (-la.log_marginal_likelihood(log_prior.exp(), log_noise.exp())).backward()
            optimiser.step()
            if max(float(v.grad.abs()) for v in (log_prior, log_noise) if v.grad is not None) < 1e-3:
                break
        la.prior_precision, la.sigma_noise = log_prior.detach().exp(), log_noise.detach().exp()
        mean, variance = la(task.x_test)
    noise = float(la.sigma_noise)
    stddev = (variance.detach().flatten() + noise**2).sqrt()
    return gaussian(mean[:, 0], stddev, noise=noise, precision=float(la.prior_precision))


def train_dropout(trained: nn.Module, network: nn.Module, x: Tensor, y: Tensor, task: Task) -> nn.Module:
    """Adam from the weights of a network trained without dropout, on all data, the step size going to zero."""
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(trained.parameters()), network.parameters())
    decay = task.weight_decay / len(y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        optimiser = torch.optim.Adam(network.parameters(), lr=0.005, weight_decay=decay, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, DROPOUT_STEPS)
        for _ in range(DROPOUT_STEPS):
            optimiser.zero_grad()
            (0.5 * (network(x)[:, 0] - y).square().mean()).backward()
            optimiser.step()
            schedule.step()
    return network


def dropout_means(network: nn.Module, x: Tensor, seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([predict(network, x) for _ in range(DROPOUT_SAMPLES)])


def mc_dropout(task: Task) -> Outcome:
    """Monte Carlo dropout; validation chooses rate and noise (Gal & Ghahramani 2016)."""
    x, y, x_new, y_new = task.held_out
    tried = []
    for rate in DROPOUT_RATES:
        network = train_dropout(task.held_out_map, task.network(dropout=rate), x, y, task)
        noise, log_likelihood = best_noise(dropout_means(network, x_new, task.seed), y_new)
        tried.append((log_likelihood, rate, noise))
    _, rate, noise = max(tried)
    network = train_dropout(task.map, task.network(dropout=rate), task.x, task.y, task)
    return gaussian(dropout_means(network, task.x_test, task.seed), noise, noise=noise, rate=rate)


def ensemble(task: Task) -> Outcome:
    """Networks from different initial weights, the first that of MAP; validation chooses the noise."""
    noise, _ = best_noise(task.held_out_means, task.held_out[3])
    others = [task.trained(task.x, task.y, task.weight_decay, k) for k in range(1, MEMBERS)]
    means = torch.stack([predict(network, task.x_test) for network in [task.map, *others]])
    return gaussian(means, noise, noise=noise)


# In the order of the tables. Methods without a network do not depend on its depth.
METHODS: dict[str, Method] = {
    "MAP, noise of training residuals": map_training,
    "MAP, noise of held-out residuals": map_held_out,
    "ours, affine, isotropic": ours("isotropic", "affine"),
    "ours, affine, g-prior": ours("g-prior", "affine"),
    "ours, homogeneous, isotropic": ours("isotropic", "homogeneous"),
    "ours, homogeneous, g-prior": ours("g-prior", "homogeneous"),
    "ours, affine, isotropic, noise of the mode": ours("isotropic", "affine", noise_at="mode"),
    "ours, affine, isotropic, mean of the tangent model": ours("isotropic", "affine", mean="tangent"),
    "ours, affine, g-prior, mean of the tangent model": ours("g-prior", "affine", mean="tangent"),
    "ours, affine, isotropic, mean and noise of the mode": ours("isotropic", "affine", noise_at="mode", mean="tangent"),
    "laplace-torch, full": laplace_torch,
    "MC dropout": mc_dropout,
    "ensemble of 5": ensemble,
    "GP, RBF": gaussian_process,
    "deep kernel": deep_kernel,
}
WITHOUT_NETWORK = ("GP, RBF",)
