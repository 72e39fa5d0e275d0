r"""How wide the posterior should be: a factor `τ` of its covariance, from held-out data or without any.

A network may be overconfident or not, whatever its evidence says: at the prior precision of largest evidence the error
bars of a network that was stopped early make predictions worse. So probabilities are looked at before they are given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from laplace_sampling.likelihoods import Categorical, Gaussian, Likelihood

__all__ = ["Calibration", "held_out_classification", "held_out_regression", "leave_one_out_scale", "left_out_outputs"]

# Numbers of deviations that are worked on at once.
_NUMBERS = 2**19
# Scales that are tried: error bars are never taken to nothing.
_SCALES = torch.logspace(-2, 1, 13, dtype=torch.float64)
# Logits of data left out, relative to the network's own on its training data. The features of the linear model have
# seen each datum, so that it predicts it better than the network would; chosen on small image tasks (docs).
_MARGIN = 1.25
# The largest leverage of a datum that estimates from samples are believed.
_LEVERAGE = 0.95


@dataclass(frozen=True)
class Calibration:
    """What predictions are changed by.

    `scale` multiplies the covariance; outputs are divided by `temperature`; the noise variance of a regression is
    multiplied by `noise`.
    """

    scale: float = 1.0
    temperature: float = 1.0
    noise: float = 1.0

    def likelihood(self, fitted: Likelihood) -> Likelihood:
        """That of predictions."""
        if self.noise == 1.0 or not isinstance(fitted, Gaussian):
            return fitted
        return fitted.with_precision(torch.as_tensor(fitted.noise_precision) / self.noise)


def left_out_outputs(
    likelihood: Likelihood,
    targets: Tensor,
    network_outputs: Float[Tensor, "N C"],
    mode_outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
) -> Float[Tensor, "N C"]:
    r"""What the network might have said of each datum, had it not been trained on it.

    The linear model's `h + S(I − BS)⁻¹ ∂ℓ/∂h`, to first order in taking the datum out, with `S` the covariance of the
    deviations; brought to the size of the network's own logits, times a margin.

    Args:
        likelihood: categorical or Bernoulli.
        targets: `y`.
        network_outputs: `f(w̄, x_i)`.
        mode_outputs: `h(θ̄, x_i)`.
        deviations: `φ(x_i) ζ_k`.
    """
    h, d = mode_outputs.double(), deviations.double() / math.sqrt(len(deviations))
    # S(I − BS)⁻¹ = Dᵀ(I − D B Dᵀ)⁻¹D for S = DᵀD, by the singular values of D L.
    U, singular, _ = torch.linalg.svd(likelihood.root_transpose(h, d).permute(1, 0, 2), full_matrices=False)
    leverage = (singular**2).clamp_max(_LEVERAGE)
    along = torch.einsum("knc,nc->nk", d, likelihood.gradient(h, targets).double())
    along = along + (U @ ((leverage / (1 - leverage)) * (U.mT @ along[..., None])[..., 0])[..., None])[..., 0]
    left_out, own = (
        _centred(likelihood, f) for f in (h + torch.einsum("knc,nk->nc", d, along), network_outputs.double())
    )
    size = own.norm(dim=1, keepdim=True) / left_out.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return _MARGIN * size * left_out


def _centred(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Without the part of logits that a softmax does not see."""
    return f - f.mean(-1, keepdim=True) if isinstance(likelihood, Categorical) else f


def leave_one_out_scale(
    likelihood: Likelihood,
    targets: Tensor,
    network_outputs: Float[Tensor, "N C"],
    mode_outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
) -> float:
    r"""`τ` under which the training data are likeliest, each at its `left_out_outputs`, without validation data.

    `argmax_τ Σ_i log (1/2K) Σ_k Σ_± p(y_i | f_i^{-i} ± √τ φ_i ζ_k)`, between 0.01 and 10. Arguments as there.
    """
    total = torch.zeros(len(_SCALES), dtype=torch.float64, device=deviations.device)
    few = max(1, _NUMBERS // (len(deviations) * mode_outputs.shape[1]))
    for n in torch.arange(len(targets), device=deviations.device).split(few):
        y, d = targets[n], deviations[:, n]
        outputs = left_out_outputs(likelihood, y, network_outputs[n], mode_outputs[n], d)
        total += torch.stack([_mean_loss(likelihood, y, outputs, d, scale) for scale in _SCALES]) * len(n)
    return float(_SCALES[int(total.argmin())])


def _mean_loss(
    likelihood: Likelihood, targets: Tensor, outputs: Tensor, deviations: Tensor, scale: Tensor | float
) -> Tensor:
    """Negative log-likelihood of a datum, averaged over samples `f ± φζ` within and data without the logarithm."""
    scaled = torch.as_tensor(scale, dtype=torch.float64, device=outputs.device).sqrt() * deviations.double()
    logs = -likelihood.loss(torch.cat([outputs + scaled, outputs - scaled]), targets)
    return math.log(len(logs)) - logs.logsumexp(0).mean()


def held_out_classification(
    likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"], deviations: Float[Tensor, "K N C"]
) -> Calibration:
    r"""Scale and temperature under which held-out data are likeliest, `p = (1/2K) Σ_k Σ_± σ((f ± √τ φζ_k)/T)`.

    `log τ` and `log T` have standard normal priors, which matter where data are few: without an error among them, the
    likeliest temperature of a few dozen is zero.

    Args:
        likelihood: categorical or Bernoulli.
        targets: of the held-out data.
        outputs: of the network.
        deviations: `φ(x) ζ_k`.
    """
    outputs = outputs.double()

    def loss(at: Tensor) -> Tensor:
        T = at[1].exp()
        return _mean_loss(likelihood, targets, outputs / T, deviations / T, at[0].exp())

    scale, temperature = _likeliest(loss, len(outputs), [(-9.0, 5.0), (-3.0, 5.0)])
    return Calibration(scale=scale, temperature=temperature)


def held_out_regression(
    targets: Float[Tensor, "N C"],
    outputs: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C C"],
    noise_variance: Float[Tensor, "N C"],
) -> Calibration:
    r"""The scale of the covariance, and a factor of the noise variance, under which held-out data are likeliest.

    Their logarithms have standard normal priors.

    Args:
        targets: of the held-out data.
        outputs: of the network.
        covariance: of the function, of each datum.
        noise_variance: of each output.
    """
    error, S, noise = (v.double() for v in (targets - outputs, covariance, noise_variance))

    def loss(at: Tensor) -> Tensor:
        total = at[0].exp() * S + torch.diag_embed(at[1].exp() * noise)
        return -torch.distributions.MultivariateNormal(torch.zeros_like(error), total).log_prob(error).mean()

    scale, factor = _likeliest(loss, len(error), [(-9.0, 5.0), (-9.0, 9.0)])
    return Calibration(scale=scale, noise=factor)


def _likeliest(
    mean_loss: Callable[[Tensor], Tensor], num_data: int, bounds: list[tuple[float, float]]
) -> tuple[float, ...]:
    """Exponentials of the arguments of largest posterior, from two starts: as it is, and hardly any spread."""

    def value_and_gradient(at: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(at).requires_grad_()
        with torch.enable_grad():
            value = mean_loss(point) + 0.5 * point.square().sum() / num_data
            (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.numpy()

    starts = ([0.0] * len(bounds), [-4.0] + [0.0] * (len(bounds) - 1))
    found = [minimize(value_and_gradient, start, jac=True, bounds=bounds, method="L-BFGS-B") for start in starts]
    return tuple(float(v) for v in np.exp(min(found, key=lambda result: result.fun).x))
