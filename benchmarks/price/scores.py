"""Test log loss, and how well test images are told from others."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comparison.metrics import auroc, best_scale
from benchmarks.comparison.peers import TEMPERATURES
from benchmarks.comparison.training import outputs_of
from benchmarks.data.tasks import Part
from laplace_sampling import LinearisedLaplace

__all__ = ["accuracy", "auroc_of", "entropy", "epistemic", "log_loss", "log_losses", "our_log_loss", "temperature"]

BATCH = 200


def log_losses(network: nn.Module, test: Part, validation: Part) -> dict[str, float]:
    """Of the network, and at the temperature that validation data choose."""
    f = outputs_of(network, test.x)
    scaled = f / temperature(network, validation)
    return {"network": log_loss(f.log_softmax(-1), test.y), "temperature": log_loss(scaled.log_softmax(-1), test.y)}


def log_loss(log_probs: Tensor, y: Tensor) -> float:
    return float(F.nll_loss(log_probs.detach().double(), y))


def accuracy(network: nn.Module, test: Part) -> float:
    return float((outputs_of(network, test.x).argmax(-1) == test.y).double().mean())


def temperature(network: nn.Module, validation: Part) -> float:
    f = outputs_of(network, validation.x)
    return best_scale(lambda log: log_loss((f / math.exp(log)).log_softmax(-1), validation.y), *TEMPERATURES)


def our_log_loss(la: LinearisedLaplace, test: Part) -> float:
    return -float(torch.cat([la.predict(x).log_prob(y) for x, y in test.loader(BATCH)]).double().mean())


def epistemic(la: LinearisedLaplace, x: Tensor) -> dict[str, Tensor]:
    """Scores of data that are unlike those of training: the variance of the logits, and what the prediction offers."""
    scores: dict[str, list[Tensor]] = {"variance of the logits": [], "mutual information": []}
    for part in x.split(BATCH):
        pred: Any = la.predict(part)
        scores["variance of the logits"].append(pred.variance.sum(-1))
        scores["mutual information"].append(pred.mutual_information)
        if hasattr(pred, "epistemic"):
            scores.setdefault("epistemic", []).append(pred.epistemic)
    return {name: torch.cat(parts) for name, parts in scores.items()}


def entropy(log_probs: Tensor) -> Tensor:
    return torch.special.entr(log_probs.exp()).sum(-1)


def auroc_of(inside: Tensor, outside: Tensor) -> float:
    """How well a score that is higher outside tells both from each other."""
    scores = torch.cat([inside, outside]).double()
    return auroc(scores, torch.arange(len(scores)) >= len(inside))
