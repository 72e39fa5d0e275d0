"""`Fitted`: what a fit leaves in a `LinearisedLaplace`, and from which the next fit may start."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.hyperparameters.curves import EvidencePath
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.method import Fit, Task
from laplace_sampling.methods.problem import Start
from laplace_sampling.networks.solving import LOCK
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.calibration import CalibrationWarning
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.solver import ConvergenceWarning


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

    def draw(self, settings: Settings) -> None:
        """Draw the samples of the posterior, if the fit did not need them."""
        if len(self.posterior.samples):
            return
        if self.fit is None:
            self.posterior = self.posterior.with_samples(settings.num_samples, settings.seed)
            return
        fit = self.fit.with_samples()
        self.posterior, self.fit = self.posterior.drawn(fit), fit.without_samples()

    def new_samples(self, fit: Fit, settings: Settings, num_samples: int) -> Float[Tensor, "K P"]:
        """Samples that no call before has drawn."""
        with LOCK:
            self.num_draws += 1
            stream = Stream.SAMPLES + self.num_draws
        with settings.processes.shared_call():
            sampled = fit.draw(Draws(num_samples, settings.seed, stream))
        if not (sampled.converged or fit.tolerable):
            warnings.warn(f"{fit.unconverged(sampled)} {fit.advice}", ConvergenceWarning, stacklevel=4)
        return sampled.samples

    def start(self, seed: int) -> Start:
        """What the next fit takes from this one, also from one that was loaded without its data."""
        posterior, fit = self.posterior, self.fit
        known = None if fit is None or fit.known_mode is None else fit.known_mode.weights
        return Start(
            prior=posterior.prior,
            likelihood=posterior.likelihood,
            samples=posterior.samples if posterior.method.minimises else None,
            draws=Draws(len(posterior.samples), seed, Stream.SAMPLES),
            mode=known if posterior.mode is None else posterior.mode,
        )


def warmed(task: Task, start: Start) -> Task:
    """The task of a fit that starts from an earlier posterior, with its precisions.

    Raises:
        ValueError: if the random weights are not those of the earlier fit.
    """
    start.check(task.prior)
    model = task.model.with_likelihood(start.likelihood_from(task.model.likelihood))
    return replace(task, model=model, prior=start.prior_from(task.prior), start=start)


def evidence_of(fit: Fit, settings: Settings, call: str, decades: float = 0.0) -> EvidencePath:
    """The evidence of a fit along its prior precision."""
    with settings.processes.shared_call():
        path, problems = fit.evidence(decades)
    if problems:
        warnings.warn(f"`{call}` is inaccurate: {'; '.join(problems)}.", ConvergenceWarning, stacklevel=4)
    return path


def leave_one_out_of(fit: Fit, tangent: TangentModel, settings: Settings) -> LeaveOneOut:
    """Each training datum predicted from all others, in the units of the targets."""
    with settings.processes.shared_call():
        prediction = fit.leave_one_out()
        if tangent.weights is None:
            return prediction
        weights, given = tangent.weights, tangent.model.observed()
    return prediction.scaled(1 / weights, given)


def warn_of(unconverged: Sequence[str], of_error_bars: Sequence[str], stacklevel: int) -> None:
    """Warn of what went wrong in a fit, and of error bars that make predictions worse."""
    if unconverged:
        warnings.warn(" ".join(unconverged), ConvergenceWarning, stacklevel=stacklevel)
    if of_error_bars:
        warnings.warn(" ".join(of_error_bars), CalibrationWarning, stacklevel=stacklevel)
