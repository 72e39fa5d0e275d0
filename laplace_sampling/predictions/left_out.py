"""Log-likelihoods of the targets of a regression, each predicted from the others."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import log_density
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.leave_one_out import LeaveOneOut


def left_out_regression(
    left_out: LeaveOneOut, targets: Float[Tensor, "N C"], noise_variance: Float[Tensor, "N C"]
) -> Calibration:
    """The log-likelihoods of targets that are predicted from the others.

    Their difference has no standard error. By the linear model, whose features have seen each datum, the network alone
    predicts it better than new data: on four ReLU networks that were trained with weight decay it was ahead by 10 nats
    of 200 data where 200 test data were ahead by 1 to 2 with error bars.

    Args:
        left_out: predictions of the targets, with noise.
        targets: `y`, NaN where they are missing: data without any do not count.
        noise_variance: of each.
    """
    some = ~targets.isnan().all(1)
    with_error_bars, alone = (regression_log_probs(left_out, targets, noise_variance, by)[some] for by in (1.0, 0.0))
    return replace(Calibration().scored("left out", with_error_bars, alone), standard_error=None)


def regression_log_probs(
    left_out: LeaveOneOut, targets: Float[Tensor, "N C"], noise_variance: Float[Tensor, "N C"], scale: float
) -> Float[Tensor, " N"]:
    """The log-likelihood of the targets of each datum, predicted from the others; arguments are those above."""
    noise = torch.diag_embed(noise_variance)
    return log_density(targets - left_out.mean, scale * (left_out.covariance - noise) + noise)
