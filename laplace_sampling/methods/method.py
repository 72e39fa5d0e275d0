"""`Method`: how a posterior is found; the interface that each file of this room implements."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.evidence.step import Step
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import AtBounds
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.methods.budget import Estimate
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.plan import Rung
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.predictions.selection import Selection
from laplace_sampling.solvers.checks import check_positive


@dataclass(frozen=True)
class Tuning:
    """Arguments of `LinearisedLaplace.fit_hyperparameters` that a method needs.

    Attributes:
        max_steps: at most so many steps.
        tolerance: relative error of predicted standard deviations.
        num_samples: samples of EM.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which the noise precision is kept.
        callback: called with the record of each step.
        criterion: as the user gave it.
    """

    max_steps: int
    tolerance: float
    num_samples: int
    precision_bounds: tuple[float, float]
    noise_bounds: tuple[float, float]
    callback: Callable[[Step], object] | None = None
    criterion: str = "auto"

    def __post_init__(self) -> None:
        check_positive("`fit_hyperparameters(tolerance=...)`", self.tolerance)

    def shifted(self, loss: float) -> "Tuning":
        """Returns settings whose callback gets losses of the targets, where those of the model are smaller."""
        callback = self.callback
        if callback is None or loss == 0:
            return self
        return replace(self, callback=lambda step: callback(step.shifted(loss)))

    def after(self, num_steps: int) -> "Tuning":
        """Returns settings whose callback counts on from so many steps."""
        callback = self.callback
        if callback is None:
            return self
        return replace(self, callback=lambda step: callback(replace(step, step=step.step + num_steps)))


def has_path(task: Task) -> bool:
    """Whether the hyperparameters lie on one curve: one prior precision, and at most one noise precision."""
    noise = task.model.likelihood.noise_precisions()
    return len(task.prior.names) == 1 and (noise is None or noise.dim() == 0)


def tuned_by_selection(
    task: Task, tuning: Tuning, selection: Selection, path: CovariancePath, near: float | None = None
) -> tuple[Task, Tuned]:
    """The task with the prior precision that a rule chooses, and the record of that one step.

    It is looked for near a given precision, or that of the posterior that a fit starts from.
    """
    started = time.perf_counter()
    if near is None and task.start is not None:
        near = task.start.alpha
    weights = task.trained_weights.double() / task.prior.scale.to(task.trained_weights.device).double()
    norm = float(weights.square().sum())
    selected = selection.select(task.model, path, tuning.precision_bounds, task.seed, norm, near)
    return tuned_at(
        task,
        tuning,
        selected.alpha,
        selected.likelihood,
        started=started,
        effective_dimension=selected.effective_dimension,
        passes=path.passes + selected.passes,
        problems=selected.problems,
        work=path.work,
        criterion=selection.name,
        calibration=selected.calibration,
    )


def tuned_at(
    task: Task,
    tuning: Tuning,
    alpha: float,
    likelihood: Likelihood,
    *,
    started: float,
    effective_dimension: float,
    passes: float,
    effective_dimension_se: float | None = None,
    mode_norm: float | None = None,
    loss: float | None = None,
    mode_residual: float | None = None,
    converged: bool = True,
    problems: Sequence[str] = (),
    **kept: Any,
) -> tuple[Task, Tuned]:
    """The task at hyperparameters that were found in one step, and the record of that.

    Args:
        task: before.
        tuning: what was asked.
        alpha: the prior precision.
        likelihood: with its noise precision.
        started: when the search began, by `time.perf_counter`.
        effective_dimension: as of a `Step`, and so are `passes`, `effective_dimension_se`, `mode_norm`, `loss` (by
            default that of the network) and `mode_residual`.
        passes: see there.
        effective_dimension_se: see there.
        mode_norm: see there.
        loss: see there.
        mode_residual: see there.
        converged: whether there is a maximum; a bound and `problems` say that there is none.
        problems: what is wrong, in words.
        kept: other attributes of `Tuned`.
    """
    model, noise = task.model.with_likelihood(likelihood), likelihood.noise_precisions()
    prior = task.prior.with_precision(torch.tensor([alpha], dtype=torch.float64))
    network_loss = model.total_loss(model.network_outputs)
    step = Step(
        step=1,
        prior_precision=prior.precision.tolist(),
        new_prior_precision=prior.precision.tolist(),
        noise_precision=None if noise is None else noise.reshape(-1).tolist(),
        effective_dimension=[effective_dimension],
        effective_dimension_se=None if effective_dimension_se is None else [effective_dimension_se],
        mode_norm=None if mode_norm is None else [mode_norm],
        loss=network_loss if loss is None else loss,
        network_loss=network_loss,
        mode_residual=mode_residual,
        passes=passes,
        seconds=time.perf_counter() - started,
    )
    if tuning.callback is not None:
        tuning.callback(step)
    at_bounds = AtBounds.of(prior, likelihood, tuning.precision_bounds, tuning.noise_bounds)
    tuned = Tuned(
        history=[step],
        converged=converged and not (at_bounds.names or problems),
        at_bounds=at_bounds.names,
        problems=[*at_bounds.problems, *problems],
        noise_before=task.model.likelihood.noise_precisions(),
        **kept,
    )
    return replace(task, model=model, prior=prior), tuned


@dataclass(frozen=True)
class Choice:
    """A method for a problem, and why.

    Attributes:
        method: one that can fit.
        asked: the one that was asked for, `Auto` or the same.
        reason: in words.
        cost: of products, if it was measured.
        shortfall: what the budget does not pay for.
        limit: what the budget makes smaller than the settings of the method say.
    """

    method: "Method"
    asked: "Method"
    reason: str = "as asked for"
    cost: Cost | None = None
    shortfall: str = ""
    limit: str = ""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a posterior is found: settings, and what follows from them for a problem.

    To write one, subclass this in a file of its own, give `name`, `stacks`, `tune` and `fit`, and add a line to the
    table in `laplace_sampling/methods/__init__.py`. `SolverMethod` has `tune` and `fit` for a solver of linear systems.

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
        """What a fit with its hyperparameters takes, to a factor of two or so."""
        return Estimate(0.0, self.needs(problem) * problem.memory_of(self.max_memory).vector)

    def rungs(self, problem: Problem, cost: Cost) -> list[Rung]:
        """The methods that it chooses between, from the best posterior down; none if it fits itself."""
        return []

    def within(self, problem: Problem, cost: Cost) -> "Method":
        """Returns the method with settings that the budget pays for."""
        return self

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        """The choice, or another one if the budget pays for no posterior by this method."""
        return choice

    def is_held(self, problem: Problem, cost: Cost) -> bool:
        """Whether memory holds a posterior that is better than the next one of the ladder."""
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
        """A task on this form of the linear model, with a given prior or that of the problem."""
        memory = problem.memory_of(self.max_memory)
        return Task(
            method=self,
            model=model,
            prior=self.build_prior(problem, model, memory) if prior is None else prior,
            memory=memory,
            reason=choice.reason + self.remark(problem, memory),
            num_samples=problem.num_samples,
            seed=problem.seed,
            dtype=problem.dtype,
            progress=problem.progress,
            trained_weights=problem.tangent.network.weights,
            budget=problem.budget,
            shortfall=choice.shortfall,
            limit=choice.limit,
            precise=problem.tangent.in_float64,
            selection=problem.selection,
            replaceable=type(choice.asked) is not type(choice.method),
        )

    def remark(self, problem: Problem, memory: Memory) -> str:
        """What else is to be said of the choice."""
        return ""

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        """The prior, whose scale, if it has one, is that of the curvature."""
        ggn = self.ggn_of_prior(problem, model, memory)
        probes = Draws(getattr(problem.prior, "num_probes", 1), problem.seed, Stream.PRIOR_SCALE)
        return problem.prior.build(ggn, problem.layers(), probes.noise(model.features.num_outputs))

    def ggn_of_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GGN:
        """`M` of which a g-prior takes the diagonal."""
        ggn = model.ggn(model.network_outputs)
        # A diagonal takes rows of the Jacobian: no more of them than memory holds.
        most = memory.vectors / (4 * model.features.num_outputs)
        return replace(ggn, features=model.features.in_chunks(int(min(most, model.features.num_data))))

    def tune(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        """The task with hyperparameters that the rule of `tuning` chooses, and how they were found."""
        if task.selection is not None and has_path(task):
            return tuned_by_selection(task, tuning, task.selection, self.covariance_path(task))
        if task.selection is not None and tuning.criterion != "auto":
            noise = task.model.likelihood.noise_precisions()
            raise ValueError(
                f"`criterion={tuning.criterion!r}` looks for one prior precision, and one noise precision at most, but "
                f"there are {len(task.prior.names)} and {0 if noise is None else noise.numel()}: use "
                '`criterion="evidence"`.'
            )
        return self.tune_by_evidence(task, tuning)

    @abstractmethod
    def covariance_path(self, task: Task) -> CovariancePath:
        """The posterior for every prior precision, with the curvature at the network's outputs."""

    @abstractmethod
    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        """The task with hyperparameters of largest evidence, and how they were found."""

    @abstractmethod
    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        """Mode and samples at the hyperparameters of a task.

        Args:
            task: with its hyperparameters.
            tuned: from `tune`, or `Tuned()` if the hyperparameters were given.
            tolerance: relative error of predicted standard deviations.
        """

    def restore(self, problem: Problem, prior: GaussianPrior, tensors: dict[str, Tensor]) -> Fit:
        """The fit of a saved posterior whose `Fit.saves_data` is true, from its prior and its `Fit.tensors`."""
        raise NotImplementedError(f'A posterior by method="{self.name}" is saved without its data.')
