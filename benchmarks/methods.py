"""All methods, their settings in one place, in the order of the tables."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import ours, peers
from benchmarks.laplace_torch import STRUCTURES, laplace_torch
from benchmarks.predictions import Fitted, Prediction, Regressed
from benchmarks.training import Problem

__all__ = ["METHODS", "Method", "missing"]

ALL = ("classification", "binary", "regression")


@dataclass(frozen=True)
class Method:
    """How to fit, and on what terms.

    Attributes:
        fit: from a problem to predictions.
        sees: what it sees beside the training data: `""`, `"validation"`, or `"test"` for an oracle.
        likelihoods: of tasks that it is for.
        own: whether it is of this library.
        requires: a module that has to be there.
        everywhere: whether it runs on all trained networks, not only where all methods do.
    """

    fit: Callable[[Problem], Fitted]
    sees: str = ""
    likelihoods: Sequence[str] = ALL
    own: bool = False
    requires: str | None = None
    everywhere: bool = False


def gaussian_process(problem: Problem) -> Fitted:
    """RBF kernel with a length for each input, hyperparameters by marginal likelihood: no network."""
    from benchmarks import regressors

    train = problem.data.train
    double = [t.double() for t in (train.x, train.y.flatten())]
    task = regressors.Task(*double, problem.data.test.x.double(), 1, problem.seed, 1e-3)
    model = regressors.Process(task)
    noise = regressors.fit_process(model, task.x_test, regressors.PROCESS_STEPS).details["noise"] ** 2

    def predict(x: torch.Tensor) -> Prediction:
        with torch.no_grad(), regressors.gpytorch.settings.max_cholesky_size(10**6):
            found = model(x.double())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(problem.seed)
                samples = found.rsample(torch.Size([64]))
        return Regressed(found.mean.float(), found.variance.float() + noise, samples.float(), noise)

    return Fitted(predict, details={"noise": noise})


def _ours() -> dict[str, Method]:
    """The defaults, and what they might be: prior, where the curvature is, linear model, number of samples."""
    classes = ("classification", "binary")
    settings = {
        "ours": Method(ours.defaults, everywhere=True),
        "ours, scale by validation": Method(ours.with_scale(), sees="validation", everywhere=True),
        "ours, scale by test oracle": Method(ours.with_scale(oracle=True), sees="test", everywhere=True),
    }
    for prior in ("g-prior", "isotropic", "layerwise"):
        for at in ("mode", "network"):
            if (prior, at) != ("g-prior", "mode"):
                fit = ours.setting(prior=prior, hessian_at=at)
                everywhere = prior == "isotropic" and at == "mode"
                settings[f"ours, {prior}, B at the {at}"] = Method(fit, likelihoods=classes, everywhere=everywhere)
    for prior in ("isotropic", "layerwise"):
        settings[f"ours, {prior}"] = Method(ours.setting(prior=prior), likelihoods=("regression",), everywhere=True)
    settings |= {
        "ours, affine": Method(ours.setting(linear_model="affine"), likelihoods=classes),
        "ours, homogeneous": Method(ours.setting(linear_model="homogeneous"), likelihoods=("regression",)),
        "ours, noise of the mode": Method(ours.setting(noise_at="mode"), likelihoods=("regression",)),
        "ours, 16 samples": Method(ours.setting(num_samples=16)),
        "ours, 256 samples": Method(ours.setting(num_samples=256)),
        "ours, precision by validation": Method(ours.chosen_precision(), sees="validation"),
        "ours, precision by test oracle": Method(ours.chosen_precision(oracle=True), sees="test"),
        "ours, isotropic, precision by test oracle": Method(
            ours.chosen_precision(oracle=True, prior="isotropic"), sees="test"
        ),
    }
    return {name: Method(**{**vars(method), "own": True}) for name, method in settings.items()}


def _laplace_torch() -> dict[str, Method]:
    return {
        f"laplace-torch, {structure}{', validation' if tuning == 'gridsearch' else ''}": Method(
            laplace_torch(structure, tuning), sees="validation" if tuning == "gridsearch" else "", requires="laplace"
        )
        for structure in STRUCTURES
        for tuning in ("marglik", "gridsearch")
    }


METHODS: dict[str, Method] = {
    "MAP": Method(peers.network_alone, everywhere=True),
    "temperature scaling": Method(peers.temperature_scaling, sees="validation", everywhere=True),
    "temperature by test oracle": Method(partial(peers.temperature_scaling, oracle=True), sees="test", everywhere=True),
    **_ours(),
    **_laplace_torch(),
    "MC dropout": Method(peers.mc_dropout, sees="validation"),
    "SWAG": Method(peers.swag, sees="validation"),
    "mean-field VI": Method(peers.mean_field, sees="validation"),
    "ensemble of 5": Method(peers.deep_ensemble),
    "GP, RBF": Method(gaussian_process, likelihoods=("regression",)),
}


def missing(method: Method) -> str | None:
    """The module that a method needs and that is not there."""
    absent = method.requires is not None and importlib.util.find_spec(method.requires) is None
    return method.requires if absent else None
