"""`LinearisedLaplace` in several settings, one fit for each, with and without validation data."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison.predictions import Classified, Fitted, Prediction, Regressed, prediction
from benchmarks.comparison.training import Problem
from laplace_sampling import ClassificationPrediction, LinearisedLaplace, RegressionPrediction

BATCH = 200


def ours(
    validated: bool = False, criterion: str = "auto", budget: float | None = None, **settings: Any
) -> Callable[[Problem], Fitted]:
    """A fit with hyperparameters from the training data alone, or from validation data too, within a budget."""

    def method(problem: Problem) -> Fitted:
        data = problem.data
        la = LinearisedLaplace(problem.network, problem.likelihood, seed=problem.seed, **settings)
        val_loader = data.validation.loader(BATCH) if validated else None
        chosen: Any = {} if criterion == "auto" else {"criterion": criterion}
        chosen |= {} if budget is None else {"budget": budget}
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            la.fit_hyperparameters(data.train.loader(BATCH), val_loader, progress=False, **chosen)
        diagnosis = la.diagnose()
        details = {
            "prior_precision": [float(v) for v in la.prior_precision_],
            "noise_precision": None if la.noise_precision_ is None else float(la.noise_precision_),
            "scale": la.scale_,
            "temperature": la.temperature_,
            "method": diagnosis.method,
            "warnings": [str(w.message) for w in raised],
        }

        def predict(x: Tensor) -> Prediction:
            return common([la.predict(batch) for batch in x.split(BATCH)])

        return Fitted(predict, float(diagnosis.epochs), details)

    return method


def common(parts: list[Any]) -> Prediction:
    """Joins batches of predictions in the form that all methods share."""
    outputs, deviations = torch.cat([p.outputs for p in parts]), torch.cat([p.deviations for p in parts], 1)
    first = parts[0]
    if isinstance(first, RegressionPrediction):
        noise = float(first.noise_variance)
        mean, variance = (torch.cat([getattr(p, name) for p in parts]).flatten() for name in ("mean", "variance"))
        return Regressed(mean, variance + noise, (outputs + deviations).flatten(1), noise, gaussian=True)
    assert isinstance(first, ClassificationPrediction)
    # The mixture is over both signs of each deviation, as in the library.
    p = prediction("classification", torch.cat([outputs + deviations, outputs - deviations]))
    assert isinstance(p, Classified)
    return Classified(p.log_probs, p.samples, torch.cat([q.epistemic for q in parts]).flatten())
