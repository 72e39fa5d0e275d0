r"""Methods that solve linear systems: EM on samples, samples and mode by a solver, evidence by a Krylov run.

**What a tolerance means.** A sample `ζ` is independent of the simulated data `d = u − Mθ⁰` that it is conditioned on,
since `Cov(ζ, d) = H⁻¹(M − AA⁻¹M) = 0`, and all that a solver does from `δ = 0` is a function of `d`. So the error
`e = ζ̂ − ζ` is independent of `ζ`: variances add, and an error of the function of relative size `ε = ‖Φe‖_B / ‖Φζ‖_B`
makes standard deviations too large by the factor `√(1 + ε²)`, that is by `ε²/2`. With `K` samples the sum of the
products `⟨Φζ, Φe⟩`, whose mean is zero, moves it by about `ε/√K`, too.

**Warm starts.** From `δ ≠ 0`, as in EM and in a fit that starts from an earlier posterior, this independence does not
hold: the error is a remnant of the difference from another posterior, whose variances may all be larger or smaller.
What holds is the bound of each sample, `‖Φe‖_B ≤ ε ‖Φζ‖_B`, wherever a solve started, so that standard deviations
differ by at most `ε` (the triangle inequality), in place of `ε²/2 + ε/√K`. And where the data determine nothing, the
error is no longer zero: with `r` the last residual, `‖e‖_H = ‖r‖_{H⁻¹} ≤ ‖r‖/√α`, and `ε` bounds `‖r‖/(2√α ‖Φζ‖_B)`,
so `‖e‖_H ≤ 2ε ‖Φζ‖_B` holds for all directions. Solvers by mini-batches, whose `ε` is the largest, always make steps
from a warm start, also where it passes.

**What is claimed.** The standard deviations `σ̂` of the training outputs, `σ̂ᵢ² = Σ_k (φᵢζ̂_k)²/K`, differ from those
of the exact samples of the same draws by `τ` of them: as root mean squares over the training outputs, weighted by `B`,
and up to the chance of `K` samples. `ε` is a bound for each sample (`solvers.solver.function_error`), whatever chance
does: with it alone, the difference is at most `ε`. A single output, and one far from the data, can differ by more.
Krylov solvers, for which accuracy is cheap, take `ε = 2τ`; `SGD` takes the largest `ε` with `ε²/2 + ε/√K ≤ τ`
(`largest_error`); `SVRG` takes `ε² = 2τ/3` of an estimate.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.arguments import check_finite
from laplace_sampling.gp.evidence import HyperparameterBounds, RegressionEvidence
from laplace_sampling.hyperparameters.covariance_path import CovariancePath
from laplace_sampling.hyperparameters.curves import EvidencePath, ModeCurve, Traces, knots, krylov_traces, modes_along
from laplace_sampling.hyperparameters.em import fit_em, noise_update
from laplace_sampling.hyperparameters.hyperparameters import Hyperparameters, clamped, in_one_step, mackay_root
from laplace_sampling.hyperparameters.rules import Selection
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel, Mode, ModeObjective, linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.linear_model.sampling import PosteriorSamples, draw
from laplace_sampling.methods.problem import Estimate, Memory, Problem, Start
from laplace_sampling.predictions.calibration import labelled
from laplace_sampling.predictions.diagnosis import FEW_SAMPLES, Accuracy, Check
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.solver import Minimum, Solver, whitening

# Relative differences of the two sides that say nothing: a search ends within its tolerance. The noise is known better,
# from all observations. Standard errors of `γ` that say nothing.
_OF_PRECISION, _OF_NOISE, _ERRORS = 0.25, 0.1, 4.0


# Vectors held for each of a Krylov basis (itself, its product, and room to move), and for each row of a solve: see
# `Krylov.stacks`.
BASIS_STACKS, _KRYLOV_STACKS = 3, 16


# Probes for the evidence at one precision, and for a path: far below the fitted one determinants are known less well.
# On 300 digits the evidence is off by 0.03 % with 16 probes, by 0.3 % with 8 and by 0.07 % with 32; a path of two
# decades by 0.02 % with 48, by 0.1 % with 24 and by 0.05 % with 96, at costs in proportion. The accuracy at half and at
# twice gives the same figures: a basis of 300 digits is complete before it counts.
_EVIDENCE_PROBES, _PATH_PROBES, _EVIDENCE_ACCURACY = 16, 48, 2e-3


# Traces are right for `α` above this multiple of the rounding of products. On naval-propulsion-plant (UCI), for a
# network of 3,451 weights in float32, `γ` is too large by 10 % at a multiple of 6 and by 1.6 % at 60.
_CARRIED = 100


@dataclass(frozen=True)
class Choice:
    """A method for a problem, and why.

    Attributes:
        method: one that can fit.
        asked: the one that was asked for, `Auto` or the same.
        reason: in words.
        shortfall: what the budget does not pay for.
        limit: what the budget makes smaller than the settings of the method say.
    """

    method: "Method"
    asked: "Method"
    reason: str = "as asked for"
    shortfall: str = ""
    limit: str = ""


@dataclass(frozen=True, kw_only=True)
class Task(Problem):
    """A problem as one method takes it.

    Attributes:
        method: that was chosen for it.
        model: the linear model, as the method works on it: in float64, or with its Jacobian in memory.
        prior: with the precisions to start from, or those of the posterior.
        memory: that solvers may take.
        reason: why the method was chosen, in words.
        shortfall: in words, what the budget does not pay for; empty if it pays for the method that was asked for.
        limit: in words, what the budget makes smaller than the settings of the method say.
        start: the posterior to start from, in a warm fit.
        space: in which dense algebra is smaller, `"weights"` or `"observations"`.
    """

    method: "Method"
    model: LinearModel
    prior: GaussianPrior
    memory: Memory
    reason: str
    shortfall: str = ""
    limit: str = ""
    start: Start | None = None
    space: str = "weights"

    @property
    def given(self) -> Hyperparameters:
        """The precisions that the task has, for a fit without a search."""
        return Hyperparameters(prior=self.prior, likelihood=self.model.likelihood)

    def at(self, found: Hyperparameters) -> "Task":
        """The task at hyperparameters that were found for it."""
        return replace(self, model=self.model.with_likelihood(found.likelihood), prior=found.prior)

    def ended(self, found: Hyperparameters, started: float, passes: float = 0.0) -> Hyperparameters:
        """What a search of one step found, compared with the bounds; `started` and `passes` as in `told`."""
        found = found.told(self.callback, started, passes)
        return found.within(self.criterion.precision_bounds, self.criterion.noise_bounds)

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
class Fit:
    """A posterior with the training data, of which a saved one has the samples only.

    Attributes:
        task: with the method, and the model and the prior at the hyperparameters of the posterior.
        found: these, and how they were found.
        solver: that finds the mode and, unless they have a closed form, the samples.
        sampled: the samples that are kept; without them in what `LinearisedLaplace` holds.
        known_mode: the mode, if it was needed for the fit.
    """

    # How many unconverged rows a message names.
    _NAMED_ROWS = 8

    task: Task
    found: Hyperparameters
    solver: Solver
    sampled: PosteriorSamples | None = field(default=None, kw_only=True)
    known_mode: Mode | None = field(default=None, kw_only=True, repr=False)

    @cached_property
    def mode(self) -> Mode:
        """The mode of the linear model, which is found when it is first asked for: samples do not need it."""
        return self.known_mode or self.find_mode()

    def find_mode(self) -> Mode:
        """The mode, from the training data."""
        minimum = self.method.mode(self.task, self.solver, self.found.mode)
        weights = (minimum.value * self.prior.scale)[0]
        outputs = self.model.outputs(weights[None].to(self.model.features.dtype))[0]
        return Mode(weights, outputs, replace(minimum, value=minimum.value[:0].clone()))

    def with_mode(self) -> Self:
        """The fit with its mode, if its hyperparameters are verified by that."""
        return replace(self, known_mode=self.find_mode()) if self.found.criterion == "evidence" else self

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

    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        """Posterior samples."""
        return draw(
            self.ggn,
            self.prior,
            draws,
            self.solver,
            rows=self.method.rows(self.task.memory, self.task.num_samples, held=self.task.num_samples),
            dtype=self.task.dtype,
            init=self.warm_start,
            description=description,
            # What was asked for by `sample` is drawn in full, or not at all.
            keep=draws == self.task.draws,
        )

    def warm_start(self, draws: Draws) -> Tensor | None:
        """`δ` of the samples that are there already for some draws."""
        return None if self.task.start is None else self.task.start.delta(draws, self.prior)

    def judge(self, sampled: PosteriorSamples) -> tuple[Float[Tensor, " K"], float]:
        """Residuals of samples, and the tolerance they should be below."""
        return self.method.judge(sampled, self.solver)

    def traces(self, decades: float) -> Traces:
        """Traces of the curvature that are accurate so far to both sides of `α`."""
        ends = self.alpha * torch.logspace(-decades, decades, 3, dtype=torch.float64)
        return traces_of(self.task, lambda traces: settled(traces, ends), _PATH_PROBES if decades else _EVIDENCE_PROBES)

    @property
    def known_traces(self) -> Traces | None:
        """Returns the traces from all eigenvalues, where these are known."""
        return None

    def mode_curve(self, alphas: Float[Tensor, " k"]) -> ModeCurve:
        """Objective and norm of the mode along `α`, from the modes at some rising precisions."""
        model, method, solver = self.model, self.method, self.curve_solver

        def find(alpha: float, start: Tensor) -> tuple[Tensor, float, float]:
            prior = self.prior.with_precision(self.prior.precision * (alpha / self.alpha))
            minimum = method.mode(replace(self.task, prior=prior), solver, start)
            weights = (minimum.value * prior.scale)[0]
            energy = float((prior.diagonal() * weights.double() ** 2).sum())
            loss = model.total_loss(model.outputs(weights[None].to(model.features.dtype))[0])
            return weights, loss + 0.5 * energy, energy / alpha

        return modes_along(alphas, self.mode.weights, find)

    @property
    def curve_solver(self) -> Solver:
        """What finds modes for curves of the evidence."""
        return CG(_EVIDENCE_ACCURACY)

    def evidence(self, decades: float) -> tuple[EvidencePath, list[str]]:
        """Curves of the evidence, so far to both sides of `α`, and what is inaccurate."""
        path = EvidencePath(self.traces(decades), self.mode_curve(knots(self.alpha, decades)))
        minimum, problems = self.mode.minimum, []
        if not minimum.converged:
            problems.append(f"the mode, whose residual is {minimum.residual:.2g}, has not converged")
        # Memory may have ended the run: then its own estimate of what is missing says how much.
        ends = self.alpha * torch.logspace(-decades, decades, 3, dtype=torch.float64)
        change = 0.0 if path.traces.exact else float(path.traces.missing(ends).max())
        if not change < _EVIDENCE_ACCURACY:
            problems.append(
                f"memory was full before it was accurate: more iterations may change the log determinant by "
                f"{100 * change:.2g} %; give more `max_memory`"
            )
        return path, problems

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
        """Tensors that covariances in closed form take, for a saved posterior; none if the samples are all it has."""
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
        """Returns the fit without its samples, which the posterior holds, and without what it started from."""
        assert self.sampled is not None
        sampled = replace(self.sampled, samples=self.sampled.samples[:0].clone())
        return replace(self, sampled=sampled, task=replace(self.task, start=None, callback=None))

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
        return self.solved and self.found.converged is not False and not self.task.shortfall

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
        return [*filter(None, [self.task.shortfall]), *self.found.problems, *unsolved, *advice]

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
        if self.found.criterion in ("leave_one_out", "self_consistency"):
            found.append(
                "Apart from error bars probabilities are those of the network, which may be too sure: pass "
                "`val_loader`, or `accuracy=`, the accuracy on new data, for a temperature."
            )
        gamma = float(sampled.effective_dimension()[0].sum())
        if gamma < 1 and labels is not None and self.found.criterion not in ("", "validation"):
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
        named = ", ".join(map(str, rows[: self._NAMED_ROWS])) + (", …" if len(rows) > self._NAMED_ROWS else "")
        which = "all" if len(rows) == len(residuals) > 1 else f"{len(rows)} ({named})"
        return (
            f"The samples have not converged: residual {float(residuals.max()):.2g} at most, above the tolerance "
            f"{tolerance:.2g} for {which} of {len(residuals)}."
        )


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a posterior is found: settings, and what follows from them for a problem.

    To write one, subclass this in a file of its own, give `name`, `stacks`, `tune` and `fit`, and add a line to the
    table in `laplace_sampling/methods/__init__.py`. `Method` has `tune` and `fit` for a solver of linear systems.

    Args:
        max_memory: bytes that solvers may take for vectors of `P` numbers, the samples among them; half of what is
            free by default. Where it is short, samples are solved for in groups. Activations of the network may take as
            much again, and 64 MiB at least: where the loader's batches are larger, they go through it in pieces, which
            are halved after an out-of-memory error.
        autocast: `torch.bfloat16` or `torch.float16`, to which `torch.autocast` lowers operations of the network inside
            Jacobian products, to about 1 %; sums over data, solvers and samples stay in float32, and so does the
            network's own output.

    Raises:
        ValueError: for settings that are not possible.
    """

    _ALL = 2**31  # more samples than anybody asks for
    # Vectors that EM holds of each sample that is not being solved for at the moment: its warm start, and room to move.
    _EM_STACKS = 2

    max_memory: float | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.max_memory, Real) and not isinstance(self.max_memory, bool)
        if self.max_memory is not None and not (number and self.max_memory > 0):
            raise ValueError(f"`max_memory` must be a positive number of bytes, but is {self.max_memory!r}.")

    @property
    @abstractmethod
    def name(self) -> str:
        """The string that stands for the method."""

    @property
    def minimises(self) -> bool:
        """Whether samples minimise the objective of their draws (`linear_model.sampling`), from whatever start."""
        return True

    @property
    def stacks(self) -> int:
        """Vectors of `P` numbers that are alive for each row of a solve; 0 if there are no solves."""
        return 0

    @property
    def advice(self) -> str:
        """What to do about a solve that did not converge."""
        return (
            "Float64 weights (`model.double()`) help where the problem is badly conditioned, a larger prior precision "
            'too, and method="exact" where it fits.'
        )

    @property
    def residual_kind(self) -> str:
        """What the residuals of the samples measure."""
        return "relative gradient"

    def check_likelihood(self, likelihood: Likelihood) -> None:  # noqa: B027
        """Raise a `ValueError` if the method has no posterior for a likelihood."""

    def choose(self, problem: Problem) -> Choice:
        """The method that fits: this one, except for `Auto`."""
        return Choice(self, self)

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        """Operations and memory that a fit and its search for hyperparameters take, to a factor of two or so."""
        return Estimate(0.0, self.needs(problem) * problem.memory_of(self.max_memory).vector)

    def within(self, problem: Problem, cost: Cost) -> "Method":
        """Returns the method with settings that the budget pays for."""
        return self

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        """The choice, or another one if the budget pays for no posterior by this method."""
        return choice

    def is_held(self, problem: Problem, cost: Cost) -> bool:
        """Whether memory is enough for a posterior that is better than that of the next candidate of `Auto`."""
        return True

    def needs(self, problem: Problem) -> float:
        """Vectors of `P` numbers without which there is no fit: the samples, and the solve of a single one."""
        return problem.num_samples + self.stacks

    def check(self, problem: Problem) -> None:
        """Raise a `ValueError` if the method cannot fit the problem."""
        memory, needed = problem.memory_of(self.max_memory), self.needs(problem)
        if memory.vectors < needed:
            raise ValueError(
                f"{'max_memory' if memory.given else 'Half of the free memory'} of {memory.bytes:.3g} bytes holds "
                f"{memory.vectors:.0f} vectors of {problem.features.size} weights, but {problem.num_samples} samples "
                f'and the solve of a single one by method="{self.name}" take {needed:.0f}, or '
                f"{needed * memory.vector:.3g} bytes. Give more memory, or lower `num_samples`."
            )

    def prepare(self, problem: Problem) -> Task:
        """The problem as the method that is chosen for it takes it.

        Raises:
            ValueError: if the method cannot fit the problem.
        """
        choice = self.choose(problem)
        choice = choice.method.paid_for(problem, choice)
        choice.method.check(problem)
        return choice.method.take(problem, choice)

    def take(self, problem: Problem, choice: Choice) -> Task:
        """The task of this method, once it is chosen."""
        return self.task(problem, choice, problem.tangent.with_offset())

    def task(self, problem: Problem, choice: Choice, model: LinearModel, prior: GaussianPrior | None = None) -> Task:
        """The problem as a task of this method on a linear model; without a prior it takes that of the problem."""
        memory = problem.memory_of(self.max_memory)
        return Task(
            **vars(problem),
            method=self,
            model=model,
            prior=self.build_prior(problem, model, memory) if prior is None else prior,
            memory=memory,
            reason=choice.reason + self.remark(problem, memory),
            shortfall=choice.shortfall,
            limit=choice.limit,
        )

    def remark(self, problem: Problem, memory: Memory) -> str:
        """What else is to be said of the choice."""
        return ""

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        """The prior, whose scale, if it has one, is that of the curvature."""
        ggn = self.ggn_of_prior(problem, model, memory)
        probes = Draws(getattr(problem.family, "num_probes", 1), problem.seed, Stream.PRIOR_SCALE)
        return problem.family.build(ggn, problem.layers(), probes.noise(model.features.num_outputs))

    def ggn_of_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GGN:
        """`M` of which a g-prior takes the diagonal."""
        ggn = model.ggn(model.network_outputs)
        # A diagonal takes rows of the Jacobian: no more of them than memory holds.
        most = memory.vectors / (4 * model.features.num_outputs)
        return replace(ggn, features=model.features.in_chunks(int(min(most, model.features.num_data))))

    def tune(self, task: Task) -> Hyperparameters:
        """The hyperparameters that the criterion of a task chooses."""
        if task.selection is not None and has_path(task):
            started, path = time.perf_counter(), self.covariance_path(task)
            found = replace(by_selection(task, task.selection, path), work=path.work)
            return task.ended(found, started, path.passes)
        if task.selection is not None and task.criterion.name != "auto":
            noise = task.model.likelihood.noise_precisions()
            name, otherwise = f"criterion={task.criterion.name!r}", 'use `criterion="evidence"`'
            if task.criterion.name == "accuracy":
                name, otherwise = "accuracy", "leave `accuracy` out"
            raise ValueError(
                f"`{name}` looks for one prior precision, and one noise precision at most, but there are "
                f'{len(task.prior.names)} and {0 if noise is None else noise.numel()}: take `prior="isotropic"` or '
                f'"g-prior", or {otherwise}.'
            )
        return self.tune_by_evidence(task)

    @abstractmethod
    def covariance_path(self, task: Task) -> CovariancePath:
        """The posterior for every prior precision, with the curvature at the network's outputs."""

    def tune_by_evidence(self, task: Task) -> Hyperparameters:
        return self.tune_by_em(task, self.make_solver(task, task.tolerance, None))

    @abstractmethod
    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        """The solver, with its preconditioner.

        Args:
            task: what is to be solved.
            tolerance: relative error `τ` of predicted standard deviations.
            shift: the prior precision, if it is known.
        """

    @abstractmethod
    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        """Residuals of the samples, `sampled.error` or `sampled.residual`, and the tolerance they should be below."""

    def preconditioner_vectors(self, memory: Memory, num_samples: int) -> int:
        """Vectors that a preconditioner or a basis holds during all solves."""
        return 0

    def rows(self, memory: Memory, num_samples: int, held: float = 0) -> int:
        """Samples to solve for together, beside `held` vectors."""
        if not self.stacks:
            return self._ALL
        room = memory.vectors - held - self.preconditioner_vectors(memory, num_samples)
        return max(1, int(room / self.stacks))

    def em_rows(self, solver: Solver, memory: Memory, num_samples: int, in_em: int) -> int:
        """How many of the `in_em` samples of EM to solve for together: as many as fit beside what EM keeps of each."""
        return min(in_em, self.rows(memory, num_samples, self._EM_STACKS * in_em))

    def tune_by_em(self, task: Task, solver: Solver) -> Hyperparameters:
        """Finds prior and noise precisions by EM on posterior samples, starting at those of the task.

        If EM stops before its tolerance, or at a bound, the result has not `converged`, and its `problems` say so. Its
        `work` is the solver, for the fit that follows.
        """
        evidence = task.criterion.evidence
        found = fit_em(
            task.model,
            task.prior,
            Draws(evidence.num_samples, task.seed, Stream.EM),
            solver.within(task.budget.for_tuning),
            rows=self.em_rows(solver, task.memory, task.num_samples, evidence.num_samples),
            mode=None if task.start is None else task.start.mode_in(task.prior.scale),
            max_steps=evidence.max_steps,
            # Where the prior decides, standard deviations go with `α^{-1/2}`: `log α` is needed to twice their error.
            tolerance=2 * task.tolerance,
            precision_bounds=evidence.precision_bounds,
            noise_bounds=evidence.noise_bounds,
            afford=task.budget.for_tuning,
            progress=task.progress,
            callback=task.callback,
        )
        problems = []
        if not found.converged:
            problems.append(
                f"`fit_hyperparameters` stopped after {len(found.history)} steps, before its tolerance: "
                f"prior precision went {[f'{s.prior_precision[0]:.3g}' for s in found.history]}. "
                + (task.budget.advice or "Raise `max_steps` of `Evidence`, or `tolerance`.")
            )
        found = replace(found, problems=problems, work=solver)
        return found.within(evidence.precision_bounds, evidence.noise_bounds)

    def fit(self, task: Task, found: Hyperparameters) -> Fit:
        """Mode and samples of a task at hyperparameters from `tune`, or at those that it has, `task.given`."""
        task, solver = task.at(found), found.work
        # The search for hyperparameters has made the solver, with a preconditioner that serves every `α`.
        if not isinstance(solver, Solver):
            solver = self.make_solver(task, task.tolerance, float(task.prior.precision.mean()))
        solver = solver.within(task.budget.affords_passes)
        features = task.model.features
        task = replace(task, prior=task.prior.to(features.device, features.dtype))
        fit = self.fit_of(task, replace(found, work=None), solver)
        return _verified(fit.with_mode().ready(f"{task.num_samples} samples" if task.progress else None))

    def mode(self, task: Task, solver: Solver, near: Float[Tensor, " P"] | None) -> Minimum:
        """The mode of the linear model, in scaled coordinates; the search starts at unscaled weights, if given."""
        start = None if near is None else (near / task.prior.scale)[None]
        if start is None and task.start is not None:
            start = task.start.mode_in(task.prior.scale)
        return linear_model_mode(task.model, task.prior, solver, start, description="mode" if task.progress else None)

    def fit_of(self, *parts: Any) -> Fit:
        """What the fit is kept as."""
        return Fit(*parts)

    def restore(self, problem: Problem, prior: GaussianPrior, tensors: dict[str, Tensor]) -> Fit:
        """The fit of a saved posterior whose `Fit.saves_data` is true, from its prior and its `Fit.tensors`."""
        raise NotImplementedError(f'A posterior by method="{self.name}" is saved without its data.')


