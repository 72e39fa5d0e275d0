"""`Exact`: dense algebra in float64, in the smaller of two spaces.

In the space of the weights it holds the Jacobian and a matrix `[P, P]` (or `[N·C, N·C]`); in that of the observations
it decomposes the Gram matrix `[N·C, N·C]` of the tangent kernel and holds no Jacobian. The second is taken where
`N·C < P` and the prior has one precision, since the decomposition is for one.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.dense_curves import exact_path
from laplace_sampling.gp.exact_prediction import ExactPrediction
from laplace_sampling.gp.gram import size_of
from laplace_sampling.gp.gram_posterior import GramPosterior, gram_posterior_of
from laplace_sampling.gp.regression_evidence import HyperparameterBounds
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Choice, Tuning
from laplace_sampling.methods.problem import MOST_BYTES, Memory, Problem, exact_bytes, space_of
from laplace_sampling.methods.solver_method import (
    SolverFit,
    SolverMethod,
    follow_path,
    has_path,
    tuned_by,
    tuned_by_gram_matrix,
)
from laplace_sampling.predictions.dense_covariance import DenseCovariance
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.solver import Solver

__all__ = ["Exact"]

# Samples that go through the features together, and the residual that rounding leaves at most.
_FEW, _RESIDUAL = 16, 1e-6
# Samples whose rounding is looked at, and the part of the function that it may take, as the default tolerance of a fit.
_ROUNDED, _MOST_LOST = 4, 0.015


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
            return _in_float64(self.task(problem, choice, problem.tangent.dense()))
        # Float64, since covariances in observation space are differences of nearly equal numbers.
        task = self.task(problem, choice, problem.tangent.in_float64())
        if len(task.prior.names) > 1:
            # The decomposition is for one precision: several are tuned with the Jacobian.
            return choice.asked.prepare(replace(problem, in_observation_space=False))
        return _in_float64(task)

    def remark(self, problem: Problem, memory: Memory) -> str:
        size, rows = problem.features.size, problem.num_observations
        return f", in the space of the {space_of(problem)} (P = {size} weights, N·C = {rows} observations)"

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        if space_of(problem) == "observations":
            return super().build_prior(problem, model, memory)
        # The rows of the Jacobian are there.
        return super().build_prior(problem, model, replace(memory, bytes=float("inf")))

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        return Dense()

    def em_samples(self, memory: Memory, wanted: int, num_samples: int) -> int:
        return wanted

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def tune(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        if not _holds_jacobian(task):
            return _tune_in_observation_space(task, tuning)
        if not has_path(task):
            return super().tune(task, tuning)
        return tuned_by(follow_path(task, tuning, exact=True), task, tuning, Dense())

    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        if _holds_jacobian(task):
            return _rounded(super().fit(task, tuned, tolerance))
        posterior = tuned.work
        if posterior is None:
            posterior = gram_posterior_of(task.model.likelihood).of(task.model, task.prior, task.hessian_at)
        return _rounded(_observation_space_fit(task, replace(tuned, work=None), posterior).with_samples())

    def fit_of(self, *parts: Any) -> "WeightSpaceFit":
        return WeightSpaceFit(*parts)

    def restore(self, problem: Problem, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "ObservationSpaceFit":
        choice, model = Choice(self, self, "as saved"), problem.tangent.in_float64()
        task = _in_float64(self.task(problem, choice, model, prior))
        posterior = gram_posterior_of(task.model.likelihood).restore(task.model, task.prior, tensors)
        return _observation_space_fit(task, Tuned(), posterior)


def _rounded(fit: Fit) -> Fit:
    """The fit, with a problem if predictions from its samples are inaccurate because the network rounds."""
    assert fit.sampled is not None
    few, dtype = fit.sampled.samples[:_ROUNDED], fit.task.dtype
    signs = torch.randint(2, few.shape, generator=torch.Generator().manual_seed(fit.task.seed)).to(few) * 2 - 1
    # Roundings of the weights of a sample are independent, where the function is a sum in which they cancel.
    outputs, independent = (fit.model.features.outputs(v.to(fit.model.features.dtype)) for v in (few, few * signs))
    lost = torch.finfo(dtype).eps * float(independent.double().norm() / outputs.double().norm().clamp_min(1e-300))
    if lost <= _MOST_LOST:
        return fit
    problem = (
        f"In {dtype} the samples of the posterior are off by about {min(100 * lost, 100):.0f} % at the training data, "
        "where the function is a difference of much larger numbers; variances of predictions, which take no samples, "
        "do not have this error. Use `model.double()`."
    )
    return replace(fit, tuned=replace(fit.tuned, problems=[*fit.tuned.problems, problem]))


def _in_float64(task: Task) -> Task:
    return replace(task, prior=task.prior.to(task.model.features.device, torch.float64))


def _holds_jacobian(task: Task) -> bool:
    """Whether a task is one in the space of the weights."""
    return isinstance(task.model.features, DenseFeatures)


def _tune_in_observation_space(task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
    """Hyperparameters of largest evidence (a regression), or at MacKay's fixed point, to rounding, in one step."""
    bounds = HyperparameterBounds(tuning.precision_bounds, tuning.noise_bounds)
    kind, model = gram_posterior_of(task.model.likelihood), task.model
    optimum = kind.tuned(model, task.prior, task.hessian_at, bounds)
    return tuned_by_gram_matrix(optimum, task, tuning)


