"""Markov chains over the weights of a network: Hamiltonian Monte Carlo, and stochastic gradients with noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Potential = Callable[[Tensor], Tensor]  # minus the log density `[C]` of weights `[C, P]`, up to a constant
Root = Callable[[Tensor], Tensor]  # the product of a symmetric matrix for each chain with vectors `[C, P]`

# Dual averaging as in Hoffman & Gelman (2014), towards this part of accepted trajectories.
ACCEPTANCE, SHRINKAGE, EARLY, DECAY = 0.8, 0.05, 10, 0.75
# Steps to start from, in weights and in standard deviations.
FIRST_STEP, FIRST_WHITENED_STEP = 1e-3, 0.1
METRICS = 3


class Steps:
    """The step of each chain, `[C, 1]`, by dual averaging."""

    def __init__(self, num: int, first: float) -> None:
        self.count, self.centre = 0, math.log(10 * first)
        self.error, self.average = torch.zeros(num, 1), torch.zeros(num, 1)
        self.now = torch.full((num, 1), first)

    def update(self, probability: Tensor) -> None:
        self.count += 1
        self.error += (ACCEPTANCE - probability[:, None] - self.error) / (self.count + EARLY)
        log_step = self.centre - math.sqrt(self.count) / SHRINKAGE * self.error
        self.average += self.count**-DECAY * (log_step - self.average)
        self.now = log_step.exp()


@dataclass(frozen=True)
class Chains:
    """Draws `[C, T, P]` after the adaptation, and the step and the accepted part of each chain, `[C]`."""

    draws: Tensor
    step: Tensor
    acceptance: Tensor


def hmc(
    potential: Potential,
    starts: Tensor,
    trajectories: int,
    generator: torch.Generator,
    whiten: Callable[[Tensor], Root] | None = None,
    leapfrogs: int = 200,
) -> Chains:
    """Chains from starts `[C, P]`, side by side; each has a step of its own, fixed after a third of the trajectories.

    `whiten` gives the root of a covariance of the weights around where the chains are, in whose coordinates they move:
    it is asked three times during the adaptation. Steps vary by a fifth from one trajectory to the next, lest a
    trajectory be a period of the posterior.
    """

    def slope(at: Tensor) -> tuple[Tensor, Tensor]:
        at = at.detach().requires_grad_()
        value = potential(at)
        return value.detach(), torch.autograd.grad(value.sum(), at)[0]

    def random(function: Callable[..., Tensor], *size: int) -> Tensor:
        return function(*size, generator=generator, dtype=starts.dtype)

    root: Root = torch.clone
    weights, (value, gradient), num = starts, slope(starts), len(starts)
    adapting, draws, accepted = trajectories // 3, [], []
    changes = [adapting * (k + 1) // (METRICS + 1) for k in range(METRICS)] if whiten else []
    steps = Steps(num, FIRST_STEP)
    for trajectory in range(trajectories):
        if whiten is not None and trajectory in changes:
            root, steps = whiten(weights), Steps(num, FIRST_WHITENED_STEP)
        step = steps.now * (0.8 + 0.4 * random(torch.rand, num, 1))
        momentum = random(torch.randn, *starts.shape)
        before = value + 0.5 * momentum.square().sum(1)
        end, end_value, end_gradient = weights, value, gradient
        momentum = momentum - 0.5 * step * root(gradient)
        for leap in range(leapfrogs):
            end = end + step * root(momentum)
            end_value, end_gradient = slope(end)
            momentum = momentum - (1.0 if leap < leapfrogs - 1 else 0.5) * step * root(end_gradient)
        # A trajectory that runs off to infinity is refused.
        probability = (before - end_value - 0.5 * momentum.square().sum(1)).exp().clamp(max=1).nan_to_num(0.0)
        keep = random(torch.rand, num) < probability
        weights, gradient = (torch.where(keep[:, None], *p) for p in ((end, weights), (end_gradient, gradient)))
        value = torch.where(keep, end_value, value)
        if trajectory < adapting:
            steps.update(probability)
            steps.now = steps.average.exp() if trajectory == adapting - 1 else steps.now
        else:
            draws.append(weights)
            accepted.append(probability)
    return Chains(torch.stack(draws, 1), steps.now[:, 0], torch.stack(accepted).mean(0))


def tangent_root(jacobian: Tensor, noise: float, precision: float) -> Root:
    """`(αI + JᵀJ/σ²)^{−1/2}` of each chain, for the tangents `J` `[C, N, P]` where it is, by singular vectors."""
    _, singular, vectors = torch.linalg.svd(jacobian, full_matrices=False)
    ratios = singular.square() / (noise * precision)
    # Directions about which the data say less than the prior may keep the deviation of the prior.
    rank = max(1, int((ratios > 1).sum(1).max()))
    vectors, change = vectors[:, :rank], (1 + ratios[:, None, :rank]).rsqrt() - 1

    def root(of: Tensor) -> Tensor:
        return (of + ((of[:, None] @ vectors.mT * change) @ vectors)[:, 0]) / math.sqrt(precision)

    return root


def split_r_hat(draws: Tensor) -> Tensor:
    """Split-R̂ (Gelman et al. 2013) of quantities `[N]` that chains draw, `[C, T, N]`: 1 where they agree."""
    half = draws.shape[1] // 2
    halves = torch.cat([draws[:, :half], draws[:, half : 2 * half]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return ((half - 1) / half + between / within).sqrt()


def sgld(
    loss: Callable[[Tensor, Tensor], Tensor],
    precision: float,
    start: Tensor,
    num_data: int,
    step: float,
    epochs: tuple[int, int],
    keep: int,
    generator: torch.Generator,
    batch: int = 100,
) -> Tensor:
    """Stochastic gradient Langevin dynamics (Welling & Teh 2011): `keep` draws `[keep, P]` from the start `[P]`.

    `loss(w, rows)` is minus the log-likelihood of some data. The step stays the same: where it falls with the epochs,
    as in Ober (2022), the weights hardly move from their start within the epochs that there are.
    """
    burn_in, kept = epochs
    every, weights, draws = max(1, kept // keep), start, []
    for epoch in range(burn_in + every * keep):
        for rows in torch.randperm(num_data, generator=generator).split(batch):
            at = weights.detach().requires_grad_()
            gradient = torch.autograd.grad(loss(at, rows), at)[0] * num_data / len(rows) + precision * weights
            noise = torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
            weights = weights - 0.5 * step * gradient + math.sqrt(step) * noise
        if epoch >= burn_in and (epoch - burn_in) % every == every - 1:
            draws.append(weights)
    return torch.stack(draws)