def has_path(task: Task) -> bool:
    """Whether the hyperparameters lie on one curve: one prior precision, and at most one noise precision."""
    noise = task.model.likelihood.noise_precisions()
    return len(task.prior.names) == 1 and (noise is None or noise.dim() == 0)


def by_selection(task: Task, selection: Selection, path: CovariancePath, near: float | None = None) -> Hyperparameters:
    """What a rule chooses, near a given precision or that of the posterior that a fit starts from."""
    if near is None and task.start is not None:
        near = task.start.alpha
    weights = task.trained_weights.double() / task.prior.scale.to(task.trained_weights.device).double()
    norm = float(weights.square().sum())
    return selection.select(task.model, path, task.criterion.precision_bounds, task.seed, norm, near)


def by_spectrum(task: Task, solver: Solver, values: Tensor, rotated: Callable[[Tensor], Tensor]) -> Hyperparameters:
    """The hyperparameters of largest evidence, from all eigenvalues of the curvature.

    For a likelihood that is not Gaussian they are at MacKay's fixed point (`by_traces`).

    Args:
        task: with one prior precision, and one noise precision at most.
        solver: for the mode.
        values: eigenvalues of `M`, in scaled coordinates.
        rotated: from vectors to their coordinates in the eigenvectors.
    """
    started, model, criterion = time.perf_counter(), task.model, task.criterion
    likelihood, values = model.likelihood, values.double().clamp_min(0)
    if not isinstance(likelihood, Gaussian):
        return by_traces(task, Traces.of_eigenvalues(values, overall_precision(task.prior)), solver)
    b, zero = float(likelihood.noise_precisions()), values.new_zeros(1, model.features.size)
    slope = rotated(-ModeObjective(model, task.prior).gradient(zero.to(model.features.dtype), None).double())[0]
    inside = torch.where(values > 0, slope / (b * (values / b).sqrt()), 0.0).nan_to_num()
    offset, network = (float(model.squared_errors(f).sum()) for f in (model.offset, model.network_outputs))
    regression = RegressionEvidence.of_leading(values / b, inside, offset, model.num_observations)
    bounds = HyperparameterBounds(criterion.precision_bounds, criterion.noise_bounds)
    optimum = regression.largest((overall_precision(task.prior), b), (True, likelihood.learns_noise), bounds, network)
    at = optimum.precision, optimum.noise_precision
    norm = float(regression.mode_norm(*at))
    found = in_one_step(
        model,
        task.prior,
        at[0],
        likelihood.with_precision(at[1]) if likelihood.learn else likelihood,
        effective_dimension=float(regression.effective_dimension(*at)),
        mode_norm=norm,
        loss=float(regression.objective(*at)) - 0.5 * at[0] * norm,
        passes=1.0,
        work=solver,
        criterion="evidence",
    )
    return task.ended(found, started)


