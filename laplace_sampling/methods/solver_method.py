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
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath, ModeCurve, Traces, modes_along
from laplace_sampling.evidence.em import EMResult, fit_em, noise_update
from laplace_sampling.evidence.lanczos import krylov_traces
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.bounds import AtBounds, clamped, mackay_root
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.linear_model import Mode, ModeObjective, linear_model_mode
from laplace_sampling.linear_model.priors.prior import overall_precision
from laplace_sampling.linear_model.sampling import PosteriorSamples, draw
from laplace_sampling.methods import as_method
from laplace_sampling.methods.budget import Estimate
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Choice, Method, Tuning, tuned_at
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.methods.verification import disagreements
from laplace_sampling.predictions.covariance_path import CovariancePath
from laplace_sampling.solvers.krylov import CG
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
# Traces are right for `α` above this multiple of the rounding of products. On naval-propulsion-plant (UCI), for a
# network of 3,451 weights in float32, `γ` is too large by 10 % at a multiple of 6 and by 1.6 % at 60.
_CARRIED = 100
# Of `log α` at MacKay's fixed point, where the curvature is dense: a definition.
_ACCURACY = 1e-8
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
        """Returns the path of a random part of the data, which is close enough to choose a precision by."""
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
            # Where the prior decides, standard deviations go with `α^{-1/2}`: `log α` is needed to twice their error.
            tolerance=2 * tuning.tolerance,
            precision_bounds=tuning.precision_bounds,
            noise_bounds=tuning.noise_bounds,
            afford=task.budget.for_tuning,
            progress=task.progress,
            callback=tuning.callback,
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
        return _verified(fit.with_mode().ready(f"{task.num_samples} samples" if task.progress else None))

    def mode(self, task: Task, solver: Solver, tuned: Tuned) -> Minimum:
        """The mode of the linear model, in scaled coordinates."""
        start = None if tuned.mode is None else (tuned.mode / task.prior.scale)[None]
        if start is None and task.start is not None:
            start = task.start.mode_in(task.prior.scale)
        return linear_model_mode(task.model, task.prior, solver, start, description="mode" if task.progress else None)

    def fit_of(self, *parts: Any) -> "SolverFit":
        """What the fit is kept as."""
        return SolverFit(*parts)


def settled(traces: Traces, alphas: Tensor) -> bool:
    """Whether further Lanczos steps hardly change `log|I + M/α|` at some precisions."""
    return bool((traces.missing(alphas) < _EVIDENCE_ACCURACY).all())


