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

**What is claimed.** The standard deviations `σ̂` of the training outputs, `σ̂ᵢ² = Σ_k (φᵢζ̂_k)²/K`, differ from those of
the exact samples of the same draws by `τ` of them: as root mean squares over the training outputs, weighted by `B`, and
up to the chance of `K` samples. `ε` is a bound for each sample (`solvers.solver.function_error`), whatever chance does:
with it alone, the difference is at most `ε`. A single output, and one far from the data, can differ by more. Krylov
solvers, for which accuracy is cheap, take `ε = 2τ`; `SGD` takes the largest `ε` with `ε²/2 + ε/√K ≤ τ`
(`largest_error`); `SVRG` takes `ε² = 2τ/3` of an estimate.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.em import EMResult, fit_em
from laplace_sampling.evidence.fixed_point import PathResult, fit_path
from laplace_sampling.evidence.krylov_curves import evidence_path, traces_at_network
from laplace_sampling.linear_model.bounds import AtBounds
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.mode_objective import Mode, linear_model_mode
from laplace_sampling.linear_model.sampling import PosteriorSamples, draw
from laplace_sampling.methods import as_method
from laplace_sampling.methods.budget import Estimate
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Choice, Method, Tuning
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.methods.verification import disagreements
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.solvers.solver import Minimum, Solver

_ALL = 2**31  # more samples than anybody asks for
# Vectors that EM holds of each sample that is not being solved for at the moment: its warm start, and room to move.
_EM_STACKS = 2
# Vectors held for each of a Krylov basis (itself, its product, and room to move), and for each row of a solve: see
# `Krylov.stacks`.
BASIS_STACKS, _KRYLOV_STACKS = 3, 16
# Probes for the evidence at one precision, and for a path: far below the fitted one determinants are known less well.
# On 300 digits the evidence is off by 0.03 % with 16 probes, by 0.3 % with 8 and by 0.07 % with 32; a path of two
# decades by 0.02 % with 48, by 0.1 % with 24 and by 0.05 % with 96, at costs in proportion. The accuracy at half and at
# twice gives the same figures: a basis of 300 digits is complete before it counts.
_EVIDENCE_PROBES, _PATH_PROBES, _EVIDENCE_ACCURACY = 16, 48, 2e-3
# Products of each sample that a solve of many together takes, and the fewest with which it is worth having; passes of a
# search for the largest evidence. Typical of the problems of `auto`; half and twice move where `auto` leaves solves.
_PRODUCTS, _LEAST_PRODUCTS, _TUNING_PASSES = 5, 2, 80


def basis_that_fits(memory: Memory, num_samples: int) -> int:
    """Vectors of a Krylov basis that memory holds beside the stacks of a solve of all samples; 4 at least."""
    beside = (_KRYLOV_STACKS + 1) * num_samples
    return max(4, int((memory.vectors - beside) / BASIS_STACKS))


def largest_error(tolerance: float, num_samples: int) -> float:
    """The largest `ε` with `ε²/2 + ε/√K ≤ τ`, a half at most."""
    root = num_samples**-0.5
    return min(0.5, math.sqrt(root**2 + 2 * tolerance) - root)


