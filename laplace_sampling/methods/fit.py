"""A fitted posterior with its training data: what every method leaves behind."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath, ModeCurve, Traces, knots
from laplace_sampling.evidence.step import Step
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel, Mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.budget import Budget
from laplace_sampling.predictions.calibration import Calibration, labelled
from laplace_sampling.predictions.diagnosis import Accuracy
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.checks import check_finite
from laplace_sampling.solvers.solver import whitening

if TYPE_CHECKING:
    from laplace_sampling.methods.method import Method
    from laplace_sampling.methods.problem import Memory
    from laplace_sampling.methods.start import Start
    from laplace_sampling.predictions.selection import Selection

# How many unconverged rows a message names.
_NAMED_ROWS = 8


@dataclass(frozen=True)
class Task:
    """A problem as one method takes it.

    Attributes:
        method: that was chosen for it.
        model: the linear model, as the method works on it: in float64, or with its Jacobian in memory.
        prior: with the precisions to start from, or those of the posterior.
        memory: that solvers may take.
        reason: why the method was chosen, in words.
        trained_weights: `w̄`, `[P]`.
        budget: what the fit may cost, and has cost.
        shortfall: in words, what the budget does not pay for; empty if it pays for the method that was asked for.
        limit: likewise, what the budget makes smaller than the settings of the method say.
        precise: makes the linear model with products in float64.
        start: the posterior to start from, in a warm fit.
        selection: the rule for the prior precision, where it is not the evidence.
        space: in which dense algebra is smaller, `"weights"` or `"observations"`.
        replaceable: whether the method was chosen, not asked for, so that another one may take its place.
        num_samples: as of a `Problem`; likewise `seed`, `dtype`, `progress`.
    """

    method: "Method"
    model: LinearModel
    prior: GaussianPrior
    memory: "Memory"
    reason: str
    num_samples: int
    seed: int
    dtype: torch.dtype
    progress: bool
    trained_weights: Float[Tensor, " P"]
    budget: Budget = field(default_factory=Budget)
    shortfall: str = ""
    limit: str = ""
    precise: Callable[[], LinearModel] | None = None
    start: "Start | None" = None
    selection: "Selection | None" = None
    replaceable: bool = False
    space: str = "weights"

    def in_float64(self) -> "Task | None":
        """Returns the task with products in float64; `None` if they are already, or if the network allows none."""
        if self.precise is None or self.model.features.dtype == torch.float64:
            return None
        model = self.precise().with_likelihood(self.model.likelihood)
        if model.features.dtype != torch.float64:
            return None
        return replace(
            self,
            model=model,
            prior=self.prior.to(model.features.device, torch.float64),
            memory=replace(self.memory, vector=8 * model.features.size),
            reason=f"{self.reason}; products in float64, which the prior precision needs",
        )

    @property
    def draws(self) -> Draws:
        """The draws of the samples that are kept."""
        return Draws(self.num_samples, self.seed, Stream.SAMPLES)

    def ggn(self) -> GGN:
        """`M`, with the curvature at the network's outputs."""
        return self.model.ggn(self.model.network_outputs)

    def scaled_ggn(self) -> GGN:
        """`M` in the scaled coordinates of the prior."""
        ggn = self.ggn()
        return replace(ggn, features=ScaledFeatures(ggn.features, self.prior.scale.to(ggn.device, ggn.dtype)))

    def whitened_ggn(self) -> GGN:
        """`M` in coordinates in which the prior has one precision, its overall one."""
        ggn, (_, white) = self.ggn(), whitening(self.prior.spread(), overall_precision(self.prior))
        scale = (self.prior.scale * white).to(ggn.device, ggn.dtype)
        return replace(ggn, features=ScaledFeatures(ggn.features, scale))


