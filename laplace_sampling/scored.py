"""How well networks predict, from their training data alone, so that one of them can be chosen."""

import math
import warnings
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.calibrated import deviations_of, enough
from laplace_sampling.hyperparameters.network_evidence import DECADES, best_network_evidence
from laplace_sampling.linear_model.features import SomeFeatures, some_of
from laplace_sampling.linear_model.linear_model import TangentModel
from laplace_sampling.methods.method import Fit
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import covariance_of
from laplace_sampling.predictions.leave_one_out import (
    MOST_LEVERAGE,
    left_out_log_probs,
    root_of,
    sampling_bias,
    without_datum,
)
from laplace_sampling.predictions.model_score import Score, summary_of
from laplace_sampling.solvers.solver import ConvergenceWarning


def evidence_score(fit: Fit, tangent: TangentModel) -> Score:
    """`log p(y)/N` at the weights of the network, with the precisions of prior and noise at their maximum."""
    alpha, evidence = best_network_evidence(
        fit.model, fit.prior, fit.task.trained_weights, lambda prior: fit.at(prior).traces(DECADES)
    )
    num, nothing = fit.model.num_data, torch.zeros(0)
    value, error = (evidence.value - tangent.log_scale) / num, evidence.standard_error / num
    targets = summary_of(_targets(fit, tangent), in_order=False)
    size = fit.model.features.num_data
    return Score("evidence", value, error, num, nothing, nothing.long(), alpha, size, fit.approximate, targets)


def left_out_score(fit: Fit, tangent: TangentModel, posterior: Posterior, num_data: int) -> Score:
    """The mean of `log p(y_i | y_{−i})` of some training data; the posterior has its samples."""
    features, model, calibration = fit.model.features, fit.model, posterior.calibration
    num = min(num_data, features.num_data, enough(fit.task.num_samples * features.num_outputs))
    some = model.with_targets(some_of(features, num, None if tangent.in_order else fit.task.seed))
    if not len(some):
        raise ValueError("`score`: no training datum that was looked at has a target.")
    root, most, noisy = _root(fit, posterior, some)
    y, f, at = model.targets[some], model.network_outputs[some], fit.ggn.outputs_of(some)
    mean, rows = without_datum(model.likelihood, y, f, root, most, at)
    T = calibration.temperature
    log_probs = left_out_log_probs(
        calibration.likelihood(model.likelihood), y, mean / T, rows * math.sqrt(calibration.scale) / T
    )
    if tangent.weights is not None:
        log_probs = log_probs + tangent.weights[some].to(log_probs).log().where(model.observed(y), 0).sum(1)
    # A datum of weight two counts as two.
    weights = model.likelihood.weights(y).to(log_probs)
    score = Score.of("loo", (log_probs * weights / weights.mean()).cpu(), some, fit.alpha, features.num_data)
    if noisy and (bias := sampling_bias(model.likelihood, y, rows, at)) > score.standard_error:
        warnings.warn(
            f'`score("loo")`: noise of the samples changes it by something like {bias:.2g} nats for each datum, '
            f"more than its standard error of {score.standard_error:.2g}. Raise `num_samples`, or use "
            '`method="exact"` or "subset", or the score "evidence".',
            ConvergenceWarning,
            stacklevel=4,
        )
    return replace(
        score, without_correlations=fit.approximate, targets=summary_of(_targets(fit, tangent), in_order=True)
    )


def _root(fit: Fit, posterior: Posterior, some: Tensor) -> tuple[Float[Tensor, "m n C"], float, bool]:
    """`D` with the covariance `DᵀD` of the outputs of each datum, the largest leverage, and if it is of samples."""
    features = SomeFeatures(fit.model.features, some)
    function = covariance_of(posterior, fit, features)
    if function is not None and features.num_outputs <= fit.task.num_samples:
        return root_of(function.blocks()), MOST_LEVERAGE if fit.approximate else 1 - 1e-9, False
    samples = posterior.samples
    return deviations_of(fit.model.features, samples, some) / math.sqrt(len(samples)), MOST_LEVERAGE, True


def _targets(fit: Fit, tangent: TangentModel) -> Tensor:
    """The targets of all data, in their own units: without the weights that a fit multiplies them by."""
    model = fit.model
    targets = model.likelihood.unweighted_targets(model.targets)
    # A fit may hold all rows where the tangent model holds those of a part.
    return targets if tangent.weights is None else targets / tangent.weights
