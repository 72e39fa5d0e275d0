"""`Exact`: dense algebra in float64, in the smaller of two spaces.

In the space of the weights it accumulates `M`, `[P, P]`, in one pass over the rows of the Jacobian, which are held
only where they are few; or it holds the Jacobian and a matrix `[N·C, N·C]`. In that of the observations it decomposes
the Gram matrix `[N·C, N·C]` of the tangent kernel. The second is taken where `N·C < P` and the prior has one precision,
since the decomposition is for one.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import Traces
from laplace_sampling.gp.gram import size_of
from laplace_sampling.gp.posterior import GramPath, GramPosterior
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.budget import Estimate
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Choice, Tuning, has_path
from laplace_sampling.methods.observation_space import (
    MOST_LOST,
    ObservationSpaceFit,
    observation_space_fit,
    tuned_by_gram_matrix,
)
from laplace_sampling.methods.problem import (
    MOST_BYTES,
    Memory,
    Problem,
    dense_operations,
    exact_bytes,
    exact_products,
    holds_rows,
    space_of,
)
from laplace_sampling.methods.solver_method import (
    SolverFit,
    SolverMethod,
    tuned_by_spectrum,
)
from laplace_sampling.predictions.covariance_path import CovariancePath, FactoredPath
from laplace_sampling.predictions.function_covariance import DenseCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.lapack import sum_of_squares, symmetric_eigen
from laplace_sampling.solvers.solver import Minimum, Solver

# The residual that rounding leaves at most.
_RESIDUAL = 1e-6
# Samples whose rounding is looked at.
_ROUNDED = 4
# Of a mode that conjugate gradients find, as by dense algebra.
_MODE_TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Exact(SolverMethod):
    """Dense algebra in float64, for small problems: nothing is sampled but the samples."""

    @property
    def name(self) -> str:
        return "exact"

    def check(self, problem: Problem) -> None:
        memory, features = problem.memory_of(self.max_memory), problem.features
        needed = exact_bytes(space_of(problem), problem.num_observations, features.size)
        # By default the exact method may take all that is free, as nothing else is held.
        allowed = memory.bytes if memory.given else min(MOST_BYTES, 2 * memory.bytes)
        if needed <= allowed:
            return
        quadratic = problem.tangent.model.likelihood.quadratic
        others = '"dual" (conjugate gradients in observation space), "krylov"' if quadratic else '"krylov"'
        raise ValueError(
            f'method="exact" would need about {size_of(needed)} for {features.num_data} data, '
            f"{features.num_outputs} outputs and {features.size} weights, more than the {size_of(allowed)} that it may "
            f'take; give more as `max_memory=`, or use method={others} or "stochastic".'
        )

    def take(self, problem: Problem, choice: Choice) -> Task:
        if space_of(problem) == "weights":
            return _in_float64(self.task(problem, choice, problem.tangent.dense()), "weights")
        task = self.task(problem, choice, self._in_observation_space(problem))
        if len(task.prior.names) > 1:
            # The decomposition is for one precision: several are tuned in the space of the weights.
            return choice.asked.prepare(replace(problem, in_observation_space=False))
        return _in_float64(task, "observations")

    def _in_observation_space(self, problem: Problem) -> LinearModel:
        """The linear model in float64, with its rows in memory where they fit.

        Covariances in observation space are differences of nearly equal numbers, so that rows that are computed again
        must hardly differ, as they do in float64.
        """
        model = problem.tangent.in_float64()
        if not holds_rows(problem.features, problem.memory_of(self.max_memory)):
            return model
        return replace(model, features=DenseFeatures.of(model.features))

    def remark(self, problem: Problem, memory: Memory) -> str:
        size, rows = problem.features.size, problem.num_observations
        return f", in the space of the {space_of(problem)} (P = {size} weights, N·C = {rows} observations)"

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        if space_of(problem) == "observations":
            return super().build_prior(problem, model, memory)
        # The rows of the Jacobian are there.
        return super().build_prior(problem, model, replace(memory, bytes=float("inf")))

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        space, features, rows = space_of(problem), problem.features, problem.num_observations
        products = exact_products(problem, space, cost) + problem.of_rule(cost)
        if space == "observations":
            products += problem.num_samples * features.num_data * cost.passes
        dense = dense_operations(space, rows, features.size)
        return Estimate(products, exact_bytes(space, rows, features.size), dense)

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        return choice

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        return Dense()

    def mode(self, task: Task, solver: Solver, tuned: Tuned) -> Minimum:
        features = task.model.features
        if (
            task.model.held is not None
            and not isinstance(features, DenseFeatures)
            and not task.model.likelihood.quadratic
        ):
            # Each step of Newton's method would accumulate another `M`: the one at the network's outputs is close to
            # all of them, so that a few passes are enough.
            solver = CG(_MODE_TOLERANCE, preconditioner=task.scaled_ggn().dense())
        return super().mode(task, solver, tuned)

    def em_samples(self, memory: Memory, wanted: int, num_samples: int) -> int:
        return wanted

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def covariance_path(self, task: Task) -> CovariancePath:
        if _in_weight_space(task):
            ggn = task.scaled_ggn()
            return FactoredPath(ggn.dense() or ggn.dense_curvature(), task.prior)
        return GramPath(GramPosterior.of(task.model, task.prior))

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        if not _in_weight_space(task):
            return tuned_by_gram_matrix(task, tuning)
        if not has_path(task):
            return super().tune_by_evidence(task, tuning)
        ggn = task.scaled_ggn()
        curvature = ggn.dense() or ggn.dense_curvature()
        return tuned_by_spectrum(task, tuning, Dense(), curvature.spectrum, lambda v: v @ curvature.vectors)

    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        features = task.model.features
        space, rows = "weights" if _in_weight_space(task) else "observations", features.num_data * features.num_outputs
        task.budget.add(dense=dense_operations(space, rows, features.size))
        if _in_weight_space(task):
            fit = super().fit(task, tuned, tolerance)
            return _rounded(fit, _cancellation(fit))
        posterior = tuned.work
        if posterior is None:
            posterior = GramPosterior.of(task.model, task.prior)
        elif tuned.criterion != "evidence":
            posterior = posterior.at(task.model, task.prior)
        fit = observation_space_fit(task, replace(tuned, work=None), posterior)
        return _rounded(fit.ready(), fit.cancellation)

    def fit_of(self, *parts: Any) -> "WeightSpaceFit":
        return WeightSpaceFit(*parts)

    def restore(self, problem: Problem, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "ObservationSpaceFit":
        model = self._in_observation_space(problem)
        task = _in_float64(self.task(problem, Choice(self, self, "as saved"), model, prior), "observations")
        return ObservationSpaceFit(task, Tuned(), GramPosterior.restore(task.model, task.prior, tensors))


def _cancellation(fit: Fit) -> float:
    """How much larger the function is of samples whose weights have random signs than of the samples."""
    assert fit.sampled is not None
    few = fit.sampled.samples[:_ROUNDED]
    signs = torch.randint(2, few.shape, generator=torch.Generator().manual_seed(fit.task.seed)).to(few) * 2 - 1
    outputs, independent = (fit.model.features.outputs(v.to(fit.model.features.dtype)) for v in (few, few * signs))
    return float(independent.double().norm() / outputs.double().norm().clamp_min(1e-300))


def _rounded(fit: Fit, cancellation: float) -> Fit:
    """The fit, with a problem if predictions from its samples are inaccurate because the network rounds."""
    # Roundings of the weights of a sample are independent, where the function is a sum in which they cancel.
    dtype = fit.task.dtype
    lost = torch.finfo(dtype).eps * cancellation
    if lost <= MOST_LOST:
        return fit
    problem = (
        f"In {dtype} the samples of the posterior are off by about {min(100 * lost, 100):.0f} % at the training data, "
        "where the function is a difference of much larger numbers; variances of predictions, which take no samples, "
        "do not have this error. Use `model.double()`."
    )
    return replace(fit, tuned=replace(fit.tuned, problems=[*fit.tuned.problems, problem]))


def _in_float64(task: Task, space: str) -> Task:
    return replace(task, prior=task.prior.to(task.model.features.device, torch.float64), space=space)


def _in_weight_space(task: Task) -> bool:
    """Whether a task is one in the space of the weights."""
    return task.space == "weights"


@dataclass(frozen=True)
class WeightSpaceFit(SolverFit):
    """A fit with `M` or the Jacobian in memory."""

    @cached_property
    def _factor(self) -> dict[str, Tensor]:
        ggn = self.ggn
        return DenseCovariance.tensors(
            replace(ggn, features=ScaledFeatures(ggn.features, self.prior.scale)), self.prior
        )

    def tensors(self) -> dict[str, Tensor]:
        return self._factor

    def leave_one_out(self) -> LeaveOneOut:
        model = self.model
        covariance = DenseCovariance.of(model.features, self.prior, self._factor).blocks()
        mode_outputs, outputs = self.mode.outputs.double(), self.ggn.outputs.double()
        return leave_one_out(model.likelihood, model.targets, mode_outputs, outputs, covariance)

    def traces(self, decades: float) -> Traces:
        return Traces.of_eigenvalues(_eigenvalues(self.task.whitened_ggn()), self.alpha)

    @property
    def known_traces(self) -> Traces | None:
        return self.traces(0.0) if self.tuned.criterion == "evidence" else None

    @property
    def curve_solver(self) -> Solver:
        return self.solver


def _eigenvalues(ggn: GGN) -> Tensor:
    """All eigenvalues of `M` that may not be zero: of `M` where it is held, else of the smaller of `RRᵀ` and `RᵀR`."""
    if (held := ggn.dense()) is not None:
        return held.spectrum
    blocks = [block.double() for block in ggn.root_rows()]
    if sum(map(len, blocks)) >= ggn.size:
        return symmetric_eigen(sum_of_squares(blocks, ggn.size, blocks[0].device))[0]
    root = torch.cat(blocks)
    return symmetric_eigen(root @ root.T)[0]
