r"""How wide the posterior should be: a factor `τ` of its covariance, from held-out data or without any.

A network may be overconfident or not, whatever its evidence says: at the prior precision of largest evidence the error
bars of a network that was stopped early make predictions worse. So probabilities are looked at before they are given.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.solvers.checks import check_positive

__all__ = [
    "Calibration",
    "Labelled",
    "held_out_classification",
    "held_out_regression",
    "label_losses",
    "labelled",
    "leave_one_out_scale",
    "left_out_outputs",
    "parts_of",
]

# Numbers of deviations that are worked on at once: a definition, 1 MiB.
_NUMBERS = 2**17
# Scales that are tried, four a decade: error bars never vanish.
_SCALES = torch.logspace(-2, 2, 17, dtype=torch.float64)
# "Eight digit networks" below are an MLP of 16 units on 200 images, two seeds each: trained to convergence; stopped
# early; with 20 % noisy labels; with noisy labels that it has memorised. Numbers are test log-likelihoods in nats.
# The size of logits of left-out data, relative to the network's own on its training data. The features of the linear
# model have seen each datum, so that it predicts it better than the network would. Tuned on 46 networks for small
# image tasks (docs/decisions/calibration.md): with 1.25 all 17 overconfident networks gained, one of the others lost
# 2 %; with 1.15 they gained less. On the eight digit networks half of it lost 0.3 to 0.5 where noise is memorised,
# and gained at most 0.05 elsewhere; twice of it lost 0.2 to 0.6 on six of them.
_MARGIN = 1.25
# The largest leverage of a datum: estimates from few samples reach one, where the update of a left-out datum
# diverges. A guard: on the eight digit networks half and twice its distance to one, 0.975 and 0.9, changed nothing,
# nor did 0.999. Half of the value shrank the scale of two of them two- and threefold, for a gain of 0.03.
_LEVERAGE = 0.95
# Standard deviations of Gaussian priors of `log τ`, so of `log √τ` one, and of `log T`. Of error bars and a
# temperature that explain held-out data equally well, the error bars are believed: they tell data far from the
# training data. Chosen by corrupted and held-out images of 29 small networks (docs/decisions/calibration.md). With 80
# validation images half and twice the first changed the eight digit networks by at most 0.03, and one by a gain of
# 0.06 with half; without validation data by at most 0.01. Half of the second lost 0.05 and 0.1 where noise is
# memorised (T fell from 2.4 to 1.5), twice of it gained 0.05 and 0.01 there; both changed the others by at most
# 0.005.
_LOG_SCALE, _LOG_TEMPERATURE = 2.0, 0.5
# The same for the temperature of the network alone where it is below one: predictions are surer than the network's
# only where many data say so. Without it 40 validation images without an error took the temperature towards zero.
# With 80 of them half of it lost 0.2 and twice of it gained 0.2 for the networks that were stopped early, which are
# not sure enough; the other six changed by at most 0.002.
_LOG_SHARPER = 0.1


@dataclass(frozen=True)
class Calibration:
    """Factors that change predictions.

    `scale` multiplies the covariance; outputs are divided by `temperature`; the noise variance of a regression is
    multiplied by `noise`.
    """

    scale: float = 1.0
    temperature: float = 1.0
    noise: float = 1.0

    @classmethod
    def of_scale(cls, scale: float | str) -> "Calibration":
        """A scale that the user gives."""
        check_positive("`scale`", scale, also=' (or "auto" in `fit_hyperparameters`)')
        return cls(scale=float(scale))

    def likelihood(self, fitted: Likelihood) -> Likelihood:
        """The likelihood of predictions."""
        if self.noise == 1.0 or not isinstance(fitted, Gaussian):
            return fitted
        return fitted.with_precision(torch.as_tensor(fitted.noise_precision) / self.noise)


Labelled = Bernoulli | Categorical


def labelled(likelihood: Likelihood) -> Labelled | None:
    """The likelihood of labels, one or several a datum, whatever the weights of data; None for any other."""
    return likelihood.unweighted if isinstance(likelihood.unweighted, Labelled) else None


def left_out_outputs(
    likelihood: Likelihood,
    targets: Tensor,
    network_outputs: Float[Tensor, "N C"],
    mode_outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
) -> Float[Tensor, "N C"]:
    r"""Estimates of the network's outputs for each datum, had it not been trained on it.

    The linear model's `h + S(I − BS)⁻¹ ∂ℓ/∂h`, to first order in taking the datum out, with `S` the covariance of the
    deviations; scaled to the size of the network's own logits, of each label, times a margin. An image is left out
    with the labels of all its pixels.

    Args:
        likelihood: categorical or Bernoulli, or one of these with weights.
        targets: `y`.
        network_outputs: `f(w̄, x_i)`.
        mode_outputs: `h(θ̄, x_i)`.
        deviations: `φ(x_i) ζ_k`.
    """
    h, d = mode_outputs.double(), deviations.double() / math.sqrt(len(deviations))
    # S(I − BS)⁻¹ = Dᵀ(I − D B Dᵀ)⁻¹D for S = DᵀD, by the singular values of D L.
    U, singular, _ = torch.linalg.svd(likelihood.root_transpose(h, d, targets).permute(1, 0, 2), full_matrices=False)
    leverage = (singular**2).clamp_max(_LEVERAGE)
    slope = torch.einsum("knc,nc->nk", d, likelihood.gradient(h, targets).double())
    slope = slope + (U @ ((leverage / (1 - leverage)) * (U.mT @ slope[..., None])[..., 0])[..., None])[..., 0]
    labels = _labels_of(likelihood)
    left_out, trained = (
        _centred(labels, f) for f in (h + torch.einsum("knc,nk->nc", d, slope), network_outputs.double())
    )
    # The linear model gives the direction only; its logits without a datum are far smaller than a network's would be.
    size = trained.norm(dim=-1, keepdim=True) / left_out.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return labels.flat(_MARGIN * size * left_out)


def _labels_of(likelihood: Likelihood) -> Labelled:
    labels = labelled(likelihood)
    assert labels is not None
    return labels


def _centred(labels: Labelled, f: Tensor) -> Tensor:
    """Logits by positions, without their mean over the classes, to which a softmax is blind."""
    f = labels.positions(f)
    return f - f.mean(-1, keepdim=True) if isinstance(labels, Categorical) else f


def leave_one_out_scale(
    likelihood: Likelihood,
    targets: Tensor,
    network_outputs: Float[Tensor, "N C"],
    mode_outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
) -> float:
    r"""`τ` under which the training labels are likeliest, each at its `left_out_outputs`, without validation data.

    `argmax_τ log N(log √τ | 0, 1) + Σ_i log (1/2K) Σ_k Σ_± p(y_i | f_i^{-i} ± √τ φ_i ζ_k)`, between 0.01 and 100; where
    a datum has several labels, each by itself. The prior matters where data are few and none of them is predicted
    wrongly: no error bars at all would then be likeliest. Arguments as there.
    """
    total = 0.5 * (_SCALES.log() / _LOG_SCALE).square().to(deviations.device)
    for n in parts_of(deviations):
        y, d = targets[n], deviations[:, n]
        outputs = left_out_outputs(likelihood, y, network_outputs[n], mode_outputs[n], d)
        total += torch.stack([label_losses(likelihood, y, outputs, d, scale).sum() for scale in _SCALES])
    return float(_SCALES[int(total.argmin())])


def label_losses(
    likelihood: Likelihood, targets: Tensor, outputs: Tensor, deviations: Tensor, scale: Tensor | float
) -> Float[Tensor, "N S"]:
    """Negative log-likelihood of each label under the mean of its probabilities at samples `f ± φζ`, times weights."""
    labels, y = _labels_of(likelihood), likelihood.unweighted_targets(targets)
    scaled = torch.as_tensor(scale, dtype=torch.float64, device=outputs.device).sqrt() * deviations.double()
    logs = -labels.losses(torch.cat([outputs + scaled, outputs - scaled]), y)
    return likelihood.weights(targets)[:, None] * (math.log(len(logs)) - logs.logsumexp(0))


def parts_of(deviations: Float[Tensor, "K N C"]) -> tuple[Tensor, ...]:
    """Split the indices of the data so that a part of the deviations fits in memory."""
    data = torch.arange(deviations.shape[1], device=deviations.device)
    return data.split(max(1, _NUMBERS // max(1, deviations[:, :1].numel())))


def held_out_classification(
    likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"], deviations: Float[Tensor, "K N C"]
) -> Calibration:
    r"""Scale and temperature under which held-out data are likeliest, `p = (1/2K) Σ_k Σ_± σ((f ± √τ φζ_k)/T)`.

    `log τ` and `log T` have normal priors of standard deviations 2 and ½, which matter where data are few. `T` is at
    least one, or the temperature of the network without error bars (whose logarithm has 0.1) where the network is not
    sure enough. Below, it would take back what the error bars widen: no loss among data like the held-out ones, but
    others would be predicted more surely than by the network.

    Args:
        likelihood: categorical or Bernoulli.
        targets: of the held-out data.
        outputs: of the network.
        deviations: `φ(x) ζ_k`.
    """
    outputs, parts = outputs.double(), parts_of(deviations)

    def losses(deviations: Tensor, log_scale: Tensor, log_temperature: Tensor) -> Iterator[Tensor]:
        for n in parts:  # a graph for each, which is freed
            scale, T = log_scale.exp(), log_temperature.exp()
            yield label_losses(likelihood, targets[n], outputs[n] / T, deviations[:, n] / T, scale).sum()

    # The temperature of the network alone is the lower bound: below it, `T` only takes back what the scale widens.
    no_deviations, log_one = torch.zeros_like(deviations[:1]), torch.zeros(())
    (network_temperature,) = _likeliest(
        lambda logs: losses(no_deviations, log_one, logs[0]), len(outputs), [(-3.0, 0.0)], (_LOG_SHARPER,)
    )
    scale, temperature = _likeliest(
        lambda logs: losses(deviations, logs[0], logs[1]),
        len(outputs),
        [(-9.0, 5.0), (math.log(network_temperature), 5.0)],
        (_LOG_SCALE, _LOG_TEMPERATURE),
    )
    return Calibration(scale=scale, temperature=temperature)


def held_out_regression(
    targets: Float[Tensor, "N C"],
    outputs: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C C"],
    noise_variance: Float[Tensor, "N C"],
) -> Calibration:
    r"""The scale of the covariance, and a factor of the noise variance, under which held-out data are likeliest.

    Their logarithms have normal priors of standard deviations 2 and 1.

    Args:
        targets: of the held-out data.
        outputs: of the network.
        covariance: of the function, of each datum.
        noise_variance: of each output.
    """
    error, S, noise = (v.double() for v in (targets - outputs, covariance, noise_variance))

    def losses(logs: Tensor) -> Iterator[Tensor]:
        total = logs[0].exp() * S + torch.diag_embed(logs[1].exp() * noise)
        yield -torch.distributions.MultivariateNormal(torch.zeros_like(error), total).log_prob(error).sum()

    scale, factor = _likeliest(losses, len(error), [(-9.0, 5.0), (-9.0, 9.0)], (_LOG_SCALE, 1.0))
    return Calibration(scale=scale, noise=factor)


def _likeliest(
    losses: Callable[[Tensor], Iterator[Tensor]],
    num_data: int,
    bounds: list[tuple[float, float]],
    stddevs: tuple[float, ...],
) -> tuple[float, ...]:
    """Exponentials of the likeliest logarithms, from three starts: all factors one; a small first; large others."""
    from scipy.optimize import minimize  # slow to import

    precisions = np.array(stddevs) ** -2.0

    def value_and_gradient(logs: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = 0.5 * float(logs @ (precisions * logs)), precisions * logs
        point = torch.from_numpy(logs).requires_grad_()
        with torch.enable_grad():
            # A part at a time, so that memory holds the graph.
            for loss in losses(point):
                value += float(loss.detach())
                gradient += torch.autograd.grad(loss, point)[0].numpy()
        # Per datum, since the tolerances of L-BFGS are absolute in the gradient.
        return value / num_data, gradient / num_data

    # The objective may have several minima: a small scale and a high temperature explain the same labels.
    zeros = [0.0] * (len(bounds) - 1)
    starts = ([0.0, *zeros], [max(-4.0, bounds[0][0]), *zeros], [0.0, *(2.0 for _ in zeros)])
    results = [minimize(value_and_gradient, start, jac=True, bounds=bounds, method="L-BFGS-B") for start in starts]
    return tuple(float(v) for v in np.exp(min(results, key=lambda result: result.fun).x))