@dataclass(frozen=True)
class WeightSpaceFit(SolverFit):
    """A fit with the Jacobian in memory."""

    @cached_property
    def _factor(self) -> dict[str, Tensor]:
        return DenseCovariance.tensors(self.task.scaled_ggn(self.mode_outputs), self.prior)

    def tensors(self) -> dict[str, Tensor]:
        return self._factor

    def leave_one_out(self) -> LeaveOneOut:
        model = self.model
        covariance = DenseCovariance.of(model.features, self.prior, self._factor).blocks()
        return leave_one_out(
            model.likelihood, model.targets, self.mode_outputs.double(), self.ggn.outputs.double(), covariance
        )

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        path = exact_path(self.model, self.prior, self.scaled_mode, hessian_at=self.task.hessian_at)
        return path, self.mode_problems


def _observation_space_fit(task: Task, tuned: Tuned, posterior: GramPosterior) -> "ObservationSpaceFit":
    mode = posterior.mode()
    minimum = posterior.minimum((mode / task.prior.scale)[None])
    return ObservationSpaceFit(task, tuned, mode, posterior.mode_outputs, minimum, posterior)


@dataclass(frozen=True)
class ObservationSpaceFit(Fit):
    """A fit of which everything is known in closed form, without the Jacobian."""

    posterior: GramPosterior

    @property
    def _ratio(self) -> float:
        """How much better the data determine the function than the prior."""
        alpha, noise = self.posterior.precisions
        return noise / alpha * self.posterior.largest_eigenvalue

    @property
    def _lost(self) -> float:
        """The relative error of standard deviations by rounding."""
        # Variances are differences of that of the prior and of what the data explain.
        return torch.finfo(torch.float64).eps * self._ratio / 2

    @property
    def converged(self) -> bool:
        return super().converged and self._lost <= _MOST_LOST

    @property
    def problems(self) -> list[str]:
        if self._lost <= _MOST_LOST:
            return super().problems
        return [
            *super().problems,
            f"The data determine the function {self._ratio:.1g} times better than the prior, which is more than "
            f"float64 carries: standard deviations at the training data are off by about "
            f"{min(100 * self._lost, 100):.0f} %. Raise the prior precision, or lower that of the noise.",
        ]

    @property
    def path(self) -> EvidencePath:
        return self._curves

    @cached_property
    def _curves(self) -> EvidencePath:
        return self.posterior.curves()

    @property
    def saves_data(self) -> bool:
        return True

    def tensors(self) -> dict[str, Tensor]:
        return self.posterior.tensors()

    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        model, samples = self.model, self.posterior.sample(draws)
        curved_at = self.ggn.outputs.double()
        # Energies tell whether samples are right: `ζᵀMζ = ‖LᵀΦζ‖²`, by products with the network in few rows at a time.
        outputs = torch.cat([model.features.outputs(part.to(model.features.dtype)) for part in samples.split(_FEW)])
        roots = model.likelihood.root_transpose(curved_at, outputs.double(), model.targets)
        energies = roots.flatten(1).square().sum(1)
        of_prior = torch.stack([(self.prior.diagonal().double() * row**2).sum() for row in samples])
        zeros = torch.zeros(len(samples), dtype=torch.float64, device=samples.device)
        return PosteriorSamples(
            samples.to(self.task.dtype),
            zeros.new_tensor([[self.posterior.effective_dimension]]),
            energies,
            energies + of_prior,
            zeros,
            zeros,
            1.5 * len(samples),
            converged=True,
            exact=True,
        )

    def judge(self, sampled: PosteriorSamples) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        problems = []
        if not self.minimum.converged:
            problems.append(f"the mode, whose residual is {self.minimum.residual:.2g}, has not converged")
        if self._lost > _MOST_LOST:
            problems.append("the data determine the function better than float64 carries")
        return self._curves, problems

    def leave_one_out(self) -> LeaveOneOut:
        return self.posterior.leave_one_out()

    def known_leave_one_out(self) -> LeaveOneOut:
        return self.leave_one_out()

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return _GramCovariance(self.posterior, features.in_float64())


@dataclass(frozen=True)
class _GramCovariance(FunctionCovariance):
    """Made when it is asked for: an input costs `C` VJPs and a product with the eigenvectors."""

    posterior: GramPosterior
    features: Features

    @cached_property
    def _prediction(self) -> ExactPrediction:
        return self.posterior.predict(self.features)

    def variance(self) -> Float[Tensor, "N C"]:
        return self._prediction.stddev(*self.posterior.precisions) ** 2

    def blocks(self) -> Float[Tensor, "N C C"]:
        blocks = self._prediction.covariance(*self.posterior.precisions)
        # Rounding may leave a variance just below zero where the data determine the function.
        blocks.diagonal(dim1=1, dim2=2).clamp_(min=0)
        return blocks

    def joint(self) -> Float[Tensor, "NC NC"]:
        return self._prediction.joint_covariance(*self.posterior.precisions)
