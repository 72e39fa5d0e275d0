"""What data say of predictions: the scale of a posterior, and scores for conformal prediction."""

import math
from dataclasses import replace

import torch

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.held_out import HeldOut, check_finite
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.method import Fit
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.on_training_data import calibration_of, deviations_of, enough, held_out_problems
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import covariance_of, predict
from laplace_sampling.predictions.calibration import Calibration, calibrate, calibrate_regression
from laplace_sampling.predictions.conformal import SplitConformal


def calibrated(held_out: HeldOut, network: Linearisation, posterior: Posterior, fit: Fit | None) -> Posterior:
    """The posterior with the scale, and the temperature or noise, under which some of these data are likeliest.

    `fit` is None for a posterior that was loaded without its data.

    Raises:
        ValueError: if what is predicted is not finite.
    """
    if fit is not None and not len(posterior.samples):
        posterior = posterior.drawn(fit.with_samples())
    posterior = replace(posterior, calibration=Calibration(), conformal=None)
    num, total = enough(len(posterior.samples) * held_out.layout.size), held_out.data.num_data
    some = torch.arange(0, total, 1 if held_out.data.in_order else math.ceil(total / num))[:num]
    model = held_out.model(network, held_out.with_targets(some))
    likelihood, y, f = model.likelihood, model.targets, model.network_outputs
    deviations = deviations_of(model.features, posterior.samples, torch.arange(len(f)))
    check_finite(deviations)
    if not isinstance(posterior.likelihood, Gaussian):
        return replace(posterior, calibration=calibrate(likelihood, y, f, deviations))
    function = covariance_of(posterior, fit, model.features)
    flat = torch.einsum("knc,knd->ncd", deviations, deviations) / len(deviations)
    covariance = flat if function is None else function.blocks()
    noise = (1 / posterior.likelihood.precision(f.double())).expand(f.shape)
    return replace(posterior, calibration=calibrate_regression(y.reshape(f.shape), f, covariance, noise))


def split_conformal(held_out: HeldOut, network: Linearisation, posterior: Posterior, fit: Fit | None) -> SplitConformal:
    """Scores of these data.

    Raises:
        ValueError: where outputs have several shapes; if what is predicted is not finite.
    """
    if held_out.data.ragged:
        raise ValueError(
            "`calibrate_conformal(val_loader)` needs outputs of one shape, but those of these data are of several."
        )
    scores = []
    for batch in torch.arange(held_out.data.num_data).split(posterior.rows):
        prediction = predict(network, posterior, fit, held_out.data.inputs(batch))
        check_finite(prediction.outputs, prediction.deviations)
        scores.append(prediction.scores_of(held_out.targets[batch]).cpu())
    return SplitConformal.of(torch.cat(scores), len(posterior.samples))


def calibrated_by(
    held_out: HeldOut | None, fit: Fit, tangent: TangentModel, network: Linearisation, unequal_noise: bool
) -> tuple[Posterior, list[str]]:
    """The posterior of a fit, calibrated by held-out data if there are any, and what is wrong with its error bars."""
    calibration, problems = calibration_of(fit, tangent, held_out is not None)
    posterior = Posterior.of(fit, tangent, network, calibration, unequal_noise)
    if held_out is not None and fit.found.calibration is None:
        posterior = calibrated(held_out, network, posterior, fit)
    others = held_out_problems(held_out, tangent, posterior.likelihood, posterior.calibration)
    return posterior, [*problems, *others, *posterior.calibration.problems]
