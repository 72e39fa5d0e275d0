"""Which weights a subnetwork is best made of: those of largest marginal variance."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.methods.factored import FactoredFit
from laplace_sampling.methods.fit import Tuned
from laplace_sampling.preparation import prepare

__all__ = ["largest_variance"]

# Of the mode, where the curvature is taken.
_TOLERANCE = 0.015


def largest_variance(
    model: nn.Module, likelihood: str | Likelihood, loader: Iterable[Any], k: int, **settings: Any
) -> dict[str, Tensor]:
    r"""Masks of the `k` weights of largest variance under a diagonal posterior, for `parameters=`.

    With the other weights fixed, these leave the smallest Wasserstein distance to the diagonal posterior,
    `W₂² = Σ_{p∉S} 1/(M_pp + A_pp)` (Daxberger et al. 2021); in the subnetwork itself all correlations count. Weights
    that the training data do not see, `M_pp = 0`, as of dead units and inputs that are always zero, would come first;
    they come last, as they would make up a subnetwork without any effect.

    Args:
        model: the trained network.
        likelihood: as of `LinearisedLaplace`.
        loader: the training data.
        k: how many weights.
        settings: of the `LinearisedLaplace` that gives the variances, and `unpack=`, `weights=` or `num_data=` of its
            `fit`. By default the prior is isotropic; then its precision does not matter, the smallest `M_pp` win.

    Returns:
        Masks by name of parameter, of those parameters that have a weight among the `k`.

    Raises:
        ValueError: if there are not so many weights, or for another `method`.

    Example:
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> model = nn.Linear(3, 1)
        >>> masks = largest_variance(model, "regression", [(x, y)], 2)
        >>> la = LinearisedLaplace(model, "regression", parameters=masks).fit([(x, y)], progress=False)
        >>> la.samples_.shape
        torch.Size([64, 2])
    """
    of_fit = {name: settings.pop(name) for name in ("unpack", "weights", "num_data") if name in settings}
    if settings.get("method", "diagonal") != "diagonal":
        raise ValueError(
            f"`largest_variance(method={settings['method']!r})`: the variances are those of the diagonal posterior; "
            "leave out `method`."
        )
    settings = {"prior": "isotropic", **settings, "method": "diagonal", "num_samples": 2}
    la = LinearisedLaplace(model, likelihood, **settings)
    task = la.settings.method.prepare(prepare(la.settings, la.network, loader, progress=False, **of_fit))
    size = la.network.num_parameters
    if not 1 <= k <= size:
        raise ValueError(
            f"`largest_variance(k={k})`: there are {size} weights to choose from; give a k from 1 to that."
        )
    fit = task.method.fit(task, Tuned(), _TOLERANCE)
    assert isinstance(fit, FactoredFit)
    variance, seen = fit.marginal_variance(), fit.curvature.eigenvalues() > 0
    first = torch.where(seen, variance, 0)
    mask = torch.zeros(len(variance), dtype=torch.bool, device=variance.device)
    mask[first.topk(k).indices] = True
    masks = la.network.unflatten(mask)
    return {name: of_name for name, of_name in masks.items() if bool(of_name.any())}
