"""The scale of a fitted posterior, from held-out data or from the training data themselves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.calibration import (
    Calibration,
    held_out_classification,
    held_out_regression,
    leave_one_out_scale,
)
from laplace_sampling.data import TrainingData, Unpack
from laplace_sampling.fits import Fit
from laplace_sampling.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from laplace_sampling.linearise import Linearisation
from laplace_sampling.predict import predict
from laplace_sampling.saving import Posterior

__all__ = ["HeldOut", "left_out_calibration"]

# Training data that are looked at: the scale is one number.
_ENOUGH = 4096


def left_out_calibration(fit: Fit) -> Calibration:
    """The scale from the training data, each left out (`leave_one_out_scale`); 1 where that is not defined."""
    model, likelihood = fit.model, fit.model.likelihood
    if not _has_one_label(likelihood, model.targets) or fit.sampled is None:
        return Calibration()
    features = model.features
    stride = math.ceil(features.num_data / _ENOUGH)
    some = torch.arange(0, features.num_data, stride)
    samples = fit.sampled.samples.to(features.dtype)
    deviations = torch.cat([features.jvp(samples, part) for part in features.chunks(some)], dim=1)
    scale = leave_one_out_scale(
        likelihood, model.targets[some], model.network_outputs[some], fit.mode_outputs[some], deviations
    )
    return Calibration(scale=scale)


def _has_one_label(likelihood: Likelihood, targets: Tensor) -> bool:
    """Whether data have one label each, or Bernoulli outputs: not the pixels of a segmentation, nor weights."""
    return isinstance(likelihood, Bernoulli) or (isinstance(likelihood, Categorical) and targets.dim() == 1)


@dataclass(frozen=True)
class HeldOut:
    """Data that the network was not trained on.

    Attributes:
        data: the inputs.
        targets: as the likelihood takes them.
        likelihood: of the targets.
    """

    data: TrainingData
    targets: Tensor
    likelihood: Likelihood

    @classmethod
    def read(
        cls, loader: Iterable[Any], network: Linearisation, likelihood: Likelihood, unpack: Unpack | None
    ) -> "HeldOut":
        """The data of a loader.

        Raises:
            TypeError, ValueError: as for training data; for a likelihood that has no calibration.
        """
        with torch.random.fork_rng(devices=[]):
            data = TrainingData(loader, unpack=unpack, fill=likelihood.fill)
        _, layout = network.evaluate(data.inputs(torch.arange(1)))
        if not isinstance(data.targets, Tensor):
            raise _unknown(likelihood)
        likelihood, targets = likelihood.prepare(layout, data.targets.to(network.device))
        if not isinstance(likelihood, Gaussian) and not _has_one_label(likelihood, targets):
            raise _unknown(likelihood)
        return cls(data, targets, likelihood)

    def calibrated(self, network: Linearisation, posterior: Posterior, fit: Fit) -> Posterior:
        """With the scale, and the temperature or noise precision, under which these data are likeliest."""
        posterior = replace(posterior, calibration=Calibration())
        predictions = [
            predict(
                network,
                posterior,
                fit,
                self.data.inputs(batch),
                samples=posterior.samples,
                noise_variances=None,
                observation=None,
                observed=False,
                check=lambda: None,
            )
            for batch in torch.arange(self.data.num_data).split(posterior.rows)
        ]
        outputs = torch.cat([p.outputs.reshape(len(p.outputs), -1) for p in predictions])
        if isinstance(posterior.likelihood, Gaussian):
            covariance = torch.cat([p.covariance() for p in predictions])
            precision = posterior.likelihood.precision(outputs.double())
            targets = self.targets.reshape(outputs.shape)
            found, factor = held_out_regression(targets, outputs, covariance, (1 / precision).expand(outputs.shape))
            likelihood = posterior.likelihood.with_precision(precision.cpu() / factor)
            return replace(posterior, likelihood=likelihood, calibration=found)
        deviations = torch.cat([p.deviations.flatten(2) for p in predictions], dim=1)
        found = held_out_classification(self.likelihood, self.targets, outputs, deviations)
        return replace(posterior, calibration=found)


def _unknown(likelihood: Likelihood) -> ValueError:
    return ValueError(
        f"`val_loader` calibrates a regression, or a classification of one label a datum, but the likelihood is "
        f"{likelihood.name!r}; leave it out."
    )
