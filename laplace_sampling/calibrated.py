"""`CalibratedModel`: what held-out data say of a posterior that is there, without another solve."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

from laplace_sampling.data.training_data import Unpack
from laplace_sampling.fitted import FittedModel, warn_of
from laplace_sampling.held_out import HeldOut, check_calibration, check_scale, deviations_of, some_of
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.networks.held_module import solver_call
from laplace_sampling.predictions.conformal import FullConformal

__all__ = ["CalibratedModel"]


class CalibratedModel(FittedModel):
    """A fitted model whose predictions held-out data correct."""

    @solver_call
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
        fitted = self._require("calibrate")
        self._check_network("calibrate")
        check_calibration("calibrate(val_loader)", self.settings.observation, fitted.posterior.unequal_noise)
        check_scale(self.settings.likelihood)
        held_out = HeldOut.read(val_loader, self.network, self.settings.likelihood, unpack, num_data)
        self._fitted = replace(fitted, posterior=held_out.calibrated(self.network, fitted.posterior, fitted.fit))
        warn_of([], self._fitted.posterior.calibration.problems, stacklevel=4)
        return self

    @solver_call
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
        approximate, and all data serve for training. See `predictions.conformal` for both.

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
        fitted = self._require(call)
        self._check_network(call)
        check_calibration(f"{call}(val_loader)", self.settings.observation, fitted.posterior.unequal_noise)
        if val_loader is None:
            conformal = self._full_conformal(call)
        else:
            held_out = HeldOut.read(val_loader, self.network, self.settings.likelihood, unpack, num_data)
            conformal = held_out.conformal(self.network, fitted.posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=replace(fitted.posterior, conformal=conformal))
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
        samples, outputs = posterior.full_samples, fit.model.network_outputs
        some = some_of(tangent, len(samples) * outputs.shape[1])
        deviations = posterior.calibration.scale**0.5 * deviations_of(fit.model.features, samples, some)
        residuals = fit.model.targets[some].reshape(-1, outputs.shape[1]).to(outputs) - outputs[some]
        return FullConformal(residuals, deviations)