def by_traces(
    task: Task,
    traces: Traces,
    solver: Solver,
    start: float | None = None,
    accuracy: float = 1e-8,
    work: Solver | None = None,
) -> Hyperparameters:
    r"""The hyperparameters at MacKay's fixed point, `α‖θ̄‖² = γ(α)`: each precision that is tried has a mode.

    The curvature of a regression is proportional to its noise precision `b`. So the mode depends on the ratio of `α` to
    the factor `κ` by which `b` grows, and `κ` is what MacKay's update of `b` says at that ratio.

    Args:
        task: with one prior precision, and one noise precision at most.
        traces: of the curvature, in scaled coordinates.
        solver: for the modes.
        start: where the search begins, by default at the precision of the prior.
        accuracy: of `log α`.
        work: the solver of the fit, by default that of the modes.
    """
    started, model, likelihood, bounds = time.perf_counter(), task.model, task.model.likelihood, task.criterion
    weights, outputs, minimum = None, model.network_outputs, None

    def dimension(ratio: float) -> tuple[float, float]:
        gamma, error = traces.effective_dimension(torch.tensor([ratio], dtype=torch.float64))
        return float(gamma), float(error)

    def factor(ratio: float) -> float:
        if not (isinstance(likelihood, Gaussian) and likelihood.learn):
            return 1.0
        gamma = torch.tensor([dimension(ratio)[0]], dtype=torch.float64)
        updated = clamped(float(noise_update(model, gamma)), bounds.noise_bounds)
        return updated / float(likelihood.noise_precisions())

    def norm(ratio: float) -> float:
        nonlocal weights, outputs, minimum
        prior = task.prior.with_precision(torch.tensor([ratio], dtype=torch.float64))
        minimum = task.method.mode(replace(task, prior=prior), solver, weights)
        weights = (minimum.value * prior.scale)[0]
        outputs = model.outputs(weights[None].to(model.features.dtype))[0]
        return float(minimum.value.double().square().sum())

    def energy(ratio: float) -> float:
        return ratio * norm(ratio) * factor(ratio)

    ratio, inside = mackay_root(
        lambda a: dimension(a)[0], energy, start or traces.at, bounds.precision_bounds, accuracy
    )
    mode_norm, kappa = norm(ratio), factor(ratio)
    assert minimum is not None
    if isinstance(likelihood, Gaussian) and likelihood.learn:
        likelihood = likelihood.with_precision(float(likelihood.noise_precisions()) * kappa)
    gamma, error = dimension(ratio)
    rounds = ratio < _CARRIED * traces.rounding
    problem = (
        f"Products in {model.features.dtype} are not accurate enough for the prior precision {ratio * kappa:.3g} that "
        'the evidence asks for. Use `model.double()`, a common scale of inputs and targets, or method="exact".'
    )
    found = in_one_step(
        model,
        task.prior,
        # The noise must not take it off the bound that the evidence points to.
        clamped(ratio * kappa, bounds.precision_bounds) if inside else ratio,
        likelihood,
        effective_dimension=gamma,
        effective_dimension_se=None if traces.exact else error,
        mode_norm=mode_norm,
        loss=model.with_likelihood(likelihood).total_loss(outputs),
        mode_residual=minimum.residual,
        passes=traces.passes + minimum.passes,
        problems=[problem] if rounds else [],
        mode=weights,
        work=solver if work is None else work,
        criterion="evidence",
    )
    return task.ended(found, started)