def traces_of(task: Task, accurate: Callable[[Traces], bool], num_probes: int = _EVIDENCE_PROBES) -> Traces:
    """Traces of the curvature by a Krylov run within memory; `accurate` as of `krylov_traces`."""
    max_basis = basis_that_fits(task.memory, task.num_samples)
    draws = Draws(max(1, min(num_probes, max_basis // 4)), task.seed, Stream.EVIDENCE)
    at = overall_precision(task.prior)
    return krylov_traces(task.whitened_ggn(), at, draws, accurate, max_basis)


def _verified(fit: Fit) -> Fit:
    """The fit, as not converged where its own samples and mode contradict its hyperparameters."""
    found = disagreements(fit)
    if not found:
        return fit
    return replace(fit, tuned=replace(fit.tuned, converged=False, problems=[*fit.tuned.problems, *found]))


def tuned_by(result: EMResult, task: Task, tuning: Tuning, solver: Solver) -> tuple[Task, Tuned]:
    """The task with the hyperparameters of a result, and how they were found.

    Args:
        result: of expectation maximisation.
        task: before.
        tuning: what was asked.
        solver: with its preconditioner, for the fit.
    """
    problems = []
    if not result.converged:
        problems.append(
            f"`fit_hyperparameters` stopped after {len(result.history)} steps, before its tolerance: "
            f"prior precision went {[f'{s.prior_precision[0]:.3g}' for s in result.history]}. "
            + (task.budget.advice or "Raise `max_steps` of `Evidence`, or `tolerance`.")
        )
    at_bounds = AtBounds.of(result.prior, result.likelihood, tuning.precision_bounds, tuning.noise_bounds)
    tuned = Tuned(
        history=result.history,
        converged=result.converged and not at_bounds.names,
        at_bounds=at_bounds.names,
        problems=problems + at_bounds.problems,
        mode=result.mode,
        work=solver,
        criterion="evidence",
    )
    return replace(task, model=task.model.with_likelihood(result.likelihood), prior=result.prior), tuned


def tuned_by_spectrum(
    task: Task, tuning: Tuning, solver: Solver, values: Tensor, rotated: Callable[[Tensor], Tensor]
) -> tuple[Task, Tuned]:
    """The task with the hyperparameters of largest evidence, from all eigenvalues of the curvature.

    For a likelihood that is not Gaussian they are at MacKay's fixed point (`tuned_by_traces`).

    Args:
        task: before, with one prior precision, and one noise precision at most.
        tuning: what was asked.
        solver: for the mode.
        values: eigenvalues of `M`, in scaled coordinates.
        rotated: from vectors to their coordinates in the eigenvectors.
    """
    started, model, method = time.perf_counter(), task.model, task.method
    assert isinstance(method, SolverMethod)
    likelihood, values = model.likelihood, values.double().clamp_min(0)
    if isinstance(likelihood, Gaussian):
        # `gp` is needed for a fit only.
        from laplace_sampling.gp.evidence import HyperparameterBounds, RegressionEvidence

        b, zero = float(likelihood.noise_precision), values.new_zeros(1, model.features.size)
        slope = rotated(-ModeObjective(model, task.prior).gradient(zero.to(model.features.dtype), None).double())[0]
        inside = torch.where(values > 0, slope / (b * (values / b).sqrt()), 0.0).nan_to_num()
        offset, network = (float(model.squared_errors(f).sum()) for f in (model.offset, model.network_outputs))
        regression = RegressionEvidence.of_leading(values / b, inside, offset, model.num_observations)
        bounds = HyperparameterBounds(tuning.precision_bounds, tuning.noise_bounds)
        optimum = regression.largest((overall_precision(task.prior), b), (True, likelihood.learn), bounds, network)
        at = optimum.precision, optimum.noise_precision
        norm = float(regression.mode_norm(*at))
        return tuned_at(
            task,
            tuning,
            at[0],
            likelihood.with_precision(at[1]) if likelihood.learn else likelihood,
            started=started,
            effective_dimension=float(regression.effective_dimension(*at)),
            mode_norm=norm,
            loss=float(regression.objective(*at)) - 0.5 * at[0] * norm,
            passes=1.0,
            work=solver,
            criterion="evidence",
        )
    return tuned_by_traces(task, tuning, Traces.of_eigenvalues(values, overall_precision(task.prior)), solver)


def tuned_by_traces(
    task: Task,
    tuning: Tuning,
    traces: Traces,
    solver: Solver,
    start: float | None = None,
    accuracy: float = _ACCURACY,
    work: Solver | None = None,
) -> tuple[Task, Tuned]:
    r"""The task with hyperparameters at MacKay's fixed point, `α‖θ̄‖² = γ(α)`: each precision that is tried has a mode.

    The curvature of a regression is proportional to its noise precision `b`. So the mode depends on the ratio of `α` to
    the factor `κ` by which `b` grows, and `κ` is what MacKay's update of `b` says at that ratio.

    Args:
        task: before, with one prior precision, and one noise precision at most.
        tuning: what was asked.
        traces: of the curvature, in scaled coordinates.
        solver: for the modes.
        start: where the search begins, by default at the precision of the prior.
        accuracy: of `log α`.
        work: the solver of the fit, by default that of the modes.
    """
    started, model, method, likelihood = time.perf_counter(), task.model, task.method, task.model.likelihood
    assert isinstance(method, SolverMethod)
    weights, outputs, minimum = None, model.network_outputs, None

    def dimension(ratio: float) -> tuple[float, float]:
        gamma, error = traces.effective_dimension(torch.tensor([ratio], dtype=torch.float64))
        return float(gamma), float(error)

    def factor(ratio: float) -> float:
        if not (isinstance(likelihood, Gaussian) and likelihood.learn):
            return 1.0
        gamma = torch.tensor([dimension(ratio)[0]], dtype=torch.float64)
        updated = clamped(float(noise_update(model, gamma)), tuning.noise_bounds)
        return updated / float(likelihood.noise_precision)

    def norm(ratio: float) -> float:
        nonlocal weights, outputs, minimum
        prior = task.prior.with_precision(torch.tensor([ratio], dtype=torch.float64))
        minimum = method.mode(replace(task, prior=prior), solver, Tuned(mode=weights))
        weights = (minimum.value * prior.scale)[0]
        outputs = model.outputs(weights[None].to(model.features.dtype))[0]
        return float(minimum.value.double().square().sum())

    def energy(ratio: float) -> float:
        return ratio * norm(ratio) * factor(ratio)

    ratio, inside = mackay_root(
        lambda a: dimension(a)[0], energy, start or traces.at, tuning.precision_bounds, accuracy
    )
    mode_norm, kappa = norm(ratio), factor(ratio)
    assert minimum is not None
    if isinstance(likelihood, Gaussian) and likelihood.learn:
        likelihood = likelihood.with_precision(float(likelihood.noise_precision) * kappa)
    gamma, error = dimension(ratio)
    rounds = ratio < _CARRIED * traces.rounding
    problem = (
        f"Products in {model.features.dtype} are not accurate enough for the prior precision {ratio * kappa:.3g} that "
        'the evidence asks for. Use `model.double()`, a common scale of inputs and targets, or method="exact".'
    )
    return tuned_at(
        task,
        tuning,
        # The noise must not take it off the bound that the evidence points to.
        clamped(ratio * kappa, tuning.precision_bounds) if inside else ratio,
        likelihood,
        started=started,
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
            rows=self.solver_method.rows(self.task.memory, self.task.num_samples, held=self.task.num_samples),
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

    def traces(self, decades: float) -> Traces:
        ends = self.alpha * torch.logspace(-decades, decades, 3, dtype=torch.float64)
        return traces_of(self.task, lambda traces: settled(traces, ends), _PATH_PROBES if decades else _EVIDENCE_PROBES)

    def mode_curve(self, alphas: Tensor) -> ModeCurve:
        model, method, solver = self.model, self.solver_method, self.curve_solver

        def find(alpha: float, start: Tensor) -> tuple[Tensor, float, float]:
            prior = self.prior.with_precision(self.prior.precision * (alpha / self.alpha))
            minimum = method.mode(replace(self.task, prior=prior), solver, Tuned(mode=start))
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
        path, problems = super().evidence(decades)
        # Memory may have ended the run: then its own estimate of what is missing says how much.
        ends = self.alpha * torch.logspace(-decades, decades, 3, dtype=torch.float64)
        change = 0.0 if path.traces.exact else float(path.traces.missing(ends).max())
        if not change < _EVIDENCE_ACCURACY:
            problems.append(
                f"memory was full before it was accurate: more iterations may change the log determinant by "
                f"{100 * change:.2g} %; give more `max_memory`"
            )
        return path, problems
