"""`LinearisedLaplace` in several settings, one fit for each; also with held-out data, and with oracles."""

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison.metrics import best_scale
from benchmarks.comparison.peers import DROPOUT_RATES, best_dropout
from benchmarks.comparison.predictions import (
    Classified,
    Fitted,
    Prediction,
    Regressed,
    prediction,
    targets,
    two_classes,
)
from benchmarks.comparison.training import Problem
from laplace_sampling import ClassificationPrediction, Gaussian, LinearisedLaplace, RegressionPrediction
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.solvers.solver import ConvergenceWarning

__all__ = [
    "chosen_precision",
    "defaults",
    "setting",
    "validated",
    "with_best_scale",
    "with_dropout",
    "with_validation",
]

BATCH = 200
PRECISION_FACTORS = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


def setting(scale: float | str = "auto", **settings: Any) -> Callable[[Problem], Fitted]:
    """A fit with hyperparameters from the training data alone, chosen by a `criterion` if one is given.

    `noise_at` is a setting of the likelihood.
    """

    def method(problem: Problem) -> Fitted:
        la, details = fitted(problem, tuple(settings.items()), scale)
        return fitted_predictions(problem, la, details)

    return method


defaults = setting()


def validated(**settings: Any) -> Callable[[Problem], Fitted]:
    """A fit with the prior precision, and temperature or noise, of largest likelihood of held-out data."""

    def method(problem: Problem) -> Fitted:
        return fitted_predictions(problem, *_fitted(problem, tuple(settings.items()), validated=True))

    return method


with_validation = validated()


def with_dropout(problem: Problem) -> Fitted:
    """`with_validation` on the network that is best with Monte Carlo dropout; predictions do not use dropout."""
    rate, _ = best_dropout(problem)
    fit = with_validation(replace(problem, dropout=rate))
    return replace(fit, details={**fit.details, "rate": rate}, passes=fit.passes + len(DROPOUT_RATES) * problem.epochs)


def with_posterior(la: LinearisedLaplace, posterior: Posterior) -> LinearisedLaplace:
    """The same samples with another calibration, without another fit."""
    other = copy.copy(la)
    assert la._fitted is not None
    other._fitted = replace(la._fitted, posterior=posterior)
    return other


def laplace(problem: Problem, *, noise_at: str | None = None, **settings: Any) -> LinearisedLaplace:
    likelihood = problem.likelihood if noise_at is None else Gaussian(noise_at=noise_at)
    return LinearisedLaplace(problem.network, likelihood, seed=problem.seed, **settings)


def fitted(
    problem: Problem, settings: tuple[tuple[str, Any], ...], scale: float | str = "auto"
) -> tuple[LinearisedLaplace, dict[str, Any]]:
    """With what is not the default of the network anyway, so that nothing is fitted twice; a scale needs no fit."""
    default = laplace(problem).settings
    needed = tuple((k, v) for k, v in settings if k == "criterion" or laplace(problem, **{k: v}).settings != default)
    la, details = _fitted(problem, needed)
    if scale != "auto":
        assert la._fitted is not None
        la = with_posterior(la, replace(la._fitted.posterior, calibration=Calibration(scale=float(scale))))
    return la, details | hyperparameters(la)


@lru_cache(maxsize=3)
def _fitted(
    problem: Problem, settings: tuple[tuple[str, Any], ...], validated: bool = False
) -> tuple[LinearisedLaplace, dict[str, Any]]:
    given, data = dict(settings), problem.data
    fit_settings = {"criterion": given.pop("criterion")} if "criterion" in given else {}
    la = laplace(problem, **given)
    loader, val_loader = data.train.loader(BATCH), data.validation.loader(BATCH) if validated else None
    return la, caught(la, lambda: la.fit_hyperparameters(loader, val_loader, progress=False, **fit_settings))


def caught(la: LinearisedLaplace, fit: Callable[[], object]) -> dict[str, Any]:
    """Runs a fit; returns hyperparameters and warnings."""
    started = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ConvergenceWarning)
        fit()
    seconds, cpu_seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    diagnosis = la.diagnose()
    return hyperparameters(la) | {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "passes": float(diagnosis.passes),
        "epochs": float(diagnosis.epochs),
        "method": diagnosis.method,
        "warnings": [str(w.message) for w in raised if issubclass(w.category, ConvergenceWarning)],
    }


def hyperparameters(la: LinearisedLaplace) -> dict[str, Any]:
    noise = la.noise_precision_
    return {
        "prior_precision": [float(v) for v in la.prior_precision_],
        "effective_dimension": float(la.effective_dimension_.sum()),
        "noise_precision": None if noise is None else float(noise),
        "scale": la.scale_,
        "temperature": la.temperature_,
    }


