"""All methods with their settings, in the order of the tables."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.comparison import activations, peers, processes, strange
from benchmarks.comparison.laplace_torch import STRUCTURES, laplace_torch
from benchmarks.comparison.ours import ours
from benchmarks.comparison.predictions import Fitted
from benchmarks.comparison.training import Problem

ALL = ("classification", "regression")
CLASSES, NUMBERS = ALL[:1], ALL[1:]


@dataclass(frozen=True)
class Method:
    """How to fit a method, and where it runs.

    Attributes:
        fit: from a problem to predictions.
        sees: the data it sees besides the training data: `""`, `"validation"`, or `"test"` for an oracle.
        likelihoods: of the tasks that it is for.
        requires: a module that must be installed.
    """

    fit: Callable[[Problem], Fitted]
    sees: str = ""
    likelihoods: Sequence[str] = ALL
    requires: str | None = None


def _laplace_torch() -> dict[str, Method]:
    return {
        f"laplace-torch, {structure}{', validation' if validated else ''}": Method(
            laplace_torch(structure, validated), sees="validation" if validated else "", requires="laplace"
        )
        for structure in STRUCTURES
        for validated in (False, True)
    }


METHODS: dict[str, Method] = {
    "MAP": Method(peers.network_alone),
    "temperature scaling": Method(peers.temperature_scaling, sees="validation"),
    "temperature by test oracle": Method(partial(peers.temperature_scaling, oracle=True), sees="test"),
    "ours": Method(ours()),
    "ours, validation": Method(ours(validated=True), sees="validation"),
    "ours, 20 epochs": Method(ours(budget=20)),
    "ours, 20 epochs, validation": Method(ours(validated=True, budget=20), sees="validation"),
    "ours, last layer": Method(ours(parameters="last_layer")),
    "ours, last layer, validation": Method(ours(validated=True, parameters="last_layer"), sees="validation"),
    "ours, KFAC": Method(ours(method="kfac")),
    "ours, KFAC, validation": Method(ours(validated=True, method="kfac"), sees="validation"),
    "ours, evidence": Method(ours(criterion="evidence"), likelihoods=CLASSES),
    "ours, self-consistency": Method(ours(criterion="self_consistency"), likelihoods=CLASSES),
    "ours, g-prior": Method(ours(prior="g-prior"), likelihoods=NUMBERS),
    "ours, layerwise": Method(ours(prior="layerwise"), likelihoods=NUMBERS),
    "ours, novelty": Method(strange.novelty(), likelihoods=CLASSES),
    "ours, novelty, validation": Method(strange.novelty(validated=True), sees="validation", likelihoods=CLASSES),
    **_laplace_torch(),
    "GAPA": Method(activations.gapa, sees="validation"),
    "projected features": Method(activations.projected()),
    "projected features, validation": Method(activations.projected(validated=True), sees="validation"),
    "MC dropout": Method(peers.mc_dropout, sees="validation"),
    "SNGP": Method(peers.sngp, likelihoods=CLASSES),
    **{name: Method(strange.by_features(peer), likelihoods=CLASSES) for name, peer in strange.PEERS.items()},
    "ensemble of 5": Method(peers.deep_ensemble),
    "ensemble of 5, a fifth of the steps": Method(peers.short_ensemble),
    "GP, RBF": Method(processes.gaussian_process, likelihoods=NUMBERS),
    "deep kernel": Method(processes.deep_kernel, likelihoods=NUMBERS),
    "GP, inducing points": Method(processes.sparse_process, likelihoods=NUMBERS),
}


def missing(method: Method) -> str | None:
    """The module that a method needs, if it is not installed."""
    absent = method.requires is not None and importlib.util.find_spec(method.requires) is None
    return method.requires if absent else None
