"""All methods with their settings, in the order of the tables."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.comparison import ours, peers, processes
from benchmarks.comparison.laplace_torch import STRUCTURES, laplace_torch
from benchmarks.comparison.predictions import Fitted
from benchmarks.comparison.training import Problem

__all__ = ["METHODS", "Method", "missing"]

NAMED = 9
ALL = ("classification", "binary", "regression")


@dataclass(frozen=True)
class Method:
    """How to fit a method, and where it runs.

    Attributes:
        fit: from a problem to predictions.
        sees: which data it sees besides the training data: `""`, `"validation"`, or `"test"` for an oracle.
        likelihoods: those of the tasks that it is for.
        own: whether it belongs to this library.
        requires: a module that must be installed.
        tier: 0 runs on all networks, 1 on those where methods are compared, 2 where settings of this library are,
            3 where also slow ones are; those of `NAMED` in suites only that name them.
    """

    fit: Callable[[Problem], Fitted]
    sees: str = ""
    likelihoods: Sequence[str] = ALL
    own: bool = False
    requires: str | None = None
    tier: int = 1


def _ours() -> dict[str, Method]:
    """The defaults and alternatives to them: prior, outputs of the curvature, linear model, number of samples."""
    classes, numbers = ("classification", "binary"), ("regression",)

    def own(
        fit: Callable[[Problem], Fitted], likelihoods: Sequence[str] = ALL, sees: str = "", tier: int = 2
    ) -> Method:
        return Method(fit, sees, likelihoods, own=True, tier=tier)

    return {
        "ours": own(ours.setting(), tier=0),
        "ours, not scaled": own(ours.setting(scale=1.0), classes, tier=0),
        "ours, validation": own(ours.with_validation, sees="validation", tier=0),
        "ours, trained with dropout, validation": own(ours.with_dropout, sees="validation", tier=1),
        "ours, scale by test oracle": own(ours.with_best_scale, sees="test", tier=0),
        "ours, last layer": own(ours.setting(parameters="last_layer"), tier=NAMED),
        "ours, last layer, validation": own(ours.validated(parameters="last_layer"), sees="validation", tier=NAMED),
        "ours, KFAC": own(ours.setting(method="kfac"), tier=NAMED),
        "ours, evidence": own(ours.setting(criterion="evidence"), classes, tier=NAMED),
        "ours, evidence, not scaled": own(ours.setting(scale=1.0, criterion="evidence"), classes, tier=NAMED),
        "ours, self-consistency": own(ours.setting(criterion="self_consistency"), classes, tier=NAMED),
        "ours, affine": own(ours.setting(linear_model="affine"), classes),
        "ours, g-prior": own(ours.setting(prior="g-prior"), tier=0),
        "ours, layerwise": own(ours.setting(prior="layerwise")),
        "ours, homogeneous": own(ours.setting(linear_model="homogeneous"), numbers),
        "ours, noise of the mode": own(ours.setting(noise_at="mode"), numbers),
        "ours, 16 samples": own(ours.setting(num_samples=16)),
        "ours, 256 samples": own(ours.setting(num_samples=256)),
        "ours, precision by validation": own(ours.chosen_precision(), sees="validation"),
        "ours, precision by test oracle": own(ours.chosen_precision(oracle=True), sees="test"),
    }


def _laplace_torch() -> dict[str, Method]:
    return {
        f"laplace-torch, {structure}{', validation' if tuning == 'gridsearch' else ''}": Method(
            laplace_torch(structure, tuning), sees="validation" if tuning == "gridsearch" else "", requires="laplace"
        )
        for structure in STRUCTURES
        for tuning in ("marglik", "gridsearch")
    }


METHODS: dict[str, Method] = {
    "MAP": Method(peers.network_alone, tier=0),
    "temperature scaling": Method(peers.temperature_scaling, sees="validation", tier=0),
    "temperature by test oracle": Method(partial(peers.temperature_scaling, oracle=True), sees="test", tier=0),
    **_ours(),
    **_laplace_torch(),
    "MC dropout": Method(peers.mc_dropout, sees="validation"),
    "SWAG": Method(peers.swag, sees="validation"),
    "mean-field VI": Method(peers.mean_field, sees="validation"),
    "SNGP": Method(peers.sngp, likelihoods=("classification",), tier=NAMED),
    "ensemble of 5": Method(peers.deep_ensemble),
    "ensemble of 5, a fifth of the steps": Method(peers.short_ensemble, tier=NAMED),
    "GP, RBF": Method(processes.gaussian_process, likelihoods=("regression",)),
    "deep kernel": Method(processes.deep_kernel, likelihoods=("regression",), tier=NAMED),
    "GP, inducing points": Method(processes.sparse_process, likelihoods=("regression",), tier=NAMED),
}


def missing(method: Method) -> str | None:
    """The module that a method needs, if it is not installed."""
    absent = method.requires is not None and importlib.util.find_spec(method.requires) is None
    return method.requires if absent else None
