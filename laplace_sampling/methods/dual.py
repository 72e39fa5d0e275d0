"""`Dual`: conjugate gradients in observation space, for regressions."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import ModeCurve, Traces
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import overall_precision
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.fit import Task, Tuned
from laplace_sampling.methods.method import Choice, Tuning, has_path
from laplace_sampling.methods.problem import Problem, fits_in_observation_space
from laplace_sampling.methods.solver_method import SolverFit, SolverMethod
from laplace_sampling.solvers.checks import check_positive, check_whole
from laplace_sampling.solvers.solver import Minimum

if TYPE_CHECKING:
    from laplace_sampling.gp.dual import DualCG

# Observations up to which the whole Gram matrix is decomposed for the hyperparameters. It takes C/2 + N·C/4 products at
# most, at 2,000 observations no more than the preconditioner (820) and five steps of EM (470) do, and 3 s of one core.
_GRAM_ROWS = 2000
# Rank of the preconditioner, whose vectors have `N·C` numbers, and the share of memory that it takes at most. For a
# regression of 900 data 127 passes at 400 and at 800, which the decay of the kernel makes equal, and 202 at 200.
_RANK, _SHARE = 400, 0.25


@dataclass(frozen=True, kw_only=True)
class Dual(SolverMethod):
    """Conjugate gradients on vectors of `N·C` numbers, for regressions with more weights than memory holds bases of.

    Args:
        rank: of the preconditioner; 0 for none. By default 400, or what a quarter of the memory holds.
        max_iterations: of conjugate gradients, in each solve.
        accuracy: of the error of the function; by default what the `tolerance` of a fit needs.
    """

    rank: int | None = None
    max_iterations: int = 1000
    accuracy: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("`Dual(rank=...)`", 0 if self.rank is None else self.rank, 0)
        check_whole("`Dual(max_iterations=...)`", self.max_iterations, 1)
        if self.accuracy is not None:
            check_positive("`Dual(accuracy=...)`", self.accuracy)

    @property
    def name(self) -> str:
        return "dual"

    @property
    def stacks(self) -> int:
        return 24

    @property
    def advice(self) -> str:
        return "Give `Dual(rank=..., max_iterations=...)` more of either; float64 weights help, too."

    @property
    def residual_kind(self) -> str:
        return "relative error of the function"

    def take(self, problem: Problem, choice: Choice) -> Task:
        # Vectors have an entry for each observation.
        return self.task(problem, choice, problem.tangent.with_offset())

    def check_likelihood(self, likelihood: Likelihood) -> None:
        if not likelihood.quadratic:
            raise ValueError(
                f'method="dual" is for regression with a Gaussian likelihood, but the likelihood is '
                f'{likelihood.name!r}; use method="exact", "krylov" or "stochastic".'
            )

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> "DualCG":
        # Imported here, so that this file stays light; the room `gp` is needed for a fit only.
        from laplace_sampling.gp.dual import DualCG, WhitenedGram

        rows, ggn = task.model.num_observations, task.scaled_ggn()
        held = max(1, min(_RANK, rows, int(_SHARE * task.memory.bytes / (8 * rows))))
        solver = DualCG(
            tolerance=min(2 * tolerance, 0.5) if self.accuracy is None else self.accuracy,
            rank=held if self.rank is None else self.rank,
            max_iterations=self.max_iterations,
            seed=task.seed,
        )
        return solver.hold(WhitenedGram(ggn, torch.full((ggn.size,), 1 / (shift or 1.0), device=ggn.device)))

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        """By the evidence itself where the Gram matrix is small; else by EM, from the optimum of its leading part."""
        if _has_small_gram(task):
            return _tune_by_gram_matrix(task, tuning)
        solver = self.make_solver(task, tuning.tolerance, None)
        if solver.held is not None and has_path(task) and task.start is None:
            task = _at_evidence_of_leading_part(task, tuning, solver.held)
        return self.tune_by_em(task, tuning, solver)

    def mode(self, task: Task, solver: Any, tuned: Tuned) -> Minimum:
        return solver.mode(task.model, task.prior)

    def judge(self, sampled: PosteriorSamples, solver: Any) -> tuple[Tensor, float]:
        return sampled.error, solver.tolerance

    def fit_of(self, *parts: Any) -> "DualFit":
        return DualFit(*parts)


def _has_small_gram(task: Task) -> bool:
    """Whether the Gram matrix gives the hyperparameters: for one prior precision, and cheaper than EM."""
    features = task.model.features
    rows = features.num_data * features.num_outputs
    return rows <= _GRAM_ROWS and len(task.prior.names) == 1 and fits_in_observation_space(features, task.memory)


def _precise(model: LinearModel) -> LinearModel:
    """With features in float64 where the network allows."""
    return replace(model, features=model.features.in_float64())


def _tune_by_gram_matrix(task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
    """The hyperparameters of the exact method; its matrices are freed."""
    from laplace_sampling.methods.observation_space import tuned_by_gram_matrix

    prior = task.prior.to(task.model.features.device, torch.float64)
    precise, tuned = tuned_by_gram_matrix(replace(task, model=_precise(task.model), prior=prior), tuning)
    task = replace(task, model=task.model.with_likelihood(precise.model.likelihood), prior=precise.prior)
    return task, replace(tuned, work=None)


def _at_evidence_of_leading_part(task: Task, tuning: Tuning, held: Any) -> Task:
    """The task with the `α` and `b` that the kernel's leading part has, for EM to start from.

    What the preconditioner leaves out counts as noise, in as many directions as there are. Where that has no maximum
    inside the bounds, EM would stay at the bound: the task is returned as it is.
    """
    from laplace_sampling.gp.evidence import HyperparameterBounds, RegressionEvidence

    model = task.model
    assert isinstance(model.likelihood, Gaussian)
    residual, squared_norm = model.residuals(model.offset).flatten(), float(model.squared_errors(model.offset).sum())
    values = held.eigenvalues / float(torch.as_tensor(model.likelihood.noise_precision))
    spectrum = RegressionEvidence.of_leading(values, held.vectors @ residual, squared_norm, model.num_observations)
    squares = float(model.squared_errors(model.network_outputs).sum())
    bounds = HyperparameterBounds(tuning.precision_bounds, tuning.noise_bounds)
    start = (overall_precision(task.prior), float(torch.as_tensor(model.likelihood.noise_precision)))
    optimum = spectrum.largest(start, (True, model.likelihood.learn), bounds, squares)
    if optimum.at_bounds:
        return task
    prior = task.prior.with_precision(torch.tensor([optimum.precision], dtype=torch.float64))
    likelihood = model.likelihood
    if likelihood.learn:
        likelihood = likelihood.with_precision(optimum.noise_precision)
    return replace(task, model=model.with_likelihood(likelihood), prior=prior)


class DualFit(SolverFit):
    """A fit in observation space: where the Gram matrix fits in memory, its evidence is exact."""

    @cached_property
    def _gram(self) -> Any:
        from laplace_sampling.gp.posterior import GramPosterior

        if not fits_in_observation_space(self.model.features, self.task.memory):
            return None
        return GramPosterior.of(_precise(self.model), self.prior.to(self.model.features.device, torch.float64))

    def traces(self, decades: float) -> Traces:
        if self._gram is None:
            return super().traces(decades)
        return Traces.of_eigenvalues(self._gram.precisions[1] * self._gram.eigenvalues, self.alpha)

    def mode_curve(self, alphas: Tensor) -> ModeCurve:
        return super().mode_curve(alphas) if self._gram is None else self._gram.mode_curve(alphas)
