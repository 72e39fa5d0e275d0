"""Regressors that `benchmarks.uci` compares: each gives the predictive distribution of a test set.

Inputs and targets are standardised, everything is in float64 and deterministic by seed, and nothing sees test targets.
What has to be chosen is chosen on a fifth of the training data that the networks for it have not seen.
"""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import scipy.optimize
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling.gp.linear_operators import gpytorch, settings, to_dense, to_linear_operator
from laplace_sampling.gp.tuned_regression import TunedRegression, fit_exact_regression
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.linear_model.priors import as_prior
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.networks.linearisation import Linearisation

__all__ = ["METHODS", "Outcome", "Task", "fit_tangent", "gaussian", "train"]

WIDTH, MEMBERS = 50, 5
# Weight decays that validation goes down, until its error rises: of the objective `½Σ(y − f)² + ½λ‖w‖²`.
WEIGHT_DECAYS = (10.0, 1.0, 0.1, 0.01, 0.001)
DROPOUT_RATES, DROPOUT_STEPS, DROPOUT_SAMPLES = (0.01, 0.05), 300, 100
# Steps of L-BFGS for networks, and for Gaussian processes.
NETWORK_STEPS, PROCESS_STEPS, KERNEL_STEPS = 500, 50, 30


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

    found: Any = scipy.optimize.minimize_scalar(loss, bounds=(math.log(1e-4), math.log(3.0)), method="bounded")
    return math.exp(found.x), -float(found.fun)


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


def map_training(task: Task) -> Outcome:
    noise = float((predict(task.map, task.x) - task.y).square().mean().sqrt())
    return gaussian(predict(task.map, task.x_test), noise, noise=noise, weight_decay=task.weight_decay)


def map_held_out(task: Task) -> Outcome:
    noise = task.held_out_noise
    return gaussian(predict(task.map, task.x_test), noise, noise=noise, weight_decay=task.weight_decay)


@lru_cache(maxsize=8)
def fit_tangent(task: Task, prior: str, linear_model: str, noise_at: str) -> TunedRegression:
    """The tangent model with prior and noise precision from the evidence, exactly, in observation space."""
    network, features, _ = task.tangent
    f = network(task.x)
    offset = torch.zeros_like(f)
    if linear_model == "affine":
        offset = f - features.outputs(network.weights[None])[0]
    model = LinearModel(features, offset, f, task.y.reshape(f.shape), Gaussian(noise_at=noise_at))
    start = as_prior(prior).build(model.ggn(f), network.layers(), Draws(64, 0).noise(1))
    return fit_exact_regression(model, start, noise_bounds=(1e-12, task.noise_floor**-2))


def ours(prior: str, linear_model: str, *, noise_at: str = "network", mean: str = "network") -> Method:
    """The linearised Laplace approximation; its mean is the network's output, or that of the tangent model."""

    def method(task: Task) -> Outcome:
        network, _, features = task.tangent
        fit = fit_tangent(task, prior, linear_model, noise_at)
        alpha, b = fit.optimum.precision, fit.optimum.noise_precision
        posterior = fit.posterior.at(features)
        stddev, means = posterior.stddev(alpha, b)[:, 0], network(task.x_test)[:, 0]
        if mean == "tangent":
            offset = means - features.outputs(network.weights[None])[0, :, 0] if linear_model == "affine" else 0.0
            means = offset + posterior.mean(alpha, b)[:, 0]
        return gaussian(
            means,
            (stddev.square() + 1 / b).sqrt(),
            noise=b**-0.5,
            precision=alpha,
            function=float(stddev.mean()),
            effective_dimension=float(fit.posterior.effective_dimension(alpha, b)),
            log_evidence=fit.optimum.log_evidence / len(task.y),
        )

    return method


def laplace_torch(task: Task) -> Outcome:
    """Its full Hessian, prior and noise by its documented recipe: 1,000 steps of Adam on its marginal likelihood.

    Log determinants come from the eigenvalues of its Hessian, the same numbers as from its own factorisation of the
    posterior precision in each step, which would take hours.
    """
    # of the extra `bench`
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
    """Rate of dropout and noise by validation (Gal & Ghahramani 2016)."""
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
    """Networks from different starts, the first that of MAP; noise by validation."""
    noise, _ = best_noise(task.held_out_means, task.held_out[3])
    others = [task.trained(task.x, task.y, task.weight_decay, k) for k in range(1, MEMBERS)]
    means = torch.stack([predict(network, task.x_test) for network in [task.map, *others]])
    return gaussian(means, noise, noise=noise)


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
            found = likelihood(model(x_test))
    return gaussian(found.mean, found.stddev, noise=float(likelihood.noise.detach()) ** 0.5)


def gaussian_process(task: Task) -> Outcome:
    return fit_process(Process(task), task.x_test, PROCESS_STEPS)


def deep_kernel(task: Task) -> Outcome:
    """RBF on the last hidden layer of the trained network, all weights trained on (Wilson et al. 2016)."""
    features = copy.deepcopy(task.map)
    assert isinstance(features, nn.Sequential)
    return fit_process(Process(task, features[:-1]), task.x_test, KERNEL_STEPS)


# In the order of the tables. Those of no network do not depend on its depth.
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
