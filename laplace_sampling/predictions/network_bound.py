r"""A lower bound of the log marginal likelihood of a network, which learnt labels cannot deceive.

For any Gaussian `q = N(w̄, (M + αA₁)⁻¹)` around the network's weights, with the network linearised there,

    log p(y) ≥ Σ_i E_q log p(y_i | f_i + φ_i ζ) − KL(q ‖ p),
    KL = ½ (α‖w̄‖² − γ(α) + log|I + A⁻¹M|),     log|I + A⁻¹M| = ∫_α^∞ γ(a) / a da.

For a loss that is quadratic it is the evidence at the network. Where a network is certain of its labels the curvature
of its loss vanishes, `q` is wide, and the evidence by Laplace's approximation is large; the loss itself rises for draws
of `q`, and the bound falls. It holds whatever `M` leaves out.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.some_features import SomeFeatures
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.predictions.looks import decades
from laplace_sampling.predictions.selection import grid

__all__ = ["log_determinant", "network_bound"]

# Draws of the function, each with its opposite, of a stream of their own.
_DRAWS, _STREAM = 16, 2**20 + 6
# Steps of the integral of `γ/a` for each factor of ten, and factors of ten above the largest eigenvalue, where it ends.
_A_DECADE, _ABOVE = 20, 4


def network_bound(
    model: LinearModel, path: CovariancePath, some: Tensor, weight_norm: float, seed: int
) -> tuple[float, Float[Tensor, " n"]]:
    """The prior precision at which the bound is largest of some, three for each factor of ten, and the bound there.

    The bound is for each datum, and its mean over the data is that of the log marginal likelihood by their number.

    Args:
        model: on the training data.
        path: the posterior for every prior precision.
        some: data by which the expectation is estimated.
        weight_norm: `‖w̄‖²` in the scaled coordinates of the prior.
        seed: of draws of the function.
    """
    features, num = SomeFeatures(model.features, some), model.features.num_data
    alphas = grid(path, features, (1e-8, 1e12))
    found = path.deviations(features, alphas, Draws(_DRAWS, seed, _STREAM))
    f, y = model.network_outputs[some].double(), model.targets[some]
    known: dict[int, Tensor] = {}

    def bound(index: int) -> float:
        if index not in known:
            z, alpha = found[index], float(alphas[index])
            losses = (model.likelihood.loss(f + z, y) + model.likelihood.loss(f - z, y)).mean(0) / 2
            divergence = 0.5 * (alpha * weight_norm - path.effective_dimension(alpha) + log_determinant(path, alpha))
            known[index] = -losses.double() - divergence / num
        return float(known[index].mean())

    start = max(decades(len(alphas)), key=bound)
    best = max(range(max(0, start - 3), min(len(alphas), start + 4)), key=bound)
    return float(alphas[best]), known[best]


def log_determinant(path: CovariancePath, alpha: float) -> float:
    """`log|I + A⁻¹M|`, by the trapezoidal rule in `log a`; above the last `a` it is `γ(a)`."""
    end = math.log(max(path.largest_eigenvalue, alpha)) + _ABOVE * math.log(10)
    steps = max(2, math.ceil(_A_DECADE * (end - math.log(alpha)) / math.log(10)))
    logs = torch.linspace(math.log(alpha), end, steps, dtype=torch.float64)
    gammas = torch.tensor([path.effective_dimension(math.exp(log)) for log in logs.tolist()], dtype=torch.float64)
    return float(torch.trapezoid(gammas, logs) + gammas[-1])
