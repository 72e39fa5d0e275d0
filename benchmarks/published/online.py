"""Training by the evidence on MNIST and Fashion-MNIST: test accuracy and log-likelihood without it and with it.

Immer, Bauer, Fortuin, Rätsch and Khan (2021), as quoted in the slides of Hernández-Lobato; beside laplace-torch's
`marglik_training`, which is their algorithm.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.comparison.networks import build
from benchmarks.comparison.report import table
from benchmarks.comparison.training import outputs_of
from benchmarks.data.tasks import Part
from benchmarks.price.laplace_torch import installed
from benchmarks.published.setup import Cells, Rows, Setup, Study
from benchmarks.published.tables import mean, sizes
from laplace_sampling.training.train_by_evidence import train_by_evidence

__all__ = ["STUDY", "TRAININGS"]

TASKS = [(data, network) for data in ("MNIST", "Fashion-MNIST") for network in ("MLP", "CNN")]
NETWORKS = {"MLP": "MLP, wide", "CNN": "LeNet"}
NUM, EPOCHS, TEST, SEEDS, BATCH, STEP_SIZE = 10_000, 20, 10_000, 1, 100, 3e-3
# Accuracy and log-likelihood, with one precision by validation data and by training with the evidence.
PUBLISHED = {
    ("MNIST", "MLP"): (("98.22", "-0.061"), ("98.38", "-0.053")),
    ("MNIST", "CNN"): (("99.40", "-0.017"), ("99.46", "-0.016")),
    ("Fashion-MNIST", "MLP"): (("88.09", "-0.347"), ("89.83", "-0.305")),
    ("Fashion-MNIST", "CNN"): (("91.39", "-0.258"), ("92.06", "-0.233")),
}

# Trains a network; returns the log evidence of the weights that it has then, or `None`.
Training = Callable[[nn.Module, DataLoader, int], float | None]


def without(network: nn.Module, loader: DataLoader, epochs: int) -> None:
    """Adam without weight decay, with a step size that falls to zero."""
    optimiser = Adam(network.parameters(), STEP_SIZE)
    schedule = CosineAnnealingLR(optimiser, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimiser.step()
            schedule.step()


def ours(network: nn.Module, loader: DataLoader, epochs: int) -> float:
    optimiser = Adam(network.parameters(), STEP_SIZE)
    schedule = CosineAnnealingLR(optimiser, epochs * len(loader))
    settings: dict[str, Any] = {"scheduler": schedule, "schedule": "batch", "progress": False}
    found = train_by_evidence(network, "classification", loader, optimiser, epochs=epochs, **settings)
    return found.log_marginal_likelihood_


def laplace_torch(network: nn.Module, loader: DataLoader, epochs: int) -> float:
    """Its defaults: Kronecker factors, a precision for each tensor, ten steps after every epoch."""
    from laplace.marglik_training import marglik_training  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la, *_ = marglik_training(
            network,
            loader,
            "classification",
            optimizer_kwargs={"lr": STEP_SIZE},
            scheduler_cls=CosineAnnealingLR,
            scheduler_kwargs={"T_max": epochs * len(loader)},
            n_epochs=epochs,
        )
    return float(la.log_marginal_likelihood())


TRAININGS: dict[str, Training] = {"without": without, "ours": ours, "laplace-torch": laplace_torch}


def trained(data: str, network: str, name: str, train: Part, test: Part, epochs: int, seed: int) -> dict[str, Any]:
    """A row of scores of a network alone, and of what its training takes."""
    model = build(NETWORKS[network], train.x.shape[1:], 10, seed=seed)
    loader = DataLoader(TensorDataset(train.x, train.y), batch_size=BATCH, shuffle=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        started = time.process_time()
        evidence = TRAININGS[name](model, loader, epochs)
        seconds = time.process_time() - started
    outputs = outputs_of(model.eval(), test.x)
    return {
        "data": data,
        "network": network,
        "method": name,
        "num_data": len(train.y),
        "num_weights": sum(p.numel() for p in model.parameters()),
        "epochs": epochs,
        "seed": seed,
        "accuracy": 100 * float((outputs.argmax(-1) == test.y).float().mean()),
        "log_likelihood": -float(F.cross_entropy(outputs, test.y)),
        "training_log_likelihood": -float(F.cross_entropy(outputs_of(model, train.x), train.y)),
        "evidence": None if evidence is None else evidence / len(train.y),
        "processor_seconds": seconds,
    }


def cells(setup: Setup) -> Cells:
    epochs = setup.epochs or setup.size(EPOCHS, 1)

    def row(data: str, network: str, name: str, seed: int) -> Rows:
        train, test = setup.images(data)
        num, tests = min(setup.num or NUM, setup.size(NUM, 100)), setup.size(TEST, 50)
        parts = Part(train.x[:num], train.y[:num]), Part(test.x[:tests], test.y[:tests])
        return [trained(data, network, name, *parts, epochs, seed)]

    names = [name for name in TRAININGS if name != "laplace-torch" or installed()]
    return {
        f"{data}, {network}, {name}, seed {seed}": partial(row, data, network, name, seed)
        for data, network in TASKS
        for seed in setup.runs(SEEDS)
        for name in names
    }


def section(rows: Rows, images: Path) -> str:
    head = ["data", "network", "", "method", "accuracy, %", "log-likelihood", "of training data", "evidence", "seconds"]
    lines = []
    for task in TASKS:
        for name, figures in zip(("by validation", "by the evidence"), PUBLISHED[task], strict=True):
            lines.append([*task, "published", name, *figures, "", "", ""])
        for name in TRAININGS:
            of_task = [row for row in rows if (row["data"], row["network"], row["method"]) == (*task, name)]
            keys = ("log_likelihood", "training_log_likelihood", "evidence")
            figures = [mean(of_task, "accuracy", 2), *(mean(of_task, key) for key in keys)]
            lines += [[*task, "here", name, *figures, mean(of_task, "processor_seconds", 0)]] if of_task else []
    return (
        f"{table(head, lines)}\n\n"
        "Published: Immer, Bauer, Fortuin, Rätsch and Khan (2021), one precision by validation data, and precisions of "
        f"layers by the evidence. Here: {sizes(rows)}. Scores are those of the network alone, evidences in nats a "
        "datum, seconds those of a processor for the whole training. What differs: the source trains on all 60,000 "
        "images, networks whose widths the slides do not give (here an MLP of two hidden layers of 100 units, and two "
        "convolutions of 8 and 16 channels with two linear layers); without the evidence "
        "there is no weight decay here. All trainings have the same network, order of images and step sizes "
        f"(Adam, {STEP_SIZE:g} falling to zero). laplace-torch updates after every epoch, with a precision for each "
        "tensor, and ours after every fifth, with one for each layer: the defaults of both."
    )


STUDY = Study("Training by the evidence", cells, section)
