"""A `LinearisedLaplace` from flat settings, so that a test varies one of them by its name."""

from dataclasses import fields, replace
from typing import Any

from cases import Case
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import (
    SGD,
    SVRG,
    Calibration,
    Data,
    Dual,
    Evidence,
    Gaussian,
    LinearisedLaplace,
    Method,
    Prior,
    Stochastic,
)
from laplace_sampling.hyperparameters.as_criterion import CRITERIA
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.methods import as_method
from laplace_sampling.methods.closed_form import ObservationSpaceFit, WeightSpaceFit

# For tests that need a fit by mini-batches, and not its accuracy.
QUICK = SGD(epochs=2, min_steps=20, mode_epochs=4, tolerance=0.9)


def laplace_of(
    model: nn.Module,
    likelihood: Any,
    *,
    prior: str | Prior = "isotropic",
    prior_precision: float | None = None,
    noise_precision: Any = None,
    observe: Any = None,
    method: str | Method = "auto",
    solver: SGD | SVRG | dict | None = None,
    seed: int = 0,
    max_memory: float | None = None,
    autocast: Any = None,
    **settings: Any,
) -> LinearisedLaplace:
    """`method` may also be `"sgd"` or `"svrg"`; `solver` the settings of these, or of `Dual` as a dictionary."""
    prior = as_prior(prior)
    if prior_precision is not None:
        prior = replace(prior, precision=prior_precision)
    noise = {"noise_precision": noise_precision, "observe": observe}
    noise = {name: value for name, value in noise.items() if value is not None}
    if noise:
        likelihood = Gaussian(**noise) if likelihood == "regression" else replace(likelihood, **noise)
    products = {"max_memory": max_memory, "autocast": autocast}
    if method == "dual":
        method = Dual(**products, **(solver or {}))
    elif method in ("sgd", "svrg"):
        method = Stochastic(**products, solver=solver or (SGD if method == "sgd" else SVRG)(seed=seed))
    else:
        method = replace(as_method(method), **products) if any(products.values()) else as_method(method)
    return LinearisedLaplace(model, likelihood, prior=prior, method=method, seed=seed, **settings)


def fit_arguments(criterion: str = "auto", **flat: Any) -> dict[str, Any]:
    """Arguments of a fit from flat ones: what is a field of `Data` goes there, and of a criterion into that."""
    data = {field.name: flat.pop(field.name) for field in fields(Data) if field.name in flat}
    kind = Evidence if criterion == "auto" else CRITERIA[criterion]
    given = {field.name: flat.pop(field.name) for field in fields(Evidence) if field.name in flat}
    known = {name: value for name, value in given.items() if name in {field.name for field in fields(kind)}}
    if known or criterion != "auto":
        flat["criterion"] = kind(**known) if known else criterion
    return {**flat, "data": Data(**data)}


def scaled(la: LinearisedLaplace, scale: float) -> LinearisedLaplace:
    """The posterior with its covariance times a factor, as held-out data may choose it."""
    la._fitted = replace(la._require("scale"), posterior=replace(la.posterior_, calibration=Calibration(scale=scale)))
    return la


def loader(case: Case, batch_size: int = 8, **settings: Any) -> DataLoader:
    x, y = case.x, case.given[1]
    if isinstance(y, dict):
        return DataLoader(
            [(x[n], {head: t[n] for head, t in y.items()}) for n in range(len(x))], batch_size, **settings
        )
    return DataLoader(TensorDataset(x, y), batch_size, **settings)


def fitted(case: Case, **settings: Any) -> LinearisedLaplace:
    return laplace_of(case.model, case.likelihood, **settings).fit(loader(case), progress=False)


def fit_case(case: Case, method: str = "exact", **settings: Any) -> LinearisedLaplace:
    """A fit to a tight tolerance; noise and prior are of one size, so that the posterior is neither of them."""
    data = settings.pop("data", case.batches)
    R = settings.pop("noise_variances", None)
    settings = {"likelihood": case.likelihood, "prior_precision": 0.7, "num_samples": 4, "method": method, **settings}
    la = laplace_of(case.model, **settings)
    return la.fit(data, data=Data(noise_variances=R), tolerance=1e-9, progress=False)


def in_observation_space(la: LinearisedLaplace) -> bool:
    """Whether a fit is the exact one without a Jacobian in memory."""
    return la._fitted is not None and isinstance(la._fitted.fit, ObservationSpaceFit)


def holds_jacobian(la: LinearisedLaplace) -> bool:
    return la._fitted is not None and isinstance(la._fitted.fit, WeightSpaceFit)
