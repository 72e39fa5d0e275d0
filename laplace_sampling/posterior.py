"""`Posterior`: all that predictions need of a fit.

`Fitted` is what a fit leaves in a `LinearisedLaplace`, and from which the next fit may start.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace_sampling.curvature.kronecker import CURVATURE, restored_curvature
from laplace_sampling.data.batches import storable
from laplace_sampling.hyperparameters.curves import EvidencePath
from laplace_sampling.hyperparameters.hyperparameters import Step
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.weighted import Weighted
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.linear_model import TangentModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import draw_closed_form
from laplace_sampling.methods import method_from_recipe, recipe_of_method
from laplace_sampling.methods.method import Fit, Method, Task
from laplace_sampling.methods.problem import Start
from laplace_sampling.networks.consistency import FunctionFingerprint
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import LOCK
from laplace_sampling.predictions.calibration import Calibration, CalibrationWarning
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.solver import ConvergenceWarning


class NotFittedError(ValueError, AttributeError):
    """A method that needs a fitted posterior was called before `fit_hyperparameters`, `fit` or `load`."""


# Fields that are dictionaries of their own fields in a state.
_PARTS = {
    "prior": GaussianPrior,
    "function": FunctionFingerprint,
    "calibration": Calibration,
    "conformal": SplitConformal,
}


@dataclass(frozen=True)
class Posterior:
    """All that predictions need.

    Attributes:
        prior: `A`.
        likelihood: with the fitted noise precision.
        samples: `ζ`, zero-mean; none before they are asked for, where the posterior has a closed form.
        mode: `θ̄`, if it was needed.
        effective_dimension: `γ` of each group; `effective_dimension_se` its standard error.
        history: a record of each step of the fit.
        method: that made the fit.
        rows: data that go through the network together.
        fingerprint: of the network's weights and buffers.
        function: of what the network computes, on a few training data; `None` where it cannot be repeated or kept.
        converged: whether all tolerances were reached.
        unequal_noise: whether the fit was given `noise_variances`.
        exact: of an exact posterior, what its covariances take: in observation space the decomposition and the training
            data, in weight space a factor of `H`; of a factored one, its curvature.
        calibration: factors of what is predicted.
        conformal: scores of data, for intervals and sets.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"]
    mode: Float[Tensor, " P"] | None
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    history: list[Step]
    method: Method
    rows: int
    fingerprint: Tensor
    function: FunctionFingerprint | None
    converged: bool = True
    unequal_noise: bool = False
    exact: dict[str, Any] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    conformal: SplitConformal | None = None

    def with_samples(self, num_samples: int, seed: int) -> "Posterior":
        """Returns the posterior with samples drawn from its closed form."""
        assert self.curvature is not None
        draws, like = Draws(num_samples, seed, Stream.SAMPLES), self.samples
        return replace(self, samples=draw_closed_form(self.curvature, self.prior, draws, like.device, like.dtype)[0])

    def drawn(self, fit: Fit) -> "Posterior":
        """Returns the posterior with the samples of its fit."""
        assert fit.sampled is not None
        return replace(self, samples=fit.sampled.samples)

    def without_data(self) -> "Posterior":
        """Leaves out inputs and targets, and covariances that take them, so that those of the samples are left.

        What is left of the training data are sums over them; of those of `calibrate_conformal` their scores.
        """
        return replace(self, function=None, exact={} if "inputs" in self.exact else self.exact)

    @classmethod
    def of(
        cls, fit: Fit, tangent: TangentModel, network: Linearisation, calibration: Calibration, unequal_noise: bool
    ) -> "Posterior":
        """What a fit with its samples leaves for predictions."""
        assert fit.sampled is not None
        gamma, gamma_se = fit.sampled.effective_dimension()
        return cls(
            prior=fit.prior,
            likelihood=fit.model.likelihood.unweighted,
            samples=fit.sampled.samples,
            mode=None if fit.known_mode is None else fit.known_mode.weights.to(network.dtype),
            effective_dimension=gamma,
            effective_dimension_se=gamma_se,
            method=fit.method,
            history=[step.shifted(tangent.log_scale) for step in fit.found.history],
            rows=tangent.data.batch_size,
            fingerprint=network.fingerprint(),
            function=FunctionFingerprint.of(network, tangent.data),
            converged=fit.converged,
            unequal_noise=unequal_noise,
            exact=fit.tensors() | (_training_data(fit, tangent) if fit.saves_data else {}),
            calibration=calibration,
        )

    def state(self) -> dict[str, Any]:
        """All of it as nested dictionaries of tensors and plain values, for files.

        Samples of a closed form are left out: they are drawn again when they are asked for.
        """
        state = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "likelihood"}
        parts = {name: part for name, part in state.items() if name in _PARTS and part is not None}
        # Fields alone, without what a part has computed and kept.
        state |= {name: {f.name: getattr(part, f.name) for f in fields(part)} for name, part in parts.items()}
        return state | {
            "noise_precision": self.likelihood.noise_precisions(),
            "method": recipe_of_method(self.method),
            "history": [asdict(step) for step in self.history],
            "samples": self.samples if self.curvature is None else self.samples[:0],
        }

    @classmethod
    def of_state(
        cls, state: dict[str, Any], likelihood: Likelihood, method: Method, device: torch.device
    ) -> "Posterior":
        """The posterior of a `state`.

        Args:
            state: from there.
            likelihood: takes over the noise precision, if it has one.
            method: in place of one that is not of this library.
            device: of the network.
        """
        kept = {part.name: state[part.name] for part in fields(cls) if part.name != "likelihood"}
        on_device = ("samples", "mode", "effective_dimension", "effective_dimension_se", "exact", "prior")
        kept |= tree_map_only(Tensor, lambda tensor: tensor.to(device), {name: kept[name] for name in on_device})
        kept |= {name: kind(**kept[name]) for name, kind in _PARTS.items() if kept[name] is not None}
        if isinstance(likelihood, Gaussian):
            likelihood = likelihood.with_precision(state["noise_precision"])
        return cls(
            **kept
            | {
                "prior": kept["prior"].with_precision(kept["prior"].precision),
                "likelihood": likelihood,
                "fingerprint": kept["fingerprint"].cpu(),
                "method": method_from_recipe(kept["method"], otherwise=method),
                "history": [Step(**step) for step in kept["history"]],
            }
        )

    def check_weights(self, network: Linearisation, call: str) -> None:
        """Raise a `ValueError` if a network has other weights or buffers than at the fit."""
        if not torch.equal(self.fingerprint, network.fingerprint()):
            raise ValueError(
                f"`{call}`: the weights or buffers of the model are not those of the fit, so its error bars do not "
                "apply. Load the weights that the model had then, or fit again."
            )

    def check_function(self, network: Linearisation, call: str) -> None:
        """Raise a `ValueError` if a network with the weights of the fit computes something else."""
        if self.function is None:
            return
        try:
            difference = self.function.difference(network)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"`{call}`: the model has the weights and buffers of the fit, but fails on data of the fit: {error}"
            ) from error
        if difference is not None:
            raise ValueError(
                f"`{call}`: the model has the weights and buffers of the fit, but computes another function: "
                f"{difference}. Its error bars do not apply. Compare the activations and the code of `forward` with "
                "those of the fit, or fit again."
            )

    @cached_property
    def curvature(self) -> Curvature | None:
        """`M̂` of a factored posterior, in the scaled coordinates of the prior."""
        kept = {name.removeprefix(CURVATURE): t for name, t in self.exact.items() if name.startswith(CURVATURE)}
        return restored_curvature(kept) if kept else None