@dataclass(frozen=True, kw_only=True)
class SolverMethod(Method):
    """A method whose samples and mode a solver finds; EM on samples finds its hyperparameters."""

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
            return _ALL
        room = memory.vectors - held - self.preconditioner_vectors(memory, num_samples)
        return max(1, int(room / self.stacks))

    def em_samples(self, memory: Memory, wanted: int, num_samples: int) -> int:
        """Samples of EM that memory holds, at most the wanted number."""
        room = memory.vectors - self.making_vectors(memory, num_samples) - self.stacks
        return max(1, min(wanted, int(room / _EM_STACKS)))

    def making_vectors(self, memory: Memory, num_samples: int) -> int:
        """Vectors that making the preconditioner takes."""
        return self.preconditioner_vectors(memory, num_samples)

    def em_rows(self, solver: Solver, memory: Memory, num_samples: int, in_em: int) -> int:
        """The samples of EM to solve for together: as many as memory holds beside what EM keeps of each."""
        return min(in_em, self.rows(memory, num_samples, _EM_STACKS * in_em))

    def covariance_path(self, task: Task) -> CovariancePath:
        """That of a random part of the data within memory, which is close enough to choose a precision by."""
        return as_method("subset").covariance_path(task)

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        # `u = Φᵀ L z` of each sample is a VJP; the evidence takes as much at the least number of products as at most.
        num_data, num_samples = problem.features.num_data, problem.num_samples
        passes, tuning = num_data * cost.passes, _TUNING_PASSES if problem.by_evidence else 0

        def operations(products: int) -> float:
            solves = num_samples * num_data * cost.vjp + (num_samples * products + tuning) * passes
            return solves + problem.of_rule(cost)

        memory = problem.memory_of(self.max_memory)
        least = operations(_LEAST_PRODUCTS)
        return Estimate(operations(_PRODUCTS), self.needs(problem) * memory.vector, least=least)

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        """The choice, or Kronecker factors if samples by solves would be hardly more than those of the prior."""
        if problem.cost is None or (least := self.predicted(problem, problem.cost).least) is None:
            return choice
        budget = problem.budget
        if budget.affords(least):
            return choice
        own = {field.name: getattr(self, field.name) for field in fields(Method)}
        shortfall = (
            f'Samples by method="{self.name}" take {least / budget.epoch:.3g} training epochs at least, more than the '
            f"budget of {budget.epochs:g}: the posterior is that of Kronecker factors. Raise `budget`."
        )
        reason = f'the budget does not pay for method="{self.name}"'
        return replace(choice, method=replace(as_method("kfac"), **own), reason=reason, shortfall=shortfall)

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        return self.tune_by_em(task, tuning, self.make_solver(task, tuning.tolerance, None))

    def tune_by_em(self, task: Task, tuning: Tuning, solver: Solver) -> tuple[Task, Tuned]:
        """Hyperparameters by EM on samples, starting at those of the task."""
        # EM needs the moments of its samples only: fewer of them make `γ` less accurate, but never wrong.
        held = self.em_samples(task.memory, tuning.num_samples, task.num_samples)
        if held < tuning.num_samples:
            task = replace(task, reason=f"{task.reason}, and {held} samples in EM")
        result = fit_em(
            task.model,
            task.prior,
            Draws(held, task.seed, Stream.EM),
            solver.within(task.budget.for_tuning),
            rows=self.em_rows(solver, task.memory, task.num_samples, held),
            mode=None if task.start is None else task.start.mode_in(task.prior.scale),
            max_steps=tuning.max_steps,
            **_search_settings(task, tuning),
        )
        return tuned_by(result, task, tuning, solver)

    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        # The search for hyperparameters has made the solver, with a preconditioner that serves every `α`.
        solver = tuned.work
        if not isinstance(solver, Solver):
            solver = self.make_solver(task, tolerance, float(task.prior.precision.mean()))
        solver = solver.within(task.budget.affords_passes)
        features = task.model.features
        task = replace(task, prior=task.prior.to(features.device, features.dtype))
        fit = self.fit_of(task, replace(tuned, work=None), solver)
        if fit.needs_mode:
            fit.known_mode.append(fit.find_mode())
        return _verified(fit.ready(f"{task.num_samples} samples" if task.progress else None))

    def mode(self, task: Task, solver: Solver, tuned: Tuned) -> Minimum:
        """The mode of the linear model, in scaled coordinates."""
        start = None if tuned.mode is None else (tuned.mode / task.prior.scale)[None]
        if start is None and task.start is not None:
            start = task.start.mode_in(task.prior.scale)
        return linear_model_mode(task.model, task.prior, solver, start, description="mode" if task.progress else None)

    def network_traces(self, fit: Fit, decades: float) -> EvidencePath:
        draws, max_basis = _probes(fit.task, _PATH_PROBES)
        return traces_at_network(fit.model, fit.prior, draws, _EVIDENCE_ACCURACY, decades, max_basis)

    def fit_of(self, *parts: Any) -> "SolverFit":
        """What the fit is kept as."""
        return SolverFit(*parts)


