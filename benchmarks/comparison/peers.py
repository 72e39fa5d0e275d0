"""Methods without a Laplace approximation, each in a few lines: what a user would try instead.

Validation data choose what has to be chosen: the dropout rate, the step size of SWAG, the weight of the divergence in
mean-field inference, and the noise of a regression.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.comparison.metrics import best_scale, label_log_likelihoods
from benchmarks.comparison.networks import SPECTRAL
from benchmarks.comparison.predictions import Fitted, log_mean_exp, prediction, targets
from benchmarks.comparison.spectral import head_of, posterior_factors
from benchmarks.comparison.training import Problem, loss_of, outputs_of

__all__ = [
    "best_dropout",
    "deep_ensemble",
    "mc_dropout",
    "mean_field",
    "network_alone",
    "short_ensemble",
    "sngp",
    "swag",
    "temperature_scaling",
]

Draw = Callable[[Tensor], Tensor]  # outputs of K networks, `[K, N, ...]`

MEMBERS = 5
# Few validation data without an error would take the temperature to zero.
TEMPERATURES = 1 / 3, 20.0
DROPOUT_RATES, DROPOUT_SAMPLES = (0.05, 0.2), 64
SNGP_SAMPLES = 64
SWAG_STEP_SIZES, SWAG_SAMPLES, SWAG_RANK, SWAG_STEPS, SWAG_EVERY = (0.01, 0.05), 30, 20, 600, 20
DIVERGENCE_WEIGHTS, MEAN_FIELD_STEPS, MEAN_FIELD_SAMPLES = (1.0, 0.1), 1000, 64


def network_alone(problem: Problem) -> Fitted:
    """The network alone (MAP); the noise of a regression is that of its training residuals."""
    train, network = problem.data.train, problem.network
    noise = residuals(problem, train.y, outputs_of(network, train.x)[None])
    return Fitted(lambda x: prediction(problem.likelihood, outputs_of(network, x)[None], noise))


def temperature_scaling(problem: Problem, oracle: bool = False) -> Fitted:
    """Finds the temperature, or the noise of a regression, of largest validation (or test) log-likelihood."""
    part = problem.data.test if oracle else problem.data.validation
    outputs = outputs_of(problem.network, part.x)[None]
    noise, temperature = residuals(problem, part.y, outputs), 1.0
    if problem.likelihood != "regression":
        y = targets(problem.likelihood, part.y)

        def loss(log_temperature: float) -> float:
            p = prediction(problem.likelihood, outputs, temperature=math.exp(log_temperature))
            return -float(label_log_likelihoods(p, y).mean())

        temperature = best_scale(loss, *TEMPERATURES)

    def predict(x: Tensor):
        return prediction(problem.likelihood, outputs_of(problem.network, x)[None], noise, temperature)

    return Fitted(predict, details={"temperature": temperature})


def residuals(problem: Problem, y: Tensor, outputs: Tensor) -> float:
    """The mean squared residual that the spread of the members does not explain; zero for classes."""
    if problem.likelihood != "regression":
        return 0.0
    missing = (outputs.mean(0) - y).square().mean() - outputs.var(0, correction=0).mean()
    return max(float(missing), 1e-6)


def by_members(problem: Problem, draw: Draw, passes: float, products: float, **details: float) -> Fitted:
    """Predictions of a mixture of networks; the noise of a regression by validation."""
    validation = problem.data.validation
    noise = residuals(problem, validation.y, draw(validation.x))
    return Fitted(lambda x: prediction(problem.likelihood, draw(x), noise), passes, products, details)


def best(problem: Problem, candidates: Iterable[tuple[float, Draw]]) -> tuple[float, Draw]:
    """The candidate of largest validation log-likelihood."""
    part = problem.data.validation
    y = targets(problem.likelihood, part.y)

    def value(draw: Draw) -> float:
        outputs = draw(part.x)
        p = prediction(problem.likelihood, outputs, residuals(problem, part.y, outputs))
        log_likelihood = float(log_mean_exp(label_log_likelihoods(p, y)).mean())
        return log_likelihood if math.isfinite(log_likelihood) else -math.inf

    return max(candidates, key=lambda pair: value(pair[1]))


def members(networks: Sequence[nn.Module]) -> Draw:
    return lambda x: torch.stack([outputs_of(network, x) for network in networks])


def deep_ensemble(problem: Problem) -> Fitted:
    """Five networks from different starts, the first that of MAP (Lakshminarayanan et al. 2017)."""
    draw = members([problem.network, *(problem.trained(k) for k in range(1, MEMBERS))])
    return by_members(problem, draw, (MEMBERS - 1) * problem.epochs, MEMBERS)


def short_ensemble(problem: Problem) -> Fitted:
    """Five networks that are each trained for a fifth of the steps: together as long as the network of MAP."""
    recipe = replace(problem.recipe, steps=max(1, problem.recipe.steps // MEMBERS))
    short = replace(problem, recipe=recipe)
    draw = members([short.trained(k) for k in range(MEMBERS)])
    return by_members(problem, draw, MEMBERS * short.epochs, MEMBERS)


def sngp(problem: Problem) -> Fitted:
    """A spectral-normalised network with a Gaussian process as last layer, trained with the prior of its weights."""
    train = problem.data.train
    recipe = replace(problem.recipe, weight_decay=max(problem.recipe.weight_decay, 1 / len(train.y)))
    network = replace(problem, architecture=problem.architecture + SPECTRAL, recipe=recipe).trained()
    head = head_of(network)

    def features(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        with head.register_forward_pre_hook(lambda _, inputs: kept.append(head.features(inputs[0]))):
            outputs_of(network, x)
        return torch.cat(kept)

    factors = posterior_factors(features(train.x), outputs_of(network, train.x).softmax(-1))
    generator = torch.Generator().manual_seed(problem.seed)
    noise = torch.randn(SNGP_SAMPLES, *factors.shape[:2], generator=generator, dtype=factors.dtype)
    # Of the precision LLᵀ, L⁻ᵀz has its inverse as covariance.
    deviations = torch.linalg.solve_triangular(factors.mT, noise[..., None], upper=True)[..., 0]

    def draw(x: Tensor) -> Tensor:
        spread = torch.einsum("nd,kcd->knc", features(x).double(), deviations)
        return outputs_of(network, x) + spread.float()

    return by_members(problem, draw, problem.epochs + 1, 1)


def mc_dropout(problem: Problem) -> Fitted:
    """Monte Carlo dropout: training and prediction with dropout (Gal & Ghahramani 2016)."""
    rate, draw = best_dropout(problem)
    return by_members(problem, draw, len(DROPOUT_RATES) * problem.epochs, DROPOUT_SAMPLES, rate=rate)


def best_dropout(problem: Problem) -> tuple[float, Draw]:
    """The dropout rate of the best predictions, and these predictions."""

    def draws(network: nn.Module) -> Draw:
        def draw(x: Tensor) -> Tensor:
            for module in network.modules():
                if isinstance(module, nn.Dropout):
                    module.train()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(problem.seed)
                return torch.stack([outputs_of(network, x) for _ in range(DROPOUT_SAMPLES)])

        return draw

    return best(problem, [(rate, draws(problem.trained(dropout=rate))) for rate in DROPOUT_RATES])


def swag(problem: Problem) -> Fitted:
    """A Gaussian around the iterates of SGD with a constant step size, diagonal and low rank (Maddox et al. 2019)."""
    runs = ((size, members(swag_networks(problem, size))) for size in SWAG_STEP_SIZES)
    size, draw = best(problem, runs)
    train, recipe = problem.data.train, problem.recipe
    passes = len(SWAG_STEP_SIZES) * (SWAG_STEPS * recipe.batch_size / len(train.y) + SWAG_SAMPLES)
    return by_members(problem, draw, passes, SWAG_SAMPLES, step_size=size)


def swag_networks(problem: Problem, step_size: float) -> list[nn.Module]:
    """Samples of the Gaussian, each with batch-norm statistics computed again; MAP itself where SGD diverges."""
    train, recipe, network = problem.data.train, problem.recipe, copy.deepcopy(problem.network).train()
    loss, generator = loss_of(problem.likelihood), torch.Generator().manual_seed(problem.seed)
    optimiser = torch.optim.SGD(network.parameters(), step_size, momentum=0.9, weight_decay=recipe.weight_decay)
    weights: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed)
        for step in range(SWAG_STEPS):
            batch = torch.randperm(len(train.y), generator=generator)[: recipe.batch_size]
            optimiser.zero_grad()
            loss(network(train.x[batch]), train.y[batch]).backward()
            optimiser.step()
            if (step + 1) % SWAG_EVERY == 0:
                weights.append(parameters_to_vector(network.parameters()).detach())
    iterates = torch.stack(weights)
    if not iterates.isfinite().all():
        return [problem.network]
    samples = swag_samples(iterates, SWAG_SAMPLES, SWAG_RANK, generator)
    return [with_weights(problem.network, sample, train.x) for sample in samples]


def swag_samples(iterates: Tensor, num: int, rank: int, generator: torch.Generator) -> Tensor:
    """`w̄ + Σ_diag^{1/2} z₁/√2 + D z₂/√(2(r − 1))`, `D` the deviations of the last `r` iterates `[T, P]`."""
    mean, variance = iterates.mean(0), iterates.var(0, correction=0)
    deviations = iterates[-rank:] - mean
    first = torch.randn(num, len(mean), generator=generator)
    second = torch.randn(num, len(deviations), generator=generator)
    return mean + variance.sqrt() * first / math.sqrt(2) + second @ deviations / math.sqrt(2 * (len(deviations) - 1))


def with_weights(network: nn.Module, weights: Tensor, x: Tensor) -> nn.Module:
    """A copy with other weights, and statistics of batch norm from the inputs."""
    network = copy.deepcopy(network)
    vector_to_parameters(weights, network.parameters())
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
    if norms:
        network.train()
        outputs_of(network, x[:2000])
    return network.eval()


def mean_field(problem: Problem) -> Fitted:
    """Independent Gaussians for all weights, standard normal prior, by a reparameterised bound (Blundell et al. 2015).

    It starts at the network of MAP, and its batch norm keeps those statistics.
    """
    weight, draw = best(problem, ((w, mean_field_draws(problem, w)) for w in DIVERGENCE_WEIGHTS))
    passes = len(DIVERGENCE_WEIGHTS) * MEAN_FIELD_STEPS * problem.recipe.batch_size / len(problem.data.train.y)
    return by_members(problem, draw, passes, MEAN_FIELD_SAMPLES, divergence_weight=weight)


def mean_field_draws(problem: Problem, divergence_weight: float) -> Draw:
    train, network, num = problem.data.train, problem.network, len(problem.data.train.y)
    start = parameters_to_vector(network.parameters()).detach()
    mean = start.clone().requires_grad_()
    log_scale = torch.full_like(start, math.log(0.01)).requires_grad_()
    noise = torch.tensor(math.log(problem_noise(problem))).requires_grad_()
    optimiser = torch.optim.Adam([mean, log_scale, noise], 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, MEAN_FIELD_STEPS)
    generator, loss = torch.Generator().manual_seed(problem.seed), loss_of(problem.likelihood)

    def outputs(x: Tensor, weights: Tensor) -> Tensor:
        return functional_call(network, unflatten(network, weights), (x,))

    for _ in range(MEAN_FIELD_STEPS):
        batch = torch.randint(num, (problem.recipe.batch_size,), generator=generator)
        weights = mean + log_scale.exp() * torch.randn(len(mean), generator=generator)
        fit = loss(outputs(train.x[batch], weights), train.y[batch])
        if problem.likelihood == "regression":
            fit = fit / noise.exp() + 0.5 * noise
        divergence = gaussian_divergence(mean, log_scale)
        optimiser.zero_grad()
        (fit + divergence_weight * divergence / num).backward()
        optimiser.step()
        schedule.step()
    samples = mean + log_scale.exp() * torch.randn(MEAN_FIELD_SAMPLES, len(mean), generator=generator)

    def draw(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([outputs(x, sample) for sample in samples])

    return draw


def gaussian_divergence(mean: Tensor, log_scale: Tensor) -> Tensor:
    """`KL(N(μ, diag σ²) ‖ N(0, I))`."""
    return 0.5 * (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1).sum()


def problem_noise(problem: Problem) -> float:
    train = problem.data.train
    return residuals(problem, train.y, outputs_of(problem.network, train.x)[None]) or 1.0


def unflatten(network: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    parameters = dict(network.named_parameters())
    pieces = flat.split([p.numel() for p in parameters.values()])
    return {name: piece.reshape(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}
