r"""The scale of a posterior by its own training data, each left out in turn.

The features of the linear model have seen each datum, and it finds every network well calibrated. What helps is the
direction in which its logits move without a datum, at the size of the network's own logits.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import log_density
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.predictions.calibration import LOG_SCALE, Calibration, Labelled, label_losses, labels_of, parts_of
from laplace_sampling.predictions.leave_one_out import MOST_LEVERAGE, LeaveOneOut, without_datum

# Scales that are tried, four a decade: error bars never vanish.
SCALES = torch.logspace(-2, 2, 17, dtype=torch.float64)
# The size of logits of left-out data, relative to the network's own on its training data. The features of the linear
# model have seen each datum, so that it predicts it better than the network would. Tuned on 46 networks for small
# image tasks (docs/decisions.md): with 1.25 all 17 overconfident networks gained, one of the others lost
# 2 %; with 1.15 they gained less. On the eight digit networks half of it lost 0.3 to 0.5 where noise is memorised,
# and gained at most 0.05 elsewhere; twice of it lost 0.2 to 0.6 on six of them.
_MARGIN = 1.25


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
    root = deviations.double() / math.sqrt(len(deviations))
    without, _ = without_datum(likelihood, targets, mode_outputs, root, MOST_LEVERAGE)
    labels = labels_of(likelihood)
    left_out, trained = (_centred(labels, f) for f in (without, network_outputs.double()))
    # The linear model gives the direction only; its logits without a datum are far smaller than a network's would be.
    size = trained.norm(dim=-1, keepdim=True) / left_out.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return labels.flat(_MARGIN * size * left_out)


def _centred(labels: Labelled, f: Tensor) -> Tensor:
    """Logits by positions, without their mean over the classes, to which a softmax is blind."""
    f = labels.positions(f)
    return f - f.mean(-1, keepdim=True) if isinstance(labels, Categorical) else f


def left_out_classification(
    likelihood: Likelihood,
    targets: Tensor,
    network_outputs: Float[Tensor, "N C"],
    mode_outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
    *,
    full: Float[Tensor, "L N C"] | None = None,
    scales: Float[Tensor, " T"] = SCALES,
) -> Calibration:
    r"""The scale `τ` under which training labels are likeliest, each predicted at its `left_out_outputs`.

    `argmax_τ log N(log √τ | 0, 1) + Σ_i log (1/2K) Σ_k Σ_± p(y_i | f_i^{-i} ± √τ φ_i ζ_k)`; where a datum has several
    labels, each by itself. The prior matters where data are few and none of them is predicted wrongly: no error bars at
    all would then be likeliest. The log-likelihood of the network alone is that at `τ = 0`: of the same `f_i^{-i}`.

    Args:
        likelihood: as of `left_out_outputs`, and so are `targets`, `network_outputs` and `mode_outputs`.
        targets: see there.
        network_outputs: see there.
        mode_outputs: see there.
        deviations: `φ(x_i) ζ_k` of the posterior that is scaled.
        full: `φ(x_i) ζ_k` of the posterior of the linear model, with which a datum is left out, where this is another.
        scales: that are tried, by default from 0.01 to 100.
    """
    tried, parts = torch.cat([torch.zeros(1), scales.double()]), []
    for n in parts_of(deviations):
        y, d = targets[n], deviations[:, n]
        outputs = left_out_outputs(
            likelihood, y, network_outputs[n], mode_outputs[n], d if full is None else full[:, n]
        )
        parts.append(torch.stack([label_losses(likelihood, y, outputs, d, scale).sum(1) for scale in tried]).cpu())
    losses = torch.cat(parts, dim=1)
    best = 1 + int((losses[1:].sum(1) + 0.5 * (tried[1:].log() / LOG_SCALE).square()).argmin())
    scale = float(tried[best])
    at_bounds = ("scale",) if len(scales) > 1 and scale in (float(SCALES[0]), float(SCALES[-1])) else ()
    return Calibration(scale=scale, at_bounds=at_bounds).scored("left out", -losses[best], -losses[0])


def left_out_regression(
    left_out: LeaveOneOut, targets: Float[Tensor, "N C"], noise_variance: Float[Tensor, "N C"], scale: float
) -> Calibration:
    """A scale with the log-likelihoods of targets that are predicted from the others.

    Their difference has no standard error. By the linear model, whose features have seen each datum, the network alone
    predicts it better than new data: on four ReLU networks that were trained with weight decay it was ahead by 10 nats
    of 200 data where 200 test data were ahead by 1 to 2 with error bars.

    Args:
        left_out: predictions of the targets, with noise.
        targets: `y`, NaN where they are missing: data without any do not count.
        noise_variance: of each.
        scale: of the covariance without the noise.
    """
    some = ~targets.isnan().all(1)
    with_error_bars, alone = (regression_log_probs(left_out, targets, noise_variance, by)[some] for by in (scale, 0.0))
    return replace(Calibration(scale=scale).scored("left out", with_error_bars, alone), standard_error=None)


def regression_log_probs(
    left_out: LeaveOneOut, targets: Float[Tensor, "N C"], noise_variance: Float[Tensor, "N C"], scale: float
) -> Float[Tensor, " N"]:
    """The log-likelihood of the targets of each datum, predicted from the others; arguments are those above."""
    noise = torch.diag_embed(noise_variance)
    return log_density(targets - left_out.mean, scale * (left_out.covariance - noise) + noise)
