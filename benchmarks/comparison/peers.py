"""Methods without a Laplace approximation, each in a few lines: what a user would try instead.

Validation data choose what has to be chosen: the dropout rate, and the noise of a regression.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.comparison.metrics import best_scale, label_log_likelihoods
from benchmarks.comparison.networks import SPECTRAL
from benchmarks.comparison.predictions import Fitted, log_mean_exp, prediction, targets
from benchmarks.comparison.spectral import head_of, posterior_factors
from benchmarks.comparison.training import Problem, outputs_of

Draw = Callable[[Tensor], Tensor]  # outputs of K networks, `[K, N, ...]`

MEMBERS = 5
# Few validation data without an error would take the temperature to zero.
TEMPERATURES = 1 / 3, 20.0
DROPOUT_RATES, DROPOUT_SAMPLES = (0.05, 0.2), 64
SNGP_SAMPLES = 64


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


def by_members(problem: Problem, draw: Draw, epochs: float, **details: float) -> Fitted:
    """Predictions of a mixture of networks; the noise of a regression by validation."""
    validation = problem.data.validation
    noise = residuals(problem, validation.y, draw(validation.x))
    return Fitted(lambda x: prediction(problem.likelihood, draw(x), noise), epochs, details)


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
    return by_members(problem, draw, (MEMBERS - 1) * problem.epochs)


def short_ensemble(problem: Problem) -> Fitted:
    """Five networks that are each trained for a fifth of the steps: together as long as the network of MAP."""
    recipe = replace(problem.recipe, steps=max(1, problem.recipe.steps // MEMBERS))
    short = replace(problem, recipe=recipe)
    draw = members([short.trained(k) for k in range(MEMBERS)])
    return by_members(problem, draw, MEMBERS * short.epochs)


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

    return by_members(problem, draw, problem.epochs + 1)


def mc_dropout(problem: Problem) -> Fitted:
    """Monte Carlo dropout: training and prediction with dropout (Gal & Ghahramani 2016)."""
    rate, draw = best_dropout(problem)
    return by_members(problem, draw, len(DROPOUT_RATES) * problem.epochs, rate=rate)


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
