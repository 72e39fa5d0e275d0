"""Training of networks, to convergence or stopped by validation data, stored on disk; and the problem a method gets."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comparison.networks import build
from benchmarks.data.tasks import Data, Part, Task

__all__ = ["Problem", "Recipe", "loss_of", "outputs_of", "train"]


@dataclass(frozen=True)
class Recipe:
    """Adam with the gradient of a weight decay `λ` of the mean loss; the step size falls to zero over the last part.

    `early` takes the weights of least validation loss, else those of the end.
    """

    weight_decay: float = 0.0
    early: bool = False
    steps: int = 1000
    step_size: float = 3e-3
    batch_size: int = 50
    falling: float = 0.4

    @property
    def name(self) -> str:
        return f"{'decay' if self.weight_decay else 'no decay'}, {'early' if self.early else 'converged'}"


def loss_of(likelihood: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean negative log-likelihood, for a regression half the squared error."""
    if likelihood == "regression":
        return lambda f, y: 0.5 * F.mse_loss(f, y)
    return F.cross_entropy if likelihood == "classification" else F.binary_cross_entropy_with_logits


def outputs_of(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([network(batch) for batch in x.split(1000)])


State = dict[str, Tensor]


def train(network: nn.Module, likelihood: str, data: Data, recipe: Recipe, seed: int) -> dict[str, State]:
    """Network states from one run: at the `end`, and `early`, of least validation loss."""
    loss, generator = loss_of(likelihood), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), recipe.step_size, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (1 - step / recipe.steps) / recipe.falling)
    )
    step, least, early = 0, float("inf"), {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of dropout
        while step < recipe.steps:
            network.train()
            # a last batch of one or two data has no useful statistics
            order = torch.randperm(len(data.train.y), generator=generator)
            for batch in order[: recipe.batch_size * max(1, len(order) // recipe.batch_size)].split(recipe.batch_size):
                optimiser.zero_grad()
                loss(network(data.train.x[batch]), data.train.y[batch]).backward()
                optimiser.step()
                schedule.step()
                step += 1
            network.eval()
            value = float(loss(outputs_of(network, data.validation.x), data.validation.y))
            if value < least:
                least, early = value, copy.deepcopy(network.state_dict())
    return {"end": network.state_dict(), "early": early}


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem that a method gets.

    Attributes:
        task: with its likelihood.
        data: of the seed. Methods look at `test` only if they are called oracles.
        architecture: a name of `benchmarks.comparison.networks`.
        recipe: of training.
        seed: of the first network, and of methods.
        name: of the task.
        networks: a folder for trained networks.
        dropout: the rate with which the network is trained that error bars are for.
    """

    task: Task
    data: Data
    architecture: str
    recipe: Recipe
    seed: int = 0
    name: str = ""
    networks: Path | None = None
    dropout: float = 0.0

    @property
    def likelihood(self) -> str:
        return self.task.likelihood

    @property
    def epochs(self) -> float:
        """Epochs of training."""
        return self.recipe.steps * self.recipe.batch_size / len(self.data.train.y)

    def trained(self, member: int = 0, dropout: float = 0.0) -> nn.Module:
        """A network by the recipe, in evaluation mode; members differ in start and order of data."""
        seed = 1000 * self.seed + member
        shape = self.data.train.x.shape[1:]
        network = build(self.architecture, shape, self.task.outputs, dropout, seed)
        recipe = self.recipe
        key = f"{self.name}, {self.architecture}, {recipe.weight_decay:g}, {recipe.steps}, {dropout:g}, {seed}.pt"
        path = None if self.networks is None else self.networks / key
        if path is not None and path.exists():
            states = torch.load(path, weights_only=True)
        else:
            states = train(network, self.likelihood, self.data, recipe, seed)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(f".{os.getpid()}")
                torch.save(states, temporary)
                temporary.rename(path)  # another process may read it
        network.load_state_dict(states["early" if recipe.early else "end"])
        return network.eval()

    @cached_property
    def network(self) -> nn.Module:
        """The network that gets error bars."""
        return self.trained(dropout=self.dropout) if self.dropout else self.trained()

    def residual_variance(self, part: Part, outputs: Tensor) -> float:
        """Mean squared residual of a regression."""
        return float((outputs - part.y).square().mean())
