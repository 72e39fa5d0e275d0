"""A `LinearisedLaplace` from flat settings, so that a test varies one of them by its name."""

from dataclasses import replace
from typing import Any

from torch import nn

from laplace_sampling import SGD, SVRG, Dual, Gaussian, LinearisedLaplace, Method, Prior, Stochastic
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.methods import as_method


def laplace_of(
    model: nn.Module,
    likelihood: Any,
    *,
    prior: str | Prior = "isotropic",
    prior_precision: float | None = None,
    noise_precision: Any = None,
    noise_at: str | None = None,
    observe: Any = None,
    method: str | Method = "auto",
    solver: SGD | SVRG | dict | None = None,
    seed: int = 0,
    max_memory: float | None = None,
    autocast: Any = None,
    compile: bool | str = False,
    **settings: Any,
) -> LinearisedLaplace:
    """`method` may also be `"sgd"` or `"svrg"`; `solver` the settings of these, or of `Dual` as a dictionary."""
    prior = as_prior(prior)
    if prior_precision is not None:
        prior = replace(prior, precision=prior_precision)
    noise = {"noise_precision": noise_precision, "noise_at": noise_at, "observe": observe}
    noise = {name: value for name, value in noise.items() if value is not None}
    if noise:
        likelihood = Gaussian(**noise) if likelihood == "regression" else replace(likelihood, **noise)
    products = {"max_memory": max_memory, "autocast": autocast, "compile": compile}
    if method == "dual":
        method = Dual(**products, **(solver or {}))
    elif method in ("sgd", "svrg"):
        method = Stochastic(**products, solver=solver or (SGD if method == "sgd" else SVRG)(seed=seed))
    else:
        method = replace(as_method(method), **products) if any(products.values()) else as_method(method)
    return LinearisedLaplace(model, likelihood, prior=prior, method=method, seed=seed, **settings)
