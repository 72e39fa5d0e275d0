"""Active learning on MNIST from 20 labels: BatchBALD by joint samples, beside what looks at one input at a time."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comparison.networks import build
from benchmarks.comparison.training import outputs_of
from benchmarks.data.tasks import Part
from benchmarks.published.batch_bald import batch_bald
from benchmarks.published.curves import Axes, curves, final
from benchmarks.published.setup import Cells, Rows, Setup, Study
from laplace_sampling import LinearisedLaplace

__all__ = ["STUDY", "chosen"]

RULES = ("random", "entropy", "BALD", "BatchBALD")
NETWORK, SEEDS = "LeNet, small", 10
START, BATCH, ROUNDS, CANDIDATES, TEST = 20, 10, 8, 300, 2000
FIRST_STEPS, STEPS, STEP_SIZE = 200, 80, 3e-3
AXES = Axes("labels", "test accuracy", "published_active_learning.png")


def trained(network: nn.Module, part: Part, steps: int) -> nn.Module:
    """A copy that Adam trained further, on all labels at once."""
    network = copy.deepcopy(network).train()
    optimiser = torch.optim.Adam(network.parameters(), STEP_SIZE, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(network(part.x), part.y).backward()
        optimiser.step()
    return network.eval()


def chosen(rule: str, network: nn.Module, part: Part, x: Tensor, size: int, seed: int) -> list[int]:
    """Which candidates to label next."""
    if rule == "random":
        return list(range(size))
    if rule == "entropy":
        return torch.special.entr(outputs_of(network, x).softmax(-1)).sum(-1).topk(size).indices.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = LinearisedLaplace(network, "classification", seed=seed)
        pred: Any = la.fit_hyperparameters([(part.x, part.y)], progress=False).predict(x)
    if rule == "BALD":
        return pred.mutual_information.topk(size).indices.tolist()
    # The mixture of predictions is over both signs of each deviation.
    both = torch.cat([pred.logits + pred.deviations, pred.logits - pred.deviations])
    return batch_bald(both.softmax(-1), size, seed)


def run(setup: Setup, rule: str, seed: int) -> Rows:
    """One row: the accuracy after each round. All rules of a seed start from the same labels and network."""
    train, test = setup.images("MNIST")
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randperm(len(train.y), generator=generator)
    # Two labels of each class, so that no rule starts without one.
    start = torch.cat([pool[train.y[pool] == label][: START // 10] for label in range(10)])
    labelled = start.tolist()
    network = build(NETWORK, train.x.shape[1:], 10, seed=seed)
    x, y = test.x[: setup.size(TEST, 60)], test.y[: setup.size(TEST, 60)]
    accuracies, size = [], setup.size(BATCH, 3)
    for round_ in range(setup.size(ROUNDS, 1) + 1):
        part = Part(train.x[labelled], train.y[labelled])
        network = trained(network, part, setup.size(STEPS if round_ else FIRST_STEPS, 5))
        accuracies.append(float((outputs_of(network, x).argmax(-1) == y).double().mean()))
        free = torch.tensor(sorted(set(range(len(train.y))) - set(labelled)))
        candidates = free[torch.randperm(len(free), generator=generator)[: setup.size(CANDIDATES, 30)]]
        picked = chosen(rule, network, part, train.x[candidates], size, seed + 1000 * round_)
        labelled += candidates[picked].tolist()
    steps = list(range(len(start), len(labelled), size))
    return [{"method": rule, "seed": seed, "at": steps, "curve": accuracies}]


def cells(setup: Setup) -> Cells:
    return {f"{rule}, seed {seed}": partial(run, setup, rule, seed) for seed in setup.runs(SEEDS) for rule in RULES}


def section(rows: Rows, images: Path) -> str:
    image = curves({"MNIST": rows}, AXES, images)
    seeds = len({row["seed"] for row in rows})
    return (
        f"![Test accuracy against labels]({image})\n\n{final(rows, 'accuracy at the end', 'area under the curve')}\n\n"
        f"A small LeNet starts from {START} labels, two of each class, and gets {BATCH} more a round, chosen out of "
        f"{CANDIDATES} candidates, for {ROUNDS} rounds; it is trained on from its last weights. Entropy is that of the "
        "network, without error bars; BALD takes the inputs of largest mutual information, one by one; BatchBALD the "
        "batch of largest joint mutual information, from the same samples. Accuracy is on 2,000 test images, "
        f"{seeds} seeds; bands are standard errors. The published curves of BatchBALD are of another network, with "
        "dropout."
    )


STUDY = Study("Active learning, MNIST", cells, section)
