"""Trained networks, kept in files, and one epoch of their training, which is the unit of the price list."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.data.tasks import Part
from benchmarks.price.networks import build

__all__ = ["BATCH", "EPOCHS", "epoch_of", "trained"]

BATCH, EPOCHS, STEP_SIZE = 100, 15, 1e-3


def epoch_of(network: nn.Module, loader: DataLoader) -> Callable[[], None]:
    """Trains a copy of the network: forward, backward and a step of Adam for each batch."""
    network = copy.deepcopy(network).train()
    optimiser = torch.optim.Adam(network.parameters(), STEP_SIZE)

    def epoch() -> None:
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimiser.step()

    return epoch


def trained(
    name: str, data: str, part: Part, seed: int = 0, *, cache: Path, epochs: int = EPOCHS, narrow: bool = False
) -> nn.Module:
    """A network in evaluation mode; `data` names the data in the name of its file."""
    network = build(name, seed, narrow)
    kind = f"narrow {name}" if narrow else name
    path = cache / f"{kind}, {data}, {len(part.y)}, {epochs} epochs, seed {seed}.pt".replace(" ", "-")
    if not path.exists():
        states = train(network, part, epochs, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(states, temporary)
        temporary.rename(path)  # another process may read it
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def train(network: nn.Module, part: Part, epochs: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), STEP_SIZE)
    network.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(part.y), generator=generator).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(network(part.x[batch]), part.y[batch]).backward()
            optimiser.step()
    return network.state_dict()
