"""What data say of predictions: `CalibratedModel`, the scale of a posterior, and scores for conformal prediction."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import torch

from laplace_sampling.data.training_data import Unpack
from laplace_sampling.fitted import FittedModel, warn_of
from laplace_sampling.held_out import HeldOut, check_calibration
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.methods.method import Fit
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.on_training_data import deviations_of, enough, held_out_problems
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import covariance_of, predict
from laplace_sampling.predictions.calibration import Calibration, calibrate, calibrate_regression
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.validation import check_finite


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


class CalibratedModel(FittedModel):
    """A fitted model whose predictions held-out data correct."""

    @solver_call
    def calibrate(
        self, val_loader: Iterable[Any], *, unpack: Unpack | None = None, num_data: int | None = None
    ) -> Self:
        """The fitted or loaded posterior with the scale that held-out data choose, without another solve.

        Sets `scale_`, and with it in a classification the temperature of the outputs, `temperature_`, in a regression
        the noise precision, `noise_precision_`, also one that was given, as `fit_hyperparameters(..., val_loader=...)`
        does with the evidence; other likelihoods have a scale only. Whatever scale and temperature there were are
        replaced. Samples and prior stay.

        Args:
            val_loader: data that the network was not trained on, of the form of the training data. Those of a
                regression have the noise of data of weight one.
            unpack: as for `fit_hyperparameters`.
            num_data: of an `IterableDataset`, as in `fit_hyperparameters`.

        Raises:
            NotFittedError, TypeError, ValueError: before a fit; as for `val_loader` in `fit_hyperparameters`; after a
                fit with `noise_variances`; if the model has changed. The posterior stays what it was.
        """
        fitted = self._drawn("calibrate")
        posterior = fitted.posterior
        self._check_network("calibrate")
        check_calibration("calibrate(val_loader)", self.settings.observation, posterior.unequal_noise)
        with self.settings.processes.shared_call():
            held_out = HeldOut.read(val_loader, self.network, self.settings, unpack, num_data)
            posterior = calibrated(held_out, self.network, posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=posterior)
        problems = held_out_problems(held_out, fitted.tangent, posterior.likelihood, posterior.calibration)
        warn_of([], [*problems, *posterior.calibration.problems], stacklevel=5)
        return self

    @solver_call
    def calibrate_conformal(
        self, val_loader: Iterable[Any], *, unpack: Unpack | None = None, num_data: int | None = None
    ) -> Self:
        """Makes `interval` and `prediction_set` of predictions contain a share of the targets, whatever is wrong.

        By split conformal prediction (`predictions.conformal`): the guarantee holds for new data of the same
        distribution, on average over them, with any network and posterior. The data must be seen by nothing else:
        neither by training nor by `fit_hyperparameters` or `calibrate`, whose `val_loader` are others.

        A later fit or `calibrate` takes it back. Files keep it.

        Args:
            val_loader: held-out data of the form of the training data.
            unpack: as for `fit_hyperparameters`.
            num_data: of an `IterableDataset`, as in `fit_hyperparameters`.

        Raises:
            NotFittedError: before a fit.
            TypeError, ValueError: as in `calibrate`; for a likelihood other than of a regression or a classification;
                for outputs whose shape is not the same for all data.
        """
        call = "calibrate_conformal"
        fitted = self._drawn(call)
        posterior = fitted.posterior
        self._check_network(call)
        check_calibration(f"{call}(val_loader)", self.settings.observation, posterior.unequal_noise)
        with self.settings.processes.shared_call():
            held_out = HeldOut.read(val_loader, self.network, self.settings, unpack, num_data)
            conformal = split_conformal(held_out, self.network, posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=replace(posterior, conformal=conformal))
        return self
