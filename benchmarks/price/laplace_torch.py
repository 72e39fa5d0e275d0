"""laplace-torch's last layer with Kronecker factors, and its default tuning."""

import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison.laplace_torch import build
from benchmarks.data.tasks import Part
from benchmarks.price.training import BATCH

__all__ = ["MISSING", "installed", "last_layer", "log_probs", "refusal", "variance"]

MISSING = "skipped: laplace-torch is not installed (the extra `bench` has it)"


def installed() -> bool:
    return find_spec("laplace") is not None


def last_layer(network: nn.Module, train: Part) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la, _, _ = build(network, "classification", "last_layer", "kron")
        la.fit(train.loader(BATCH))
        la.optimize_prior_precision()
    return la


def refusal(network: nn.Module, train: Part) -> str:
    """What it says when all weights are to have Kronecker factors; empty if it fits them."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    try:
        la: Any = Laplace(network, "classification", subset_of_weights="all", hessian_structure="kron")
        la.fit(train.loader(BATCH))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def log_probs(la: Any, x: Tensor) -> Tensor:
    """By its default link."""
    return torch.cat([la(part).detach() for part in x.split(200)]).double().clamp_min(1e-30).log()


def variance(la: Any, x: Tensor) -> Tensor:
    """Of the logits, summed over them."""
    parts = [la._glm_predictive_distribution(part)[1].detach() for part in x.split(200)]
    return torch.cat(parts).diagonal(dim1=-2, dim2=-1).sum(-1)
