"""What data say of predictions: `CalibratedModel`, the scale of a posterior, and scores for conformal prediction."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import torch

from laplace_sampling.data.training_data import Unpack
from laplace_sampling.fitted import FittedModel, warn_of
from laplace_sampling.fitting import together
from laplace_sampling.held_out import HeldOut, check_calibration, check_scale
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.methods.fit import Fit
from laplace_sampling.networks.held_module import solver_call
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.subnetwork import of_some_weights
from laplace_sampling.on_training_data import deviations_of, enough, some_of
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import predict
from laplace_sampling.predictions.calibration import (
    Calibration,
    held_out_classification,
    held_out_regression,
)
from laplace_sampling.predictions.conformal import FullConformal, SplitConformal
from laplace_sampling.predictions.validation import check_finite

__all__ = ["CalibratedModel", "calibrated"]

# The part of the training targets that a network may know for full conformal intervals of 90 % to contain them: MLPs of
# 50 units on 40 and 100 data contained 0.88 to 0.90 where it was a sixth to a third, 0.84 where it was 0.4, and 0.81
# where it was 0.73.
_KNOWN_BY_HEART = 1 / 3


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
    some = held_out.with_targets(some)
    predictions = [
        predict(network, posterior, fit, held_out.data.inputs(batch)) for batch in some.split(posterior.rows)
    ]
    outputs = torch.cat([held_out.wide(p.outputs.reshape(len(p.outputs), -1), p) for p in predictions])
    check_finite(*(v for p in predictions for v in (p.outputs, p.deviations)))
    targets = held_out.targets[some]
    if isinstance(posterior.likelihood, Gaussian):
        covariance = torch.cat([p.covariance() for p in predictions])
        precision = posterior.likelihood.precision(outputs.double())
        targets = targets.reshape(outputs.shape)
        found = held_out_regression(targets, outputs, covariance, (1 / precision).expand(outputs.shape))
        return replace(posterior, calibration=found)
    deviations = torch.cat(
        [held_out.wide(p.deviations.reshape(*p.deviations.shape[:2], -1), p) for p in predictions], dim=1
    )
    found = held_out_classification(held_out.likelihood, targets, outputs, deviations)
    return replace(posterior, calibration=found)


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
    @together
    def calibrate(
        self, val_loader: Iterable[Any], *, unpack: Unpack | None = None, num_data: int | None = None
    ) -> Self:
        """The fitted or loaded posterior with the scale that held-out data choose, without another solve.

        Sets `scale_`, and with it in a classification the temperature of the outputs, `temperature_`, in a regression
        the noise precision, `noise_precision_`, also one that was given, as `fit_hyperparameters(..., val_loader=...)`
        does; whatever scale and temperature there were are replaced. Samples and prior stay.

        Args:
            val_loader: data that the network was not trained on, of the form of the training data. Those of a
                regression have the noise of data of weight one.
            unpack: as for `fit_hyperparameters`.
            num_data: of an `IterableDataset`, likewise.

        Raises:
            NotFittedError, TypeError, ValueError: before a fit; as of `val_loader` in `fit_hyperparameters`; after a
                fit with `noise_variances`; if the model has changed. The posterior stays what it was.
        """
        fitted = self._drawn("calibrate")
        posterior = fitted.posterior
        self._check_network("calibrate")
        check_calibration("calibrate(val_loader)", self.settings.observation, posterior.unequal_noise)
        check_scale(self.settings.likelihood)
        with self.settings.processes.telling():
            held_out = HeldOut.read(val_loader, self.network, self.settings, unpack, num_data)
            posterior = calibrated(held_out, self.network, posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=posterior)
        warn_of([], self._fitted.posterior.calibration.problems, stacklevel=5)
        return self

    @solver_call
    @together
    def calibrate_conformal(
        self,
        val_loader: Iterable[Any] | None = None,
        *,
        unpack: Unpack | None = None,
        num_data: int | None = None,
    ) -> Self:
        """Makes `interval` and `prediction_set` of predictions contain a share of the targets, whatever is wrong.

        With `val_loader` by split conformal prediction: the guarantee holds for new data of the same distribution, on
        average over them, with any network and posterior. The data must be seen by nothing else: neither by training
        nor by `fit_hyperparameters` or `calibrate`, whose `val_loader` are others. Without it, for a regression, by
        full conformal prediction of the linear model on the training data, at most 4,096 of them: the guarantee is
        approximate, and all data serve for training; a `CalibrationWarning` says where it is known not to hold: of a
        part of the weights, by a method that leaves out correlations, and of a network that knows its training data by
        heart. Covariances are those of the samples: where inputs are far from the data, ends may be infinite or far
        away that more samples would bring nearer. See `predictions.conformal`.

        A later fit or `calibrate` takes it back. Files keep it.

        Args:
            val_loader: held-out data of the form of the training data.
            unpack: as for `fit_hyperparameters`.
            num_data: of an `IterableDataset`, likewise.

        Raises:
            NotFittedError: before a fit; without `val_loader` for a loaded posterior.
            TypeError, ValueError: as of `calibrate`; for a likelihood other than of a regression or a classification;
                for outputs whose shape is not the same for all data; without `val_loader` for anything but a Gaussian
                likelihood, and after a fit with `weights`.
        """
        call = "calibrate_conformal"
        fitted = self._drawn(call)
        posterior, doubts = fitted.posterior, []
        self._check_network(call)
        check_calibration(f"{call}(val_loader)", self.settings.observation, posterior.unequal_noise)
        with self.settings.processes.telling():
            if val_loader is None:
                conformal, doubts = self._full_conformal(call), self._doubts(call)
            else:
                held_out = HeldOut.read(val_loader, self.network, self.settings, unpack, num_data)
                conformal = split_conformal(held_out, self.network, posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=replace(posterior, conformal=conformal))
        warn_of([], doubts, stacklevel=5)
        return self

    def _full_conformal(self, call: str) -> FullConformal:
        posterior = self._require(call).posterior
        if not isinstance(posterior.likelihood, Gaussian):
            raise ValueError(
                f"`{call}()` without `val_loader` is for a regression, but the likelihood is "
                f"{posterior.likelihood.name!r}: pass data that the network was not trained on."
            )
        fit, tangent = self._with_data(call)
        if tangent.weights is not None:
            raise ValueError(
                f"`{call}()` without `val_loader` needs training data that count alike, but the fit was given "
                "`weights`: pass data that the network was not trained on."
            )
        samples, num_outputs = posterior.samples, fit.model.features.num_outputs
        some = some_of(tangent, len(samples) * num_outputs)
        deviations = posterior.calibration.scale**0.5 * deviations_of(fit.model.features, samples, some)
        outputs = fit.model.network_outputs_of(some)
        residuals = fit.model.targets_of(some).reshape(-1, num_outputs).to(outputs) - outputs
        return FullConformal(residuals, deviations)

    def _doubts(self, call: str) -> list[str]:
        """Why the influence of a datum on the network may be more than that on the linear model."""
        fit, _ = self._with_data(call)
        gamma = float(self._require(call).posterior.effective_dimension.sum())
        known = gamma / (fit.model.features.num_data * fit.model.features.num_outputs)
        reasons = []
        if of_some_weights(self.network):
            reasons.append("the posterior is of some weights only, and the training data have changed others, too")
        if fit.approximate:
            reasons.append(f'method="{fit.task.method.name}" leaves out correlations')
        if known > _KNOWN_BY_HEART:
            reasons.append(
                f"the data determine {gamma:.3g} directions of weight space, {100 * known:.0f} % of the number of "
                "targets, so that the network knows most of them by heart"
            )
        if not reasons:
            return []
        return [
            f"`{call}()` without `val_loader`: intervals may contain far fewer targets than their level says, since "
            f"{'; and '.join(reasons)}. Pass `val_loader`, data that the network was not trained on."
        ]