def traces_of(task: Task, accurate: Callable[[Traces], bool], num_probes: int = _EVIDENCE_PROBES) -> Traces:
    """Traces of the curvature by a Krylov run within memory; `accurate` as in `krylov_traces`."""
    max_basis = basis_that_fits(task.memory, task.num_samples)
    draws = Draws(max(1, min(num_probes, max_basis // 4)), task.seed, Stream.EVIDENCE)
    at = overall_precision(task.prior)
    return krylov_traces(task.whitened_ggn(), at, draws, accurate, max_basis)


def settled(traces: Traces, alphas: Tensor) -> bool:
    """Whether further Lanczos steps hardly change `log|I + M/α|` at some precisions."""
    return bool((traces.missing(alphas) < _EVIDENCE_ACCURACY).all())


def basis_that_fits(memory: Memory, num_samples: int) -> int:
    """Vectors of a Krylov basis that memory holds beside the stacks of a solve of all samples; 4 at least."""
    beside = (_KRYLOV_STACKS + 1) * num_samples
    return max(4, int((memory.vectors - beside) / BASIS_STACKS))


def balances(fit: Fit) -> Iterator[Check]:
    """Compares both sides of `γ_g = α_g ‖θ̄_g‖²` and `N·C − γ = b Σ(y − f)²`, which hold at a maximum of the evidence.

    A search finds it on curves, or on samples of earlier steps; the samples and the mode of the posterior itself are
    other estimates, by other solves. An end that is an artefact of rounding, or of a search that went astray, does not
    agree with them. Bounds, and hyperparameters that the evidence has not chosen, are not compared.
    """
    by_evidence = fit.found.criterion == "evidence"
    if fit.sampled is None or not (by_evidence and fit.solved and fit.found.converged) or fit.found.at_bounds:
        return
    gamma, error = (t.cpu() for t in fit.sampled.effective_dimension())
    if len(fit.sampled.energies) < FEW_SAMPLES:
        # Few samples say little of their own spread, whose variance is `2 Tr (H⁻¹M)²`, at most `2γ`.
        error = error.nan_to_num(0).maximum((2 * gamma / len(fit.sampled.energies)).sqrt())
    # The search has an error of its own.
    of_search = torch.tensor(fit.found.history[-1].effective_dimension_se or [0.0] * len(gamma), dtype=torch.float64)
    error = (error.nan_to_num(math.inf) ** 2 + of_search.nan_to_num(0) ** 2).sqrt()
    prior, scale = fit.prior, fit.prior.scale.double()
    found = prior.precision * prior.grouped((fit.mode.weights.to(scale) / scale) ** 2).cpu()
    advice = (
        "Bring inputs and targets to a common scale."
        if fit.method.name == "exact"
        else 'Raise `num_samples` and `max_steps` of `Evidence`, or use method="exact".'
    )

    def balance(what: str, value: float, wanted: float, found: float, error: float, tolerance: float) -> Check:
        allowed = _ERRORS * error + tolerance * max(abs(wanted), abs(found))
        asked = value * max(wanted, 0.0) / max(found, 1e-300)
        return Check(
            f"balance of {what}",
            wanted - found,
            (-allowed, allowed),
            f"`fit_hyperparameters` ended at {what} {value:.3g}, but the samples and the mode there ask for "
            f"{asked:.3g}. {advice}",
        )

    for group, name in enumerate(prior.names):
        sides = float(gamma[group]), float(found[group]), float(error[group])
        yield balance(f"the prior precision ({name})", float(prior.precision[group]), *sides, _OF_PRECISION)
    likelihood = fit.model.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.learn and torch.as_tensor(likelihood.noise_precision).dim() == 0:
        squares = float(fit.model.squared_errors(fit.model.network_outputs).sum())
        noise, free = float(likelihood.noise_precisions()), fit.model.num_observations - float(gamma.sum())
        yield balance("the noise precision", noise, free, noise * squares, float(error.norm()), _OF_NOISE)


def _verified(fit: Fit) -> Fit:
    """The fit, as not converged where its own samples and mode contradict its hyperparameters."""
    contradictions = [check.sentence for check in balances(fit) if not check.holds]
    if not contradictions:
        return fit
    return replace(fit, found=replace(fit.found, converged=False, problems=[*fit.found.problems, *contradictions]))
