"""Training of networks, to convergence or stopped by validation data, stored on disk; and the problem a method gets."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comparison.networks import build
from benchmarks.data.tasks import Data, Task

SHIFT = 2
Stored = TypeVar("Stored")


@dataclass(frozen=True)
class Recipe:
    """Adam with the gradient of a weight decay `λ` of the mean loss; the step size falls to zero over the last part.

    `early` takes the weights of least validation loss, else those of the end. With `augmented` images are shifted by up
    to two pixels, and mirrored if it says so: `"shifts"`, `"shifts and flips"`.
    """

    weight_decay: float = 0.0
    early: bool = False
    steps: int = 1000
    step_size: float = 3e-3
    batch_size: int = 50
    falling: float = 0.4
    augmented: str = ""

    @property
    def name(self) -> str:
        stop = "early" if self.early else "converged"
        return ", ".join(filter(None, ["decay" if self.weight_decay else "no decay", stop, self.augmented]))

    @property
    def run(self) -> str:
        """What makes one run of training differ from others, for names of files."""
        step = "" if self.step_size == 3e-3 else f", {self.step_size:g}"
        batch = "" if self.batch_size == 50 else f", batches of {self.batch_size}"
        return ", ".join(filter(None, [f"{self.weight_decay:g}, {self.steps}{step}{batch}", self.augmented]))


def loss_of(likelihood: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean negative log-likelihood, for a regression half the squared error."""
    if likelihood == "regression":
        return lambda f, y: 0.5 * F.mse_loss(f, y)
    return F.cross_entropy


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
                x = augmented(data.train.x[batch], recipe.augmented, generator)
                loss(network(x), data.train.y[batch]).backward()
                optimiser.step()
                schedule.step()
                step += 1
                if step == recipe.steps:  # in the middle of an epoch; after it the step size would be negative
                    break
            network.eval()
            value = float(loss(outputs_of(network, data.validation.x), data.validation.y))
            if value < least:
                least, early = value, copy.deepcopy(network.state_dict())
    return {"end": network.state_dict(), "early": early}


def augmented(x: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Images `[N, C, H, W]`, each shifted by up to two pixels, with copies of its border, and mirrored or not."""
    if not how:
        return x
    num, side = len(x), x.shape[-1]
    if "flips" in how:
        mirror = torch.rand(num, generator=generator) < 0.5
        x = torch.where(mirror[:, None, None, None], x.flip(-1), x)
    padded = F.pad(x, [SHIFT] * 4, mode="replicate")
    rows, columns = torch.randint(2 * SHIFT + 1, (2, num), generator=generator)[..., None] + torch.arange(side)
    each = torch.arange(num)[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


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
    """

    task: Task
    data: Data
    architecture: str
    recipe: Recipe
    seed: int = 0
    name: str = ""
    networks: Path | None = None

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
        key = f"{dropout:g}, {seed}"
        states = self.stored(key, lambda: train(network, self.likelihood, self.data, recipe, seed))
        network.load_state_dict(states["early" if recipe.early else "end"])
        return network.eval()

    def stored(self, key: str, compute: Callable[[], Stored]) -> Stored:
        """Tensors that belong to this problem, from the folder of its networks or else computed and stored there."""
        if self.networks is None:
            return compute()
        path = self.networks / f"{self.name}, {self.architecture}, {self.recipe.run}, {key}.pt"
        if path.exists():
            return torch.load(path, weights_only=True)
        found = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(found, temporary)
        temporary.rename(path)  # another process may read it
        return found

    @cached_property
    def network(self) -> nn.Module:
        """The network that gets error bars."""
        return self.trained()
