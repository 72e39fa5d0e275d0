"""Fits by a solver, in weight space or by conjugate gradients in observation space: everything but the Gram matrix."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.dense_curves import exact_path
from laplace_sampling.evidence.em import EMResult, fit_em
from laplace_sampling.evidence.fixed_point import PathResult, fit_path
from laplace_sampling.evidence.krylov_curves import evidence_path
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.gp.exact_evidence import exact_curves
from laplace_sampling.gp.exact_regression import ExactRegression, overall_precisions
from laplace_sampling.gp.whitened_gram import LowRank
from laplace_sampling.likelihoods.likelihood import Gaussian, Likelihood
from laplace_sampling.linear_model.features import GGN, DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.posterior_samples import Sampled, draw
from laplace_sampling.linear_model.priors import GaussianPrior
from laplace_sampling.linear_model.sampling import Draws, linear_model_mode
from laplace_sampling.methods.fits import PATH_STREAM, Fit, Task, Tuned, Tuning, noise_at_bound, problems_at_bounds
from laplace_sampling.predictions.dense_covariance import DenseCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import BlockKrylov
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Minimum, Solver

__all__ = ["SolverFit", "fit_by_solver", "tune_by_solver"]

_EM_STREAM = 0
# Probes for the evidence at one precision, and for a path: far below the fitted one determinants are known less well.
_EVIDENCE_PROBES, _PATH_PROBES, _EVIDENCE_ACCURACY = 16, 48, 2e-3


def make_solver(task: Task, tolerance: float, shift: float | None) -> Solver:
    """The solver of a task, with its preconditioner.

    Args:
        task: what is to be solved.
        tolerance: relative error of predicted standard deviations.
        shift: the prior precision, if it is known.
    """
    model, prior, plan = task.model, task.prior, task.plan

    def operator() -> GGN:
        at = model.network_outputs if task.hessian_at == "network" else torch.zeros_like(model.network_outputs)
        ggn = model.ggn(at)
        return replace(ggn, features=ScaledFeatures(ggn.features, prior.scale.to(ggn.device, ggn.dtype)))

    solver = plan.solver(tolerance, task.given, task.seed)
    return plan.precondition(solver, operator, shift, task.num_samples, task.seed)


def tune_by_solver(task: Task, tuning: Tuning, solver: Solver) -> tuple[Task, Tuned]:
    """Hyperparameters from evidence paths, or by EM on samples; the task with them, and how they were found."""
    if isinstance(solver, DualCG) and solver.held is not None and _has_path(task.model.likelihood, task.prior):
        task = _from_low_rank(task, tuning, solver.held)
    model, prior, plan = task.model, task.prior, task.plan
    settings = {
        "hessian_at": task.hessian_at,
        "tolerance": 2 * tuning.tolerance,
        "precision_bounds": tuning.precision_bounds,
        "noise_bounds": tuning.noise_bounds,
        "progress": task.progress,
        "callback": tuning.callback,
    }
    path: PathResult | None = None
    if isinstance(solver, BlockKrylov | Dense) and _has_path(model.likelihood, prior):
        path = fit_path(
            model,
            prior,
            task.seed,
            PATH_STREAM,
            max_rounds=tuning.max_steps,
            max_basis=solver.max_basis if isinstance(solver, BlockKrylov) else None,
            exact=isinstance(solver, Dense),
            **settings,
        )
        if path.full:
            # The basis was full before the curves were accurate: EM goes on from what they gave.
            model, prior, path = model.with_likelihood(path.likelihood), path.prior, None
    result: EMResult | PathResult
    if path is not None:
        result = path
    else:
        held = plan.em_samples(tuning.num_samples)
        if held < tuning.num_samples:
            plan = replace(plan, reason=f"{plan.reason}, and {held} samples in EM")
        draws = Draws(held, task.seed, _EM_STREAM)
        result = fit_em(model, prior, draws, plan.for_em(solver, held), max_steps=tuning.max_steps, **settings)
    problems = []
    if not result.converged:
        problems.append(
            f"`fit_hyperparameters` stopped after {len(result.history)} steps, before its tolerance: "
            f"prior precision went {[f'{s.prior_precision[0]:.3g}' for s in result.history]}. "
            "Raise `max_steps`, or `tolerance`."
        )
    precisions = zip(result.prior.names, result.prior.precision.tolist(), strict=True)
    groups = [name for name, alpha in precisions if alpha in tuning.precision_bounds]
    noise = noise_at_bound(result.likelihood, tuning.noise_bounds)
    tuned = Tuned(
        history=result.history,
        converged=result.converged,
        at_bounds=(*groups, *(["noise"] if noise else [])),
        problems=problems + problems_at_bounds(groups, noise, tuning),
        path=path.path if path is not None and path.converged else None,
        mode=result.mode,
    )
    return replace(task, model=model.with_likelihood(result.likelihood), prior=result.prior, plan=plan), tuned


def _from_low_rank(task: Task, tuning: Tuning, held: LowRank) -> Task:
    """The task with the `α` and `b` of largest evidence of the kernel's leading part, for EM to start from.

    What the preconditioner leaves out counts as noise, in as many directions as there are.
    """
    model = task.model
    assert isinstance(model.likelihood, Gaussian)
    residual = (model.targets.reshape(model.offset.shape) - model.offset).double().flatten()
    inside = held.vectors.mT @ residual
    left = len(residual) - len(inside)
    rest = (residual.square().sum() - inside.square().sum()).clamp_min(0)
    values = held.eigenvalues / float(torch.as_tensor(model.likelihood.noise_precision))
    spectrum = ExactRegression(
        model,
        task.prior,
        torch.cat([values.new_zeros(left), values]),
        held.vectors,
        torch.cat([(rest / max(left, 1)).sqrt().expand(left), inside]),
        torch.ones_like(model.offset, dtype=torch.float64),
    )
    optimum = spectrum.fit(precision_bounds=tuning.precision_bounds, noise_bounds=tuning.noise_bounds)
    prior = task.prior.with_precision(torch.tensor([optimum.precision], dtype=torch.float64))
    likelihood = model.likelihood
    if likelihood.learn:
        likelihood = likelihood.with_precision(optimum.noise_precision)
    return replace(task, model=model.with_likelihood(likelihood), prior=prior)


def fit_by_solver(task: Task, tuned: Tuned, solver: Solver, kind: "type[SolverFit] | None" = None) -> "SolverFit":
    """Mode and samples at the hyperparameters of a task; `kind` is of the fit, by default `SolverFit`."""
    model = task.model
    prior = task.prior.to(model.features.device, model.features.dtype)
    if isinstance(solver, SGD):  # these samples are kept, and have no warm start
        solver = replace(solver, epochs=2 * solver.epochs)
    if isinstance(solver, DualCG):
        minimum: Minimum = solver.mode(model, prior)
    else:
        start = None if tuned.mode is None else (tuned.mode / prior.scale)[None]
        minimum = linear_model_mode(model, prior, solver, start, description="mode" if task.progress else None)
    mode = (minimum.value * prior.scale)[0]
    outputs = model.outputs(mode[None].to(model.features.dtype))[0]
    fit = (kind or SolverFit)(replace(task, prior=prior), tuned, mode, outputs, None, minimum, solver)
    return replace(fit, sampled=fit.draw(task.draws, f"{task.num_samples} samples" if task.progress else None))


@dataclass(frozen=True)
class SolverFit(Fit):
    """A fit whose samples are solved for, by `solver`."""

    solver: Solver

    @property
    def ggn(self) -> GGN:
        """`M`."""
        at_mode = self.task.hessian_at == "mode"
        return self.model.ggn(self.mode_outputs if at_mode else self.model.network_outputs)

    def draw(self, draws: Draws, description: str | None = None) -> Sampled:
        return draw(
            self.ggn,
            self.prior,
            draws,
            None if self.plan.method == "ciq" else self.solver,
            rows=self.plan.rows(self.task.num_samples),
            dtype=self.task.dtype,
            description=description,
        )

    def judge(self, sampled: Sampled) -> tuple[Tensor, float]:
        return self.plan.judge(sampled, self.solver)

    @cached_property
    def _factor(self) -> dict[str, Tensor]:
        scaled = replace(self.ggn, features=ScaledFeatures(self.model.features, self.prior.scale))
        return DenseCovariance.tensors(scaled, self.prior)

    def tensors(self) -> dict[str, Tensor]:
        return self._factor if self.plan.holds_jacobian else {}

    def leave_one_out(self) -> LeaveOneOut:
        if not self.plan.holds_jacobian:
            return super().leave_one_out()
        model = self.model
        covariance = DenseCovariance.of(model.features, self.prior, self._factor).blocks()
        return leave_one_out(
            model.likelihood, model.targets, self.mode_outputs.double(), self.ggn.outputs.double(), covariance
        )

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        problems = []
        if not self.minimum.converged:
            problems.append(f"the mode, whose residual is {self.minimum.residual:.2g}, has not converged")
        prior, model = self.prior, self.model
        mode = (self.mode.to(model.features.dtype) / prior.scale)[None]
        if isinstance(model.features, DenseFeatures):
            return exact_path(model, prior, mode, hessian_at=self.task.hessian_at), problems
        if isinstance(self.solver, DualCG) and self.plan.holds_gram(model.features):
            exact = ExactRegression.of(model, prior.to(model.features.device, torch.float64), max_memory=math.inf)
            return exact_curves(exact, *overall_precisions(model, prior)), problems
        max_basis = self.plan.max_basis
        wished = _EVIDENCE_PROBES if decades is None else _PATH_PROBES
        path, _ = evidence_path(
            model,
            prior,
            Draws(max(1, min(wished, max_basis // 4)), self.task.seed, PATH_STREAM),
            mode,
            hessian_at=self.task.hessian_at,
            accuracy=_EVIDENCE_ACCURACY,
            decades=0.0 if decades is None else decades,
            max_basis=max_basis,
        )
        ends = self.alpha * torch.logspace(-(decades or 0.0), decades or 0.0, 3, dtype=torch.float64)
        change = max(path.remaining_of_evidence(ends))
        if not change < _EVIDENCE_ACCURACY:
            problems.append(
                f"memory was full before it was accurate: more iterations may change it by {100 * change:.2g} %; "
                "give more `max_memory`"
            )
        return path, problems


def _has_path(likelihood: Likelihood, prior: GaussianPrior) -> bool:
    """Whether the hyperparameters are those of one curve: a prior precision, and at most one noise precision."""
    one_noise = not isinstance(likelihood, Gaussian) or torch.as_tensor(likelihood.noise_precision).dim() == 0
    return len(prior.names) == 1 and one_noise
