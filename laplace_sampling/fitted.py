"""`Fitted`: what a fit leaves behind, and `FittedModel`: what one may ask of it, beside predictions."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidenceCurves, EvidencePath, MarginalLikelihood
from laplace_sampling.evidence.network_evidence import NetworkEvidence
from laplace_sampling.evidence.step import Step, StopFit
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.fit import Fit, Task
from laplace_sampling.methods.method import Tuning
from laplace_sampling.methods.problem import Problem
from laplace_sampling.methods.verification import diagnosis_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import LOCK, solver_call
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.calibration import Calibration, CalibrationWarning
from laplace_sampling.predictions.diagnosis import Diagnosis
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.checks import check_positive, check_whole
from laplace_sampling.solvers.recorded import unrecorded
from laplace_sampling.solvers.solver import ConvergenceWarning
from laplace_sampling.warm_start import warmed

if TYPE_CHECKING:
    from laplace_sampling.settings import Settings

__all__ = ["Fitted", "FittedModel", "NotFittedError", "warn_of"]

_MOST_DECADES = 12


class NotFittedError(ValueError, AttributeError):
    """A method that needs a fitted posterior was called before `fit_hyperparameters`, `fit` or `load`."""


@dataclass
class Fitted:
    """What a fit leaves in a `LinearisedLaplace`.

    Attributes:
        posterior: all that predictions need.
        fit: with the training data; `None` for a posterior that was loaded without them, and so is `tangent`.
        tangent: the linear model on the training data.
        num_draws: how often new samples were drawn, so that each call draws others.
        of_earlier_weights: whether the network may have been trained since, as after `start_from`.
    """

    posterior: Posterior
    fit: Fit | None = None
    tangent: TangentModel | None = None
    num_draws: int = 0
    of_earlier_weights: bool = False


class FittedModel:
    """Fitted attributes and questions about the fit; `LinearisedLaplace` adds fits, predictions and files."""

    network: Linearisation
    settings: "Settings"
    _fitted: Fitted | None = None
    # Steps of a run of `fit_hyperparameters` that has not come to its end.
    _unfinished: Sequence[Step] = ()

    def _recorded(self, tuning: Tuning) -> Tuning:
        """Returns settings whose callback keeps the steps of a run."""
        self._unfinished = steps = []

        def stopped(step: Step) -> StopFit | None:
            try:
                if tuning.callback is not None:
                    unrecorded(tuning.callback, step)
            except StopFit as stop:
                return stop

        def record(step: Step) -> None:
            steps.append(step)
            # Of several processes one may look at the steps, and all of them stop.
            stops = self.settings.processes.gathered(lambda: stopped(step))
            if stop := next(filter(None, stops), None):
                raise stop

        return replace(tuning, callback=record)

    def _prepared(self, problem: Problem, warm_start: bool) -> Task:
        """The problem as a method takes it, which starts from what was fitted before if it is to be warm."""
        task = self.settings.method.prepare(problem)
        # Exact samples start nothing but another method.
        if warm_start and self._fitted is not None and task.method.name != self._fitted.posterior.method.name:
            self._drawn("fit")
        return warmed(task, self._fitted, warm_start)

    def _store(
        self,
        network: Linearisation,
        posterior: Posterior,
        fit: Fit,
        tangent: TangentModel,
        problems: Sequence[str] = (),
    ) -> Self:
        """Replace what was fitted before, at the very end, and say what is wrong."""
        fit.task.budget.end()
        self.network = network
        self._keep(posterior, fit.without_samples(), tangent)
        # The public method is behind the wrappers of `fitting` and `solver_call`.
        warn_of(fit.problems, [*problems, *posterior.calibration.problems], stacklevel=6)
        return self

    @solver_call
    def sample(self, num_samples: int) -> Float[Tensor, "K P"]:
        """New zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, independent of `samples_` and of earlier calls."""
        fitted = self._require("sample")
        check_whole("`sample(num_samples)`", num_samples, 1)
        if fitted.fit is None:
            raise NotFittedError(
                "`sample` needs the training data, which the file does not hold: call `fit(loader)`, or use "
                "the samples that were saved, `samples_`."
            )
        self._check_network("sample")
        with LOCK:
            fitted.num_draws += 1
            stream = Stream.SAMPLES + fitted.num_draws
        with self.settings.processes.shared_call():
            sampled = fitted.fit.draw(Draws(num_samples, self.settings.seed, stream))
        if not (sampled.converged or fitted.fit.tolerable):
            problem = f"{fitted.fit.unconverged(sampled)} {fitted.fit.advice}"
            warnings.warn(problem, ConvergenceWarning, stacklevel=3)
        return sampled.samples

    @solver_call
    def log_marginal_likelihood(self, at: str = "mode") -> MarginalLikelihood:
        r"""`log p(y)` of the linear model at the fitted hyperparameters, a sum over the data, with its standard error.

        With `at="network"` at the weights and outputs of the network; only that says how good it is, as `score` does.

        `−Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ θ̄ᵀAθ̄ − ½ log|I + A⁻¹M|`: the log determinant exactly from the exact method, else by
        stochastic Lanczos quadrature. For a loss that is not quadratic it is Laplace's approximation. What validation
        data chose (`scale_`, and the noise of predictions) has no part in it.
        """
        if at not in ("mode", "network"):
            raise ValueError(f'`log_marginal_likelihood(at={at!r})` is not known; use "mode" or "network".')
        if at == "network":
            fit, tangent = self._with_data("log_marginal_likelihood")
            with self.settings.processes.shared_call():
                evidence = NetworkEvidence.of(fit.model, fit.prior, fit.task.trained_weights, fit.traces(0.0))
                return evidence.at(fit.alpha).shifted(tangent.log_scale)
        path, alpha, shift = self._evidence("log_marginal_likelihood")
        return path.at(alpha).shifted(shift)

    @solver_call
    def evidence_path(self, decades: float = 3.0, num: int = 121) -> EvidenceCurves:
        """Effective dimension, norm of the mode and log marginal likelihood as functions of the prior precision.

        The curvature is that at the fitted hyperparameters. Several precisions go up and down together; the axis is
        their geometric mean over the weights.

        Args:
            decades: to both sides of the fitted precision.
            num: points.
        """
        check_positive("`evidence_path(decades=...)`", decades, _MOST_DECADES)
        check_whole("`evidence_path(num=...)`", num, 2)
        path, alpha, shift = self._evidence("evidence_path", decades)
        grid = alpha * torch.logspace(-decades, decades, num, dtype=torch.float64)
        return EvidenceCurves.of(path, grid).shifted(shift)

    def _evidence(self, call: str, decades: float = 0.0) -> tuple[EvidencePath, float, float]:
        fit, tangent = self._with_data(call)
        with self.settings.processes.shared_call():
            path, problems = fit.evidence(decades)
            log_scale = tangent.log_scale
        if problems:
            warnings.warn(f"`{call}` is inaccurate: {'; '.join(problems)}.", ConvergenceWarning, stacklevel=4)
        return path, fit.alpha, log_scale

    @solver_call
    def leave_one_out(self) -> LeaveOneOut:
        r"""Each training datum predicted from all others, noise included, at the fitted hyperparameters.

        `log_prob`, `[N]`, is `log p(y_i | y_{−i})`, joint over the outputs of a datum that have a target; `mean` and
        `covariance` are those of the *linear model*, in the units of the targets. From the decomposition of an exact
        fit, without fitting again (Rasmussen & Williams 2006, eq. 5.10–5.12); weights and features stay those of all
        data.

        Raises:
            ValueError: if the fit is not by the exact method.
        """
        fit, tangent = self._with_data("leave_one_out")
        with self.settings.processes.shared_call():
            prediction = fit.leave_one_out()
            if tangent.weights is None:
                return prediction
            weights, given = tangent.weights, tangent.model.observed()
        return prediction.scaled(1 / weights, given)

    @solver_call
    def diagnose(self) -> Diagnosis:
        """Checks solves, samples and hyperparameters of the last fit; `print` it for a table, and what to do.

        The energies of the samples are tested against their distributions; see `predictions.diagnosis`.
        """
        fit = self._require("diagnose").fit
        if fit is None or fit.sampled is None:
            raise NotFittedError("`diagnose` needs the fit itself, which a loaded posterior does not have: call `fit`.")
        with self.settings.processes.shared_call():
            if not len(fit.sampled.energies):
                fit = fit.with_samples()
            return diagnosis_of(fit, self.network.weights, self.settings.linear_model)

    @property
    def prior_precision_(self) -> Float[Tensor, " G"]:
        return self._require("prior_precision_").posterior.prior.precision

    @property
    def prior_scale_(self) -> Float[Tensor, " P"]:
        return self._require("prior_scale_").posterior.prior.scale

    @property
    def noise_precision_(self) -> Tensor | None:
        posterior = self._require("noise_precision_").posterior
        return posterior.calibration.likelihood(posterior.likelihood).noise_precisions()

    @property
    def effective_dimension_(self) -> Float[Tensor, " G"]:
        return self._require("effective_dimension_").posterior.effective_dimension

    @property
    def scale_(self) -> float:
        return self._require("scale_").posterior.calibration.scale

    @property
    def temperature_(self) -> float:
        return self._require("temperature_").posterior.calibration.temperature

    @property
    def calibration_(self) -> Calibration:
        return self._require("calibration_").posterior.calibration

    @property
    def converged_(self) -> bool:
        return self._require("converged_").posterior.converged

    @property
    def samples_(self) -> Float[Tensor, "K P"]:
        return self._drawn("samples_").posterior.samples

    def _drawn(self, call: str) -> Fitted:
        """What was fitted, with samples that are drawn now if the fit did not need them."""
        fitted = self._require(call)
        if not len(fitted.posterior.samples):
            self._draw(fitted)
        return fitted

    @solver_call
    def _draw(self, fitted: Fitted) -> None:
        if fitted.fit is None:
            fitted.posterior = fitted.posterior.with_samples(self.settings.num_samples, self.settings.seed)
            return
        fit = fitted.fit.with_samples()
        fitted.posterior, fitted.fit = fitted.posterior.drawn(fit), fit.without_samples()

    @property
    def mode_(self) -> Float[Tensor, " P"]:
        return self._mode()

    @solver_call
    def _mode(self) -> Float[Tensor, " P"]:
        """The mode, found now if the fit did not need it."""
        fitted = self._require("mode_")
        if fitted.posterior.mode is None:
            fit, _ = self._with_data("mode_")
            with self.settings.processes.shared_call():
                fitted.posterior = replace(fitted.posterior, mode=fit.mode.weights.to(self.network.dtype))
        assert fitted.posterior.mode is not None
        return fitted.posterior.mode

    @property
    def posterior_(self) -> Posterior:
        """All that predictions need."""
        return self._require("posterior_").posterior

    @property
    def epochs_(self) -> float:
        """The cost of the fit, and of all that was asked of it since, in training epochs, counted in operations.

        NaN for a posterior that was loaded.
        """
        fit = self._require("epochs_").fit
        return math.nan if fit is None else fit.task.budget.spent_with_later

    @property
    def stopped_(self) -> bool:
        """Whether the last `fit_hyperparameters` did not come to its end, as by `StopFit`: the posterior is older."""
        return bool(self._unfinished)

    @property
    def history_(self) -> list[Step]:
        return list(self._unfinished) or self._require("history_").posterior.history

    def __repr__(self) -> str:
        settings, fitted = self.settings, self._fitted
        head = (
            f"LinearisedLaplace({type(self.network.module).__name__}, {settings.likelihood.name!r}, "
            f"P={self.network.num_parameters}, prior={type(settings.prior).__name__}, "
            f"linear_model={settings.linear_model!r}, "
            f"method={settings.method.name!r}"
        )
        if fitted is None:
            return head + ", not fitted)"
        if fitted.fit is not None:
            head += f" → {fitted.fit.method.name!r}: {fitted.fit.task.reason}"
        prior, gamma = fitted.posterior.prior, float(fitted.posterior.effective_dimension.sum())
        alpha = ", ".join(f"{name}: {float(a):.3g}" for name, a in zip(prior.names, prior.precision, strict=True))
        floored = f", {prior.num_floored} weights floored" if prior.num_floored else ""
        return head + f", prior_precision_={{{alpha}}}, effective_dimension_={gamma:.1f}{floored})"

    def __str__(self) -> str:
        """As `repr`, what else there is to know, and what the fit has cost and how accurate it is."""
        fit = None if self._fitted is None else self._fitted.fit
        if fit is None or fit.sampled is None:
            return repr(self)
        return "\n".join([repr(self), *fit.remarks, f"{fit.task.budget}; {fit.accuracy}."])

    def _require(self, what: str) -> Fitted:
        """What was fitted, or a `NotFittedError`."""
        if self._fitted is None:
            raise NotFittedError(
                f"`{what}` needs a fitted posterior: call `fit_hyperparameters(loader)`, `fit(loader)` or `load` first."
            )
        return self._fitted

    def _keep(self, posterior: Posterior, fit: Fit | None, tangent: TangentModel | None) -> None:
        """Take over what was fitted with the network as it is now."""
        self._fitted = Fitted(posterior, fit, tangent)

    def _with_data(self, call: str) -> tuple[Fit, TangentModel]:
        fitted = self._require(call)
        if fitted.fit is None or fitted.tangent is None:
            raise NotFittedError(f"`{call}` needs the training data, which the file does not hold: call `fit(loader)`.")
        self._check_network(call)
        return fitted.fit, fitted.tangent

    def _check_network(self, call: str) -> None:
        """Raise if weights that the fit shares with the model were changed in place, or it is of earlier weights."""
        fitted = self._require(call)
        if fitted.of_earlier_weights:
            network = self.network.renewed()
            fitted.posterior.check_weights(network, call)
            self.network, fitted.of_earlier_weights = network, False
        self.network.shell.check(call)


def warn_of(unconverged: Sequence[str], of_error_bars: Sequence[str], stacklevel: int) -> None:
    """Warn of what went wrong in a fit, and of error bars that make predictions worse."""
    if unconverged:
        warnings.warn(" ".join(unconverged), ConvergenceWarning, stacklevel=stacklevel)
    if of_error_bars:
        warnings.warn(" ".join(of_error_bars), CalibrationWarning, stacklevel=stacklevel)
