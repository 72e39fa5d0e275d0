"""All methods with their settings, in the order of the tables."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.comparison import ours, peers
from benchmarks.comparison.laplace_torch import STRUCTURES, laplace_torch
from benchmarks.comparison.predictions import Fitted, Prediction, Regressed
from benchmarks.comparison.training import Problem

__all__ = ["METHODS", "Method", "missing"]

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
            3 where also slow ones are.
    """

    fit: Callable[[Problem], Fitted]
    sees: str = ""
    likelihoods: Sequence[str] = ALL
    own: bool = False
    requires: str | None = None
    tier: int = 1


def gaussian_process(problem: Problem) -> Fitted:
    """A Gaussian process without a network: RBF kernel with a length for each input, tuned by marginal likelihood."""
    # Both import gpytorch, which most methods do without.
    from benchmarks.gp import processes
    from benchmarks.gp.regression_task import Task

    train = problem.data.train
    x, y, x_test = (t.double() for t in (train.x, train.y.flatten(), problem.data.test.x))
    task = Task(x, y, x_test, 1, problem.seed, 1e-3)
    model = processes.Process(task)
    noise = processes.fit_process(model, task.x_test, processes.PROCESS_STEPS).details["noise"] ** 2

    def predict(x: torch.Tensor) -> Prediction:
        with torch.no_grad(), processes.gpytorch.settings.max_cholesky_size(10**6):
            posterior: Any = model(x.double())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(problem.seed)
                samples = posterior.rsample(torch.Size([64]))
        return Regressed(posterior.mean.float(), posterior.variance.float() + noise, samples.float(), noise)

    return Fitted(predict, details={"noise": noise})


def _ours() -> dict[str, Method]:
    """The defaults and alternatives to them: prior, outputs of the curvature, linear model, number of samples."""
    classes, numbers = ("classification", "binary"), ("regression",)

    def own(
        fit: Callable[[Problem], Fitted], likelihoods: Sequence[str] = ALL, sees: str = "", tier: int = 2
    ) -> Method:
        return Method(fit, sees, likelihoods, own=True, tier=tier)

    tiers = {("g-prior", "mode"): 1, ("isotropic", "mode"): 0, ("layerwise", "mode"): 3, ("layerwise", "network"): 3}
    pairs = [(prior, at) for prior in ("g-prior", "isotropic", "layerwise") for at in ("mode", "network")]
    return {
        "ours": own(ours.setting(), tier=0),
        "ours, not scaled": own(ours.setting(scale=1.0), classes, tier=0),
        "ours, validation": own(ours.with_validation, sees="validation", tier=0),
        "ours, trained with dropout, validation": own(ours.with_dropout, sees="validation", tier=1),
        "ours, scale by test oracle": own(ours.with_best_scale, sees="test", tier=0),
        **{
            f"ours, {prior}, B at the {at}": own(
                ours.setting(prior=prior, hessian_at=at), classes, tier=tiers.get((prior, at), 2)
            )
            for prior, at in pairs
        },
        "ours, affine": own(ours.setting(linear_model="affine"), classes),
        "ours, g-prior": own(ours.setting(prior="g-prior"), numbers, tier=0),
        "ours, layerwise": own(ours.setting(prior="layerwise"), numbers),
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
    "ensemble of 5": Method(peers.deep_ensemble),
    "GP, RBF": Method(gaussian_process, likelihoods=("regression",)),
}


def missing(method: Method) -> str | None:
    """The module that a method needs, if it is not installed."""
    absent = method.requires is not None and importlib.util.find_spec(method.requires) is None
    return method.requires if absent else None
