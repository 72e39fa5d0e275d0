"""Predictions of a fitted posterior: from the samples, and with exact covariances where it has them."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.dense_covariance import DenseCovariance
from laplace_sampling.fits import Fit
from laplace_sampling.gram import features_at
from laplace_sampling.likelihoods import Gaussian
from laplace_sampling.linearise import Linearisation
from laplace_sampling.measurements import ObservedFeatures, as_measurement, noise_weights
from laplace_sampling.operators import Features
from laplace_sampling.predictive import ClassificationPrediction, FunctionCovariance, Guarded, RegressionPrediction
from laplace_sampling.saving import Posterior
from laplace_sampling.tangent_model import Observation

__all__ = ["check_inputs", "predict"]


def check_inputs(x: Tensor, num_samples: int | None, available: int) -> None:
    """Raise if inputs cannot be predicted with so many samples."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`predict(x)` needs a tensor, but got {type(x).__name__}.")
    if x.dim() == 0 or len(x) == 0:
        raise ValueError(f"`predict(x)` needs a batch of inputs [N, ...] with N of at least 1, got {list(x.shape)}.")
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise ValueError("`predict(x)`: x contains NaN or infinity.")
    if num_samples is not None and not 1 <= num_samples <= available:
        raise ValueError(
            f"`predict(num_samples={num_samples})`: there are {available} samples; construct "
            f"`LinearisedLaplace(..., num_samples={num_samples})` and fit for more."
        )


def predict(
    network: Linearisation,
    posterior: Posterior,
    fit: Fit | None,
    x: Float[Tensor, "N ..."],
    *,
    samples: Float[Tensor, "K P"],
    noise_variances: Tensor | None,
    observation: Observation | None,
    observed: bool,
    check: Callable[[], None],
) -> RegressionPrediction | ClassificationPrediction:
    """Predictions of the outputs, or of measurements of them.

    Args:
        network: the linearised network.
        posterior: what was fitted.
        fit: with the training data, where these are at hand.
        x: inputs.
        samples: of the posterior, `ζ`.
        noise_variances: `R` at the inputs.
        observation: `T`, if the posterior was fitted to measurements.
        observed: whether these are to be predicted.
        check: raises if the network is another one when covariances are asked for.
    """
    outputs = network(x)
    deviations = torch.cat([network.jvp(part, samples) for part in x.split(posterior.rows)], dim=1)
    features: Features = features_at(network, x, posterior.rows, outputs[0].numel())
    if observed and observation is not None:
        measurement = as_measurement(observation, features.num_outputs, outputs.dtype)
        features = ObservedFeatures(features, measurement)
        outputs, deviations = measurement.apply(outputs.reshape(len(x), -1)), measurement.apply(deviations)
    deviations = deviations.reshape(len(samples), *outputs.shape)
    function: FunctionCovariance | None = None if fit is None else fit.covariance_at(features)
    if "factor" in posterior.exact:
        function = DenseCovariance.of(features, posterior.prior, posterior.exact)
    if function is not None:
        function = Guarded(function, check)
    if not isinstance(posterior.likelihood, Gaussian):
        return ClassificationPrediction(outputs, deviations, posterior.likelihood, function=function)
    scale = None
    if noise_variances is not None:
        weights = noise_weights(noise_variances, (len(outputs), outputs[0].numel()))
        scale = (weights**-2).to(outputs).reshape(outputs.shape)
    return RegressionPrediction(
        outputs,
        deviations,
        posterior.likelihood,
        function=function,
        noise_scale=scale,
        has_noise=observation is None or observed,
    )