def _probes(task: Task, wanted: int) -> tuple[Draws, int]:
    max_basis = basis_that_fits(task.memory, task.num_samples)
    return Draws(max(1, min(wanted, max_basis // 4)), task.seed, Stream.EVIDENCE), max_basis


def _verified(fit: Fit) -> Fit:
    """The fit, as not converged where its own samples and mode contradict its hyperparameters."""
    found = disagreements(fit)
    if not found:
        return fit
    return replace(fit, tuned=replace(fit.tuned, converged=False, problems=[*fit.tuned.problems, *found]))


def follow_path(task: Task, tuning: Tuning, **options: Any) -> PathResult:
    """Hyperparameters at the fixed point of evidence curves; `options` are those of `fit_path`."""
    return fit_path(
        task.model,
        task.prior,
        task.seed,
        Stream.EVIDENCE,
        mode=None if task.start is None else task.start.mode_in(task.prior.scale),
        max_rounds=tuning.max_steps,
        **_search_settings(task, tuning),
        **options,
    )


def _search_settings(task: Task, tuning: Tuning) -> dict[str, Any]:
    """Arguments that `fit_em` and `fit_path` have in common.

    Where the prior decides, predicted standard deviations go with `α^{-1/2}`: `log α` is needed to twice their error.
    """
    return {
        "tolerance": 2 * tuning.tolerance,
        "precision_bounds": tuning.precision_bounds,
        "noise_bounds": tuning.noise_bounds,
        "afford": task.budget.for_tuning,
        "progress": task.progress,
        "callback": tuning.callback,
    }


def tuned_by(result: EMResult | PathResult, task: Task, tuning: Tuning, solver: Solver) -> tuple[Task, Tuned]:
    """The task with the hyperparameters of a result, and how they were found.

    Args:
        result: an `EMResult` or a `PathResult`.
        task: before.
        tuning: what was asked.
        solver: with its preconditioner, for the fit.
    """
    problems = []
    if getattr(result, "rounded", False):
        problems.append(
            f"`fit_hyperparameters` ended at the prior precision {float(result.prior.precision[0]):.3g}: products in "
            f"{task.model.features.dtype} are not accurate enough for the smaller one that the evidence asks for. "
            + ("Bring" if task.model.features.dtype == torch.float64 else "Give a model in float64, bring")
            + ' inputs and targets to a common scale, or use method="exact".'
        )
    elif not result.converged:
        problems.append(
            f"`fit_hyperparameters` stopped after {len(result.history)} steps, before its tolerance: "
            f"prior precision went {[f'{s.prior_precision[0]:.3g}' for s in result.history]}. "
            + (task.budget.advice or "Raise `max_steps`, or `tolerance`.")
        )
    at_bounds = AtBounds.of(result.prior, result.likelihood, tuning.precision_bounds, tuning.noise_bounds)
    tuned = Tuned(
        history=result.history,
        converged=result.converged and not at_bounds.names,
        at_bounds=at_bounds.names,
        problems=problems + at_bounds.problems,
        path=getattr(result, "path", None) if result.converged else None,
        mode=result.mode,
        work=solver,
        criterion="evidence",
    )
    return replace(task, model=task.model.with_likelihood(result.likelihood), prior=result.prior), tuned


@dataclass(frozen=True)
class SolverFit(Fit):
    """A fit whose samples are solved for, by `solver`."""

    solver: Solver

    def find_mode(self) -> Mode:
        minimum = self.solver_method.mode(self.task, self.solver, self.tuned)
        weights = (minimum.value * self.prior.scale)[0]
        outputs = self.model.outputs(weights[None].to(self.model.features.dtype))[0]
        return Mode(weights, outputs, replace(minimum, value=minimum.value[:0].clone()))

    @property
    def solver_method(self) -> SolverMethod:
        assert isinstance(self.method, SolverMethod)
        return self.method

    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        return draw(
            self.ggn,
            self.prior,
            draws,
            self.solver,
            rows=self.solver_method.rows(self.task.memory, self.task.num_samples),
            dtype=self.task.dtype,
            init=self.warm_start,
            description=description,
            # What was asked for by `sample` is drawn in full, or not at all.
            keep=draws == self.task.draws,
        )

    def warm_start(self, draws: Draws) -> Tensor | None:
        """`δ` of the samples that are there already for some draws."""
        return None if self.task.start is None else self.task.start.delta(draws, self.prior)

    def judge(self, sampled: PosteriorSamples) -> tuple[Tensor, float]:
        return self.solver_method.judge(sampled, self.solver)

    @property
    def scaled_mode(self) -> Tensor:
        """`θ̄/s`, `[1, P]`."""
        return (self.mode.weights.to(self.model.features.dtype) / self.prior.scale)[None]

    @property
    def mode_problems(self) -> list[str]:
        """What is inaccurate because the mode is."""
        minimum = self.mode.minimum
        return [] if minimum.converged else [f"the mode, whose residual is {minimum.residual:.2g}, has not converged"]

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        draws, max_basis = _probes(self.task, _EVIDENCE_PROBES if decades is None else _PATH_PROBES)
        path, _ = evidence_path(
            self.model,
            self.prior,
            draws,
            self.scaled_mode,
            accuracy=_EVIDENCE_ACCURACY,
            decades=0.0 if decades is None else decades,
            max_basis=max_basis,
        )
        # Memory may have ended the run: then its own estimate of what is missing says how much.
        ends = self.alpha * torch.logspace(-(decades or 0.0), decades or 0.0, 3, dtype=torch.float64)
        change = max(path.remaining_of_evidence(ends))
        problems = list(self.mode_problems)
        if not change < _EVIDENCE_ACCURACY:
            problems.append(
                f"memory was full before it was accurate: more iterations may change it by {100 * change:.2g} %; "
                "give more `max_memory`"
            )
        return path, problems
