"""Predictions of a fitted posterior: from the samples, and with exact covariances where it has them."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.data import DataLoader, Dataset

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.data.batches import (
    Layout,
    as_tensors,
    batched,
    concatenate,
    flattened,
    flaw_of,
    num_rows,
    place,
    split,
)
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.measurement import as_measurement
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features, ObservedFeatures, features_at
from laplace_sampling.linear_model.linear_model import noise_weights
from laplace_sampling.methods.method import Fit
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.function_covariance import (
    DenseCovariance,
    FunctionCovariance,
    OnRequest,
    factored_covariance,
)
from laplace_sampling.predictions.novelty import Novelty
from laplace_sampling.predictions.prediction import Prediction, make_prediction

# Outputs are computed of so many times the data of a product, which holds more for each: one sample for each of these.
_DATA_OF_OUTPUTS = 16


def checked_inputs(x: Any, call: str = "predict") -> Any:
    """The inputs, with tensors in place of arrays; raises if they cannot be predicted."""
    if isinstance(x, DataLoader | Dataset):
        raise TypeError(
            f"`{call}(x)` takes the inputs of one batch, but got a {type(x).__name__}: predict its batches one by "
            "one, since a prediction holds samples of all its outputs."
        )
    x = as_tensors(x)
    tensors = batched(x)[0]
    if any(is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        raise TypeError(
            f"`{call}(x)` does not work inside a transform of `torch.func`, such as `vmap`, `grad` or `jvp`: it takes "
            "a batch of inputs at once, and gives no derivatives. Call it outside."
        )
    if not tensors and not isinstance(x, Tensor):
        raise TypeError(f"`{call}(x)` needs a tensor, or a tuple or dictionary of them, but got {type(x).__name__}.")
    if not tensors:
        shape = list((tensors or [x])[0].shape)
        raise ValueError(f"`{call}(x)` needs a batch of inputs [N, ...], got {shape}.")
    if (flaw := flaw_of(x)) is not None:
        raise ValueError(f"`{call}(x)`: x contains {flaw}.")
    return x


def samples_for(num_samples: int | None, accuracy: float | None, available: int, call: str = "predict") -> int:
    """How many samples a prediction takes, by default all of them: `1/2a²` for standard deviations accurate to `a`.

    Variances of `K` samples are `χ²_K/K`, so that standard deviations have a relative standard error of `1/√(2K)`.

    Raises:
        ValueError: if both are given, or there are not as many.
    """
    given = f"num_samples={num_samples}"
    if accuracy is not None:
        check_positive("`predict(accuracy=...)`", accuracy)
        if num_samples is not None:
            raise ValueError("`predict(num_samples=..., accuracy=...)`: give one of them, as each sets the other.")
        given, num_samples = f"accuracy={accuracy}", math.ceil(1 / (2 * accuracy**2) - 1e-9)
    elif num_samples is not None:
        check_whole(f"`{call}(num_samples=...)`", num_samples, 1)
    if num_samples is not None and num_samples > available:
        raise ValueError(
            f"`{call}({given})`: there are {available} samples, by which standard deviations are accurate to "
            f"{(2 * available) ** -0.5:.2g}; construct `LinearisedLaplace(..., num_samples={num_samples})` and fit for "
            "more."
        )
    return available if num_samples is None else num_samples


def check_options(likelihood: Likelihood, observed: bool, noise_variances: Tensor | None) -> None:
    """Raise if the likelihood has no measurements, or no noise, that are asked for."""
    no_measurements = observed and getattr(likelihood, "observe", None) is None
    if no_measurements or (noise_variances is not None and not likelihood.quadratic):
        raise ValueError(
            "`predict(observed=True)` needs a likelihood `Gaussian(observe=T)`, and `noise_variances` a regression."
        )


def _check_axes(outputs: Tensor, layout: Layout, fitted: Layout | None) -> None:
    """Raise if the outputs of a datum have other axes than those of the training data; lengths may differ."""
    if fitted is not None and [len(shape) for _, shape in layout.heads] != [len(shape) for _, shape in fitted.heads]:
        expected = ["N", *fitted.shape]
        raise ValueError(
            f"`predict(x)`: the model gives outputs {list(outputs.shape)} for x, but those of the training data were "
            f"[{', '.join(map(str, expected))}]. x must have the axis of the batch also for one datum, as `x[None]`."
        )


def predict(
    network: Linearisation,
    posterior: Posterior,
    fit: Fit | None,
    x: Any,
    *,
    num_samples: int,
    seed: int,
    samples: Callable[[], Float[Tensor, "K P"]] | None = None,
    noise_variances: Tensor | None = None,
    observed: bool = False,
    fitted_layout: Layout | None = None,
    novelty: Novelty | None = None,
    check: Callable[[], None] = lambda: None,
) -> Prediction:
    """Predictions of the outputs, or of measurements of them.

    Draws of the outputs of a datum are made from their covariance if it has a closed form and `draws_are_cheap`.

    Args:
        network: the linearised network.
        posterior: what was fitted.
        fit: with the training data, where these are at hand.
        x: inputs.
        num_samples: how many of the samples are used, the first ones, and how many draws there are.
        seed: of draws.
        samples: draws the samples of the posterior, if they are not there.
        noise_variances: `R` at the inputs.
        observed: whether measurements of the outputs are to be predicted.
        fitted_layout: of the outputs of a datum of the training data, where these are at hand.
        novelty: ranks inputs among the training data.
        check: raises if the network is another one when covariances are asked for.
    """
    x = place(x, network.device, network.dtype)
    whole = network
    with nullcontext([]) if novelty is None else novelty.watching(network, x) as seen:
        outputs, layout, network, x = _evaluated(network, x, posterior.rows * _DATA_OF_OUTPUTS)
    _check_axes(outputs, layout, fitted_layout)
    features: Features = features_at(network, x, posterior.rows, layout)
    own, likelihood, calibration = outputs, posterior.likelihood, posterior.calibration
    observation, measurement = getattr(likelihood, "observe", None), None
    if observed and observation is not None:
        measurement = as_measurement(observation, outputs)
        features, layout = ObservedFeatures(features, measurement), Layout.single(measurement.entries)
        outputs = measurement.apply(flattened(outputs)).reshape(len(outputs), *measurement.entries)

    def sampled() -> Tensor:  # a shape here would be made anew in each call
        vectors = (posterior.samples if samples is None else samples())[:num_samples]
        deviations = _deviations(network, x, vectors, own, posterior.rows)
        return deviations if measurement is None else measurement.apply(deviations)

    # Of no data that of the samples has the right shape.
    function, deviations = covariance_of(posterior, fit, features) if len(outputs) else None, None
    # Of an image that is measured, samples are there after one product each, and each pixel would take a pullback.
    for_variances = observation is None or features.num_outputs <= num_samples
    factor = calibration.scale / calibration.temperature**2
    if calibration.factors != Calibration().factors:
        outputs = outputs / calibration.temperature
    if function is None or not draws_are_cheap(whole, features.num_outputs, num_samples):
        deviations = math.sqrt(factor) * sampled().reshape(num_samples, *outputs.shape)
    if function is not None:
        later = sampled if deviations is None else None
        function = OnRequest(function, check, factor, for_variances, later, num_samples, seed)
    return make_prediction(
        outputs,
        deviations,
        calibration.likelihood(likelihood).bind(layout),
        function=function,
        conformal=posterior.conformal,
        ranks=None if novelty is None else novelty(seen, len(outputs)),
        noise_scale=None if noise_variances is None else _noise_scale(noise_variances, outputs),
        has_noise=observation is None or observed,
    )


def prior_deviations(
    network: Linearisation, posterior: Posterior, x: Any, num_samples: int, seed: int
) -> Float[Tensor, "K N ..."]:
    """`φ(x) θ_k`, `θ_k ~ N(0, A⁻¹)`: the prior draws `θ⁰` that samples start from."""
    x, prior = place(x, network.device, network.dtype), posterior.prior
    white = Draws(num_samples, seed, Stream.SAMPLES).prior(network.num_parameters).to(network.device, network.dtype)
    outputs = _evaluated(network, x, posterior.rows * _DATA_OF_OUTPUTS)[0]
    weights = white * (prior.scale / prior.spread().sqrt()).to(white)
    return _deviations(network, x, weights, outputs, posterior.rows).reshape(num_samples, *outputs.shape)


def draws_are_cheap(network: Linearisation, num_outputs: int, num_samples: int) -> bool:
    """Whether covariances of outputs take less than samples: a pullback for each output, or a tangent for each sample.

    Tangents of a last layer take no run of the network, and are as cheap as its covariances.
    """
    return num_outputs <= num_samples and not isinstance(network, LastLayer)


def _evaluated(network: Linearisation, x: Any, rows: int) -> tuple[Tensor, Layout, Linearisation, Any]:
    """Outputs and their layout, and what has their Jacobian with its inputs: of a last layer from the same run."""
    parts = [x] if num_rows(x) <= rows else split(x, rows)
    if not isinstance(network, LastLayer):
        evaluated = [network.evaluate(part) for part in parts]
        return torch.cat([outputs for outputs, _ in evaluated]), evaluated[0][1], network, x
    outputs, layouts, heads, inputs = zip(*map(network.evaluate_with_inputs, parts), strict=True)
    if any(head is not heads[0] for head in heads):  # what the head returns is changed in a later part
        return torch.cat(outputs), layouts[0], network, x
    return torch.cat(outputs), layouts[0], heads[0], concatenate(inputs)


def _deviations(
    network: Linearisation, x: Any, samples: Float[Tensor, "K P"], outputs: Float[Tensor, "N *C"], rows: int
) -> Float[Tensor, "K N C"]:
    """`φ(x) ζ_k`, of some data at once, written to where they stay."""
    deviations = outputs.new_empty(len(samples), *flattened(outputs).shape)
    for part, into in zip(split(x, rows), deviations.split(rows, 1), strict=False):  # one empty part of no data
        into.copy_(network.jvp(part, samples))
    return deviations


def covariance_of(posterior: Posterior, fit: Fit | None, features: Features) -> FunctionCovariance | None:
    """The covariance of the function at some inputs where it is known exactly."""
    if "factor" in posterior.exact:
        return DenseCovariance.of(features, posterior.prior, posterior.exact)
    function = None if fit is None else fit.covariance_at(features)
    if function is None and posterior.curvature is not None:
        return factored_covariance(features, posterior.prior, posterior.curvature)
    return function


def _noise_scale(noise_variances: Tensor, outputs: Float[Tensor, "N *C"]) -> Float[Tensor, "N *C"]:
    weights = noise_weights(noise_variances, (len(outputs), outputs.shape[1:].numel()))
    return (weights**-2).to(outputs).reshape(outputs.shape)
