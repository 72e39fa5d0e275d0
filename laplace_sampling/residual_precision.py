"""The noise precision that explains the residuals of a network."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from laplace_sampling.data.training_data import Data
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.measurement import Observation
from laplace_sampling.preparation import tangent_of

_NO_DATA = Data()


def residual_precision(
    model: nn.Module, loader: Iterable[Any], *, observe: Observation = None, data: Data = _NO_DATA
) -> float:
    r"""`b` of the Gaussian noise that explains the residuals of a network, `1/b = Σ (y − T f(x))²/n` over `n` targets.

    A network is nearer to the data that it was trained on than to others: with these the noise comes out too small, by
    `1 − γ/n` of a fit with γ effective parameters. Measurements that the network has not seen, as a few angles of a
    tomography, contain the noise and the network's own error. Both are what error bars should have.

    Args:
        model: the trained network, which is evaluated as in a fit, in `eval` mode.
        loader: batches `(x, y)`. Targets of NaN do not count, nor do measurements that are zero whatever the outputs
            are.
        observe: `T` of measurements `y = T f(x) + noise`, as in `Gaussian`, of those in `loader`; another one than that
            of the fit if these are others.
        data: as in `fit`; with `noise_variances` `R` it is `b` of the variances `R/b`.

    Returns:
        `b = 1/σ²`, in the units of the targets to the power of -2.

    Raises:
        ValueError: if there are no targets, or the network explains them exactly.

    Example:
        >>> import torch
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> network = nn.Linear(3, 1)
        >>> b = residual_precision(network, [(x, y)])
        >>> bool(abs(1 / b - (network(x) - y).square().mean()) < 1e-6)
        True
    """
    la = LinearisedLaplace(model, Gaussian(1.0, learn=False, observe=observe))
    tangent = tangent_of(la.settings, la.network, la.settings.likelihood, loader, data).model
    errors = float(tangent.squared_errors(tangent.network_outputs).sum())
    if not errors:
        raise ValueError(
            "`residual_precision(model, loader)`: the network gives these targets exactly, so that they say nothing of "
            "the noise: give the loader of data that it was not trained on."
        )
    return tangent.num_observations / errors