def _training_data(fit: Fit, tangent: TangentModel) -> dict[str, Any]:
    """Inputs, targets and weights, which covariances in observation space need."""
    inputs = tangent.data.inputs(torch.arange(tangent.data.num_data))
    kept = {"inputs": storable(inputs), "targets": storable(tangent.data.targets)}
    if isinstance(fit.model.likelihood, Weighted):
        kept["weights"] = fit.model.likelihood.weights(fit.model.targets)
    if tangent.weights is not None:
        kept["noise_variances"] = tangent.weights**-2
    return kept


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

    def draws(self, settings: Settings) -> tuple[int, int, Callable[[], Float[Tensor, "K P"]]]:
        """The number of samples of this posterior, the seed, and what draws them if the fit did not need them."""

        def samples() -> Float[Tensor, "K P"]:
            self.draw(settings)
            return self.posterior.samples

        return len(self.posterior.samples) or settings.num_samples, settings.seed, samples

    def draw(self, settings: Settings) -> None:
        """Draw the samples of the posterior, if the fit did not need them."""
        if len(self.posterior.samples):
            return
        if self.fit is None:
            self.posterior = self.posterior.with_samples(settings.num_samples, settings.seed)
            return
        fit = self.fit.with_samples()
        self.posterior, self.fit = self.posterior.drawn(fit), fit.without_samples()

    def new_samples(
        self, fit: Fit, settings: Settings, num_samples: int, stream: int | None = None
    ) -> Float[Tensor, "K P"]:
        """Samples of a stream of noise, or such that no call before has drawn."""
        if stream is None:
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