@dataclass(frozen=True)
class Tuned:
    """How a fit of hyperparameters ended; by default there was none.

    Attributes:
        history: a record of each step.
        converged: `None` if the hyperparameters were given.
        at_bounds: groups, or `"noise"`, whose precision ended at a bound.
        problems: what went wrong, in words.
        mode: where the search for the mode may start, `[P]`, unscaled.
        work: what the method made while tuning and needs again: a solver with its preconditioner, or a decomposition.
        noise_before: noise precisions at which the curvature of `work` was taken.
        criterion: what chose the hyperparameters: `"evidence"`, or the name of a `Selection`; `""` if nothing did.
        calibration: of predictions, if the hyperparameters were chosen together with it.
    """

    history: list[Step] = field(default_factory=list)
    converged: bool | None = None
    at_bounds: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    mode: Float[Tensor, " P"] | None = None
    work: Any = None
    noise_before: Tensor | None = None
    criterion: str = ""
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Fit(ABC):
    """A posterior with the training data, of which a saved one has the samples only.

    Attributes:
        task: with the method, and the model and the prior at the hyperparameters of the posterior.
        tuned: how these were found.
        sampled: the samples that are kept; without them in what `LinearisedLaplace` holds.
        known_mode: the mode, if it was needed for the fit.
    """

    task: Task
    tuned: Tuned
    sampled: PosteriorSamples | None = field(default=None, kw_only=True)
    known_mode: Mode | None = field(default=None, kw_only=True, repr=False)

    @cached_property
    def mode(self) -> Mode:
        """The mode of the linear model, which is found when it is first asked for: samples do not need it."""
        return self.known_mode or self.find_mode()

    @abstractmethod
    def find_mode(self) -> Mode:
        """The mode, from the training data."""

    def with_mode(self) -> Self:
        """The fit with its mode, if its hyperparameters are verified by that."""
        return replace(self, known_mode=self.find_mode()) if self.tuned.criterion == "evidence" else self

    @property
    def method(self) -> "Method":
        return self.task.method

    @property
    def model(self) -> LinearModel:
        return self.task.model

    @property
    def prior(self) -> GaussianPrior:
        return self.task.prior

    @property
    def alpha(self) -> float:
        """`α`, the geometric mean over the weights."""
        return overall_precision(self.prior)

    @property
    def ggn(self) -> GGN:
        """`M`."""
        return self.task.ggn()

    @abstractmethod
    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        """Posterior samples."""

    @abstractmethod
    def judge(self, sampled: PosteriorSamples) -> tuple[Float[Tensor, " K"], float]:
        """Residuals of samples, and the tolerance they should be below."""

    @abstractmethod
    def traces(self, decades: float) -> Traces:
        """Traces of the curvature that are accurate so far to both sides of `α`."""

    @property
    def known_traces(self) -> Traces | None:
        """Returns the traces from all eigenvalues, where these are known."""
        return None

    @abstractmethod
    def mode_curve(self, alphas: Float[Tensor, " k"]) -> ModeCurve:
        """Objective and norm of the mode along `α`, from the modes at some rising precisions."""

    def evidence(self, decades: float) -> tuple[EvidencePath, list[str]]:
        """Curves of the evidence, so far to both sides of `α`, and what is inaccurate."""
        path = EvidencePath(self.traces(decades), self.mode_curve(knots(self.alpha, decades)))
        minimum = self.mode.minimum
        problems = [f"the mode, whose residual is {minimum.residual:.2g}, has not converged"]
        return path, [] if minimum.converged else problems

    def covariance_at(self, features: Features) -> FunctionCovariance | None:
        """The covariance of the function at other inputs, where it takes the training data."""
        return None

    @property
    def approximate(self) -> bool:
        """Whether the covariance is not that of the linear model, apart from what a solver leaves."""
        return False

    def known_leave_one_out(self) -> LeaveOneOut | None:
        """As `leave_one_out`, where it costs next to nothing."""
        return None

    def leave_one_out(self) -> LeaveOneOut:
        """The prediction of each datum from all others, in the units of the model's targets."""
        raise ValueError(
            "`leave_one_out` needs the covariances of the exact method, but the fit is by "
            f'method="{self.method.name}": use method="exact".'
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a saved posterior keeps besides samples."""
        return {}

    @property
    def saves_data(self) -> bool:
        """Whether a saved posterior needs the training data for its covariances."""
        return False

    def with_samples(self, description: str | None = None) -> "Fit":
        """Returns the fit with the samples that are kept.

        Raises:
            FloatingPointError: if the hyperparameters, the mode or the samples are not finite.
        """
        self.check_finite()
        sampled = self.draw(self.task.draws, description)
        check_finite(
            self.method.name, {"samples": sampled.samples, "effective dimension": sampled.effective_dimension()[0]}
        )
        return replace(self, sampled=sampled)

    @property
    def draws_later(self) -> bool:
        """Whether samples are drawn when they are asked for: a closed form has all that they have."""
        return False

    def judged(self, num: int, samples: Tensor, data_energies: Tensor, energies: Tensor) -> PosteriorSamples:
        """Samples of a closed form, of which everything but the energies is known before they are drawn."""
        raise NotImplementedError

    def ready(self, description: str | None = None) -> "Fit":
        """The fit with its samples, or with what is known of them if they are drawn later.

        Raises:
            FloatingPointError: if the hyperparameters, the mode or the samples are not finite.
        """
        if not self.draws_later:
            return self.with_samples(description)
        self.check_finite()
        nothing = torch.empty(0, self.model.features.size, dtype=self.task.dtype, device=self.model.features.device)
        no_energies = nothing.new_zeros(0, dtype=torch.float64)
        sampled = self.judged(self.task.num_samples, nothing, no_energies, no_energies)
        check_finite(self.method.name, {"effective dimension": sampled.effective_dimension()[0]})
        return replace(self, sampled=sampled)

    def check_finite(self) -> None:
        """Raises a `FloatingPointError` if the hyperparameters, or the mode as far as it is known, are not finite."""
        noise, hyperparameters = self.model.likelihood.noise_precisions(), {"prior precision": self.prior.precision}
        if self.known_mode is not None:
            hyperparameters["mode"] = self.known_mode.weights
        check_finite(
            self.method.name, hyperparameters if noise is None else {**hyperparameters, "noise precision": noise}
        )

    def at(self, prior: GaussianPrior) -> Self:
        """The fit of another prior, without what was found for this one."""
        return replace(self, task=replace(self.task, prior=prior), sampled=None, known_mode=None)

    def without_samples(self) -> "Fit":
        """Returns the fit without its samples, which the posterior holds, and without those it started from."""
        assert self.sampled is not None
        sampled = replace(self.sampled, samples=self.sampled.samples[:0].clone())
        return replace(self, sampled=sampled, task=replace(self.task, start=None))

    @property
    def solved(self) -> bool:
        """Whether the mode and the samples, as far as there are any, have converged."""
        mode = self.known_mode is None or self.known_mode.minimum.converged
        return mode and (self.sampled is None or self.sampled.converged)

    @property
    def cut_short(self) -> bool:
        """Whether the budget or Ctrl-C ended the solves, so that no other way to solve is tried."""
        return self.task.budget.refused or (self.sampled is not None and self.sampled.interrupted)

    @property
    def accuracy(self) -> Accuracy:
        assert self.sampled is not None
        return Accuracy.of(self.sampled.error)

    @property
    def converged(self) -> bool:
        return self.solved and self.tuned.converged is not False and not self.task.shortfall

    @property
    def problems(self) -> list[str]:
        """All that is wrong with the fit, in words."""
        unsolved = []
        if self.known_mode is not None and not (minimum := self.known_mode.minimum).converged:
            unsolved.append(f"The mode of the linear model has not converged: residual {minimum.residual:.2g}.")
        if self.sampled is not None and not self.sampled.converged and not self.tolerable:
            unsolved.append(self.unconverged(self.sampled))
        solving = self.sampled is None or not self.sampled.interrupted
        advice = [self.advice] if unsolved and solving else []
        return [*filter(None, [self.task.shortfall]), *self.tuned.problems, *unsolved, *advice]

    @property
    def tolerable(self) -> bool:
        """Whether samples that miss their tolerance are off so little that `remarks` say so, and no warning."""
        return False

    @property
    def advice(self) -> str:
        """What to do about samples or a mode that have not converged."""
        return self.task.budget.advice or self.method.advice

    @property
    def remarks(self) -> list[str]:
        """What else users may want to know, a sentence or two each; nothing that they must act on."""
        found, sampled, labels = [], self.sampled, labelled(self.model.likelihood)
        if sampled is None:
            return found
        if not sampled.converged and self.tolerable:
            moved, tolerance = self.accuracy.unfinished, self.judge(sampled)[1]
            found.append(
                f"What is left out moves standard deviations by about {100 * moved:.2g} %, more than the tolerance of "
                f"{100 * tolerance:.2g} %. {self.advice}"
            )
        gamma = float(sampled.effective_dimension()[0].sum())
        if gamma < 1 and labels is not None and self.tuned.criterion not in ("", "validation"):
            found.append(
                "Error bars are negligible on the training data: at the prior precision that these choose, they "
                f"determine only {gamma:.2g} directions of weight space. Some 500 data that the network was not "
                "trained on, as `val_loader`, may choose wider ones."
            )
        return found

    def unconverged(self, sampled: PosteriorSamples) -> str:
        """Which samples have not converged, and how far they are off."""
        if sampled.interrupted:
            return f"The fit was interrupted: {len(sampled.energies)} of {self.task.num_samples} samples were drawn."
        residuals, tolerance = self.judge(sampled)
        rows = (~(residuals <= tolerance)).nonzero()[:, 0].tolist()  # this counts NaN, too
        if not rows:
            return f"The samples have not converged, says the solver, though no residual is above {tolerance:.2g}."
        named = ", ".join(map(str, rows[:_NAMED_ROWS])) + (", …" if len(rows) > _NAMED_ROWS else "")
        which = "all" if len(rows) == len(residuals) > 1 else f"{len(rows)} ({named})"
        return (
            f"The samples have not converged: residual {float(residuals.max()):.2g} at most, above the tolerance "
            f"{tolerance:.2g} for {which} of {len(residuals)}."
        )
