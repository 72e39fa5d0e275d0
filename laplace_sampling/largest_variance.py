"""Which weights a subnetwork is best made of: those of largest marginal variance."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.training_data import Data
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.networks.filters import FilterNetwork

_NO_DATA = Data()


def largest_variance(
    model: nn.Module,
    likelihood: str | Likelihood,
    loader: Iterable[Any],
    k: int,
    *,
    data: Data = _NO_DATA,
    **settings: Any,
) -> dict[str, Tensor]:
    r"""Masks of the `k` weights of largest variance under a diagonal posterior, for `parameters=`.

    If only `k` weights are random, this choice has the smallest Wasserstein distance to the diagonal posterior, `W₂² =
    Σ_{p∉S} 1/(M_pp + A_pp)` (Daxberger et al. 2021). The subnetwork itself has all correlations. Weights that do not
    affect the training data, `M_pp = 0`, as with dead units and inputs that are always zero, have the largest variance.
    They come last here, because a subnetwork of them would have no effect.

    Args:
        model: the trained network.
        likelihood: as in `LinearisedLaplace`.
        loader: the training data.
        k: the number of weights.
        data: as in `fit`.
        settings: further arguments of `LinearisedLaplace`. By default the prior is isotropic; then its precision does
            not matter, and the weights of largest `1/M_pp` are taken.

    Returns:
        Masks by name, for each parameter with a weight among the `k`.

    Raises:
        ValueError: if there are fewer weights, or for another `method`.

    Example:
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> model = nn.Linear(3, 1)
        >>> masks = largest_variance(model, "regression", [(x, y)], 2)
        >>> la = LinearisedLaplace(model, "regression", parameters=masks).fit([(x, y)], progress=False)
        >>> la.samples_.shape
        torch.Size([64, 2])
    """
    if settings.setdefault("method", "diagonal") != "diagonal":
        raise ValueError(
            f"`largest_variance(method={settings['method']!r})`: the variances are those of the diagonal posterior; "
            "leave out `method`."
        )
    check_whole("`largest_variance(k=...)`", k, 1)
    la = LinearisedLaplace(model, likelihood, **settings)
    if k > la.network.num_parameters:
        raise ValueError(
            f"`largest_variance(k={k})`: there are {la.network.num_parameters} weights to choose from; give a k from 1 "
            "to that."
        )
    if isinstance(la.network, FilterNetwork):
        raise ValueError(
            "`largest_variance` compares weights that are independent in the prior: leave out "
            '`prior="filterwise"`, or take "isotropic".'
        )
    posterior = la.fit(loader, data=data, progress=False).posterior_
    curvature, prior = posterior.curvature, posterior.prior
    assert curvature is not None
    # Weights that the data do not see have the prior's variance, the largest of all, and no effect.
    is_seen = curvature.eigenvalues() > 0
    variance = torch.where(is_seen, curvature.variance(prior.spread()) * prior.scale**2, 0)
    mask = torch.zeros(len(variance), dtype=torch.bool, device=variance.device)
    mask[variance.topk(k).indices] = True
    masks = la.network.unflatten(mask)
    return {name: of_name for name, of_name in masks.items() if bool(of_name.any())}