def fitted_predictions(problem: Problem, la: LinearisedLaplace, details: dict[str, Any], scale: float = 1.0) -> Fitted:
    def predict(x: Tensor) -> Prediction:
        return common(problem.likelihood, [la.predict(batch) for batch in x.split(BATCH)], scale, problem.links)

    details = dict(details)
    seconds, cpu_seconds, passes = (details.pop(name) for name in ("seconds", "cpu_seconds", "passes"))
    return Fitted(predict, passes, la.settings.num_samples, details, seconds, cpu_seconds)


def common(likelihood: str, parts: list[Any], scale: float = 1.0, links: bool = False) -> Prediction:
    """Joins batches of predictions in the common form; multiplies deviations from the network by `scale`."""
    outputs, deviations = torch.cat([p.outputs for p in parts]), torch.cat([scale * p.deviations for p in parts], 1)
    samples, first = outputs + deviations, parts[0]
    if isinstance(first, RegressionPrediction):
        mean = torch.cat([p.mean for p in parts]).flatten()
        variance = torch.cat([p.variance for p in parts]).flatten() * scale**2
        noise = float(first.noise_variance)
        return Regressed(mean, variance + noise, samples.flatten(1), noise, gaussian=True)
    assert isinstance(first, ClassificationPrediction)
    p = prediction(likelihood, torch.cat([samples, outputs - deviations]))  # as the library has it
    assert isinstance(p, Classified)
    names = () if scale != 1.0 or not links else ("probit",) if likelihood == "binary" else ("probit", "bridge")
    unknown = [q.epistemic for q in parts if scale == 1.0 and hasattr(q, "epistemic")]
    return replace(
        p,
        links={link: torch.cat([link_log_probs(likelihood, q, link) for q in parts]) for link in names},
        epistemic=torch.cat(unknown).flatten() if unknown else None,
    )


def link_log_probs(likelihood: str, p: ClassificationPrediction, link: str) -> Tensor:
    probs = p.probs_with(link)
    if likelihood == "binary":
        return two_classes(probs.double().logit()[None])[0].log_softmax(-1)
    return probs.double().clamp_min(1e-30).log()


def with_best_scale(problem: Problem) -> Fitted:
    """The posterior's standard deviations times the factor of largest likelihood of the *test* data."""
    la, details = fitted(problem, (), 1.0)
    part = problem.data.test
    parts = [la.predict(batch) for batch in part.x.split(BATCH)]
    y = targets(problem.likelihood, part.y)

    def loss(log_scale: float) -> float:
        return -mean_log_likelihood(common(problem.likelihood, parts, math.exp(log_scale)), y)

    scale = best_scale(loss, 1 / 30, 30.0)
    return fitted_predictions(problem, la, {**details, "scale": scale**2}, scale)


def mean_log_likelihood(p: Prediction, y: Tensor) -> float:
    if isinstance(p, Regressed):
        return float(torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y).mean())
    return float(p.log_probs.gather(-1, y[:, None]).mean())


def chosen_precision(oracle: bool = False, **settings: Any) -> Callable[[Problem], Fitted]:
    """Takes the prior precision of largest held-out (or test) log-likelihood among multiples of the fitted one.

    Its posterior is not scaled.
    """

    def method(problem: Problem) -> Fitted:
        part = problem.data.test if oracle else problem.data.validation
        y = targets(problem.likelihood, part.y)
        candidates = grid(problem, tuple(settings.items()))

        def value(factor: float) -> float:
            return mean_log_likelihood(candidates[factor].predict(part.x), y)

        factor = max(candidates, key=value)
        passes, seconds = (sum(getattr(c, name) for c in candidates.values()) for name in ("passes", "seconds"))
        best = candidates[factor]
        return replace(best, passes=passes, seconds=seconds, details={**best.details, "factor": factor})

    return method


@lru_cache(maxsize=2)
def grid(problem: Problem, settings: tuple[tuple[str, Any], ...]) -> dict[float, Fitted]:
    """Fits at multiples of the fitted precision, at its noise."""
    la, details = fitted(problem, settings, 1.0)
    noise = la.noise_precision_
    likelihood = problem.likelihood if noise is None else Gaussian(float(noise))
    fits = {}
    for factor in PRECISION_FACTORS:
        other, fit_details = la, details
        if factor != 1:
            precision = factor * float(la.prior_precision_[0])
            given = dict(settings)
            prior = replace(as_prior(given.pop("prior", "isotropic")), precision=precision)
            other = LinearisedLaplace(problem.network, likelihood, prior=prior, seed=problem.seed, **given)
            fit_details = caught(other, lambda other=other: other.fit(problem.data.train.loader(BATCH), progress=False))
        fits[factor] = fitted_predictions(problem, other, fit_details)
    return fits
