r"""Methods that draw samples by solving linear systems: block Krylov, mini-batches, and the dual system."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.arguments import check_positive, check_whole, refuse_class
from laplace_sampling.curvature.kronecker import has_factors
from laplace_sampling.gp.dual import DualCG, WhitenedGram
from laplace_sampling.gp.posterior import GramPosterior
from laplace_sampling.hyperparameters.covariance_path import CovariancePath
from laplace_sampling.hyperparameters.curves import ModeCurve, Traces
from laplace_sampling.hyperparameters.hyperparameters import Hyperparameters, clamped
from laplace_sampling.hyperparameters.network_evidence import NetworkEvidence
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.closed_form import Factored, Subset, by_gram_matrix
from laplace_sampling.methods.method import (
    BASIS_STACKS,
    Choice,
    Fit,
    Method,
    Task,
    basis_that_fits,
    by_traces,
    has_path,
    settled,
    traces_of,
)
from laplace_sampling.methods.problem import Estimate, Memory, Problem, fits_in_observation_space
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Solver
from laplace_sampling.solvers.svrg import SVRG

# Observations up to which the whole Gram matrix is decomposed for the hyperparameters. It takes C/2 + N·C/4 products at
# most, at 2,000 observations no more than the preconditioner (820) and five steps of EM (470) do, and 3 s of one core.
_GRAM_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Solves(Method):
    """A method whose samples a solver finds: give `name`, `make_solver` and `judge`."""

    # Products of each sample that a solve of many together takes, and the fewest with which it is worth having; passes
    # of a search for the largest evidence. Typical of the problems of `auto`; half and twice move where `auto` leaves
    # solves.
    _PRODUCTS, _LEAST_PRODUCTS, _TUNING_PASSES = 5, 2, 80

    def covariance_path(self, task: Task) -> CovariancePath:
        """Returns the path of a random part of the data, which is close enough to choose a precision by."""
        return Subset().covariance_path(task)

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        # `u = Φᵀ L z` of each sample is a VJP; the evidence takes as much at the least number of products as at most.
        num_data, num_samples = problem.features.num_data, problem.num_samples
        passes, tuning = num_data * cost.passes, self._TUNING_PASSES if problem.by_evidence else 0

        def operations(products: int) -> float:
            solves = num_samples * num_data * cost.vjp + (num_samples * products + tuning) * passes
            return solves + problem.of_rule(cost)

        memory = problem.memory_of(self.max_memory)
        least = operations(self._LEAST_PRODUCTS)
        return Estimate(operations(self._PRODUCTS), self.needs(problem) * memory.vector, least=least)

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        """The choice, or a cheaper posterior if samples by solves would be hardly more than those of the prior."""
        if problem.cost is None or (least := self.predicted(problem, problem.cost).least) is None:
            return choice
        budget = problem.budget
        if budget.affords(least):
            return choice
        own = {field.name: getattr(self, field.name) for field in fields(Method)}
        factors = has_factors(problem.features)
        shortfall = (
            f'Samples by method="{self.name}" take {least / budget.epoch:.3g} training epochs at least, more than the '
            f"budget of {budget.epochs:g}: the posterior is that of "
            f"{'Kronecker factors' if factors else 'a part of the data'}. Raise `budget`."
        )
        reason = f'the budget does not pay for method="{self.name}"'
        method = Factored(**own) if factors else Subset(**own).within(problem, problem.cost)
        return replace(choice, method=method, reason=reason, shortfall=shortfall)


@dataclass(frozen=True, kw_only=True)
class Krylov(Solves):
    """Block Krylov on all data: a few passes give all samples together, whatever `N` is.

    Prior and noise precision are at MacKay's fixed point. A Krylov run of a few probes gives the effective dimension
    for every `α`; each precision that is tried takes a mode. Where memory is short, the basis is smaller and starts
    again more often. This is at least as fast as conjugate gradients.
    """

    # Of the modes of a search for the largest evidence, an error of the function that leaves `‖θ̄‖²` accurate enough.
    _MODE_ACCURACY = 2e-3

    @property
    def name(self) -> str:
        return "krylov"

    @property
    def stacks(self) -> int:
        # The peak of a fit in float32 (a linear layer of 9,003 weights). At 8, where 100 vectors may be taken and 17
        # more for the product, a fit takes 182; at 32 it takes 67, and 74 passes instead of 70.
        return 16

    @property
    def residual_kind(self) -> str:
        return "relative error of the function"

    def preconditioner_vectors(self, memory: Memory, num_samples: int) -> int:
        return BASIS_STACKS * basis_that_fits(memory, num_samples)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> BlockKrylov:
        # Where accuracy is cheap: the error of the function that samples may have.
        return BlockKrylov(min(2 * tolerance, 0.5), max_basis=basis_that_fits(task.memory, task.num_samples))

    def em_rows(self, solver: Solver, memory: Memory, num_samples: int, in_em: int) -> int:
        # As many as the solver takes together.
        return min(in_em, max(1, basis_that_fits(memory, num_samples) // 4))

    def tune_by_evidence(self, task: Task) -> Hyperparameters:
        solver = self.make_solver(task, task.tolerance, None)
        if not has_path(task):
            return self.tune_by_em(task, solver)

        def ratio(traces: Traces) -> float:
            """Where the evidence of the network itself is largest, which needs no mode."""
            alpha, factor = NetworkEvidence.of(task.model, task.prior, task.trained_weights, traces).best()
            return clamped(alpha / factor, task.criterion.precision_bounds)

        def near(found: Traces) -> bool:
            return settled(found, ratio(found) * torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64))

        def accurate(found: Traces) -> bool:
            gamma, error = found.effective_dimension(torch.tensor([ratio(found)], dtype=torch.float64))
            # What the data do not determine tells the noise.
            free = max(task.model.num_observations - float(gamma), 0.0)
            return near(found) and (not task.model.likelihood.learns_noise or float(error) <= task.tolerance * free)

        traces = traces_of(task, accurate)
        if traces.full and not near(traces):
            return self.tune_by_em(task, solver)
        modes = CG(self._MODE_ACCURACY).within(task.budget.for_tuning)
        return by_traces(task, traces, modes, ratio(traces), self._MODE_ACCURACY, solver)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        assert isinstance(solver, BlockKrylov)
        return sampled.error, solver.tolerance


@dataclass(frozen=True, kw_only=True)
class Stochastic(Solves):
    """Mini-batch gradients, for data so many that each pass over them counts.

    Args:
        solver: `SVRG(...)`, preconditioned mini-batches, which need memory and a few passes; or `SGD(...)`, plain ones.
            By default the first, if memory holds a preconditioner of rank 64.
    """

    # Vectors held for each of the rank of SVRG's preconditioner: four rows of data, their factor, and what a product
    # needs. Where a fit may take 100 vectors (a linear layer of 9,003 weights), 226 passes at 8, 276 at 4, as rows have
    # less room beside a higher rank, and 210 at 16; the peak is 107, 89 and 106 vectors.
    _SVRG_STACKS = 8
    # A preconditioner of a lower rank is not worth having: half or twice moves where `SGD` takes over by as much.
    _LEAST_RANK = 64
    # The part of its descents that plain mini-batches make from a warm start, of samples and of the mode.
    _WARM = 0.25

    solver: SGD | SVRG | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_class("solver", self.solver)
        if not isinstance(self.solver, SGD | SVRG | None):
            raise TypeError(
                f"`Stochastic(solver=...)` must be an SGD or an SVRG, but is a {type(self.solver).__name__}."
            )

    @property
    def name(self) -> str:
        return "stochastic"

    @property
    def plain(self) -> bool:
        """Whether there is no preconditioner."""
        return isinstance(self.solver, SGD)

    @property
    def stacks(self) -> int:
        # The peak of a fit in float32, as in `Krylov.stacks`: at half a fit that may take 100 vectors, and 17 for the
        # product, takes 169 (plain) and 179; at twice 68 and 71, and a tenth to two fifths more passes.
        return 16 if self.plain else 22

    @property
    def advice(self) -> str:
        if self.plain:
            return "Give more passes with `Stochastic(solver=SGD(finish_passes=...))`."
        return 'Raise `tolerance`, or use `method="krylov"`, which goes on for longer.'

    @property
    def residual_kind(self) -> str:
        return "relative error of the function"

    def choose(self, problem: Problem) -> Choice:
        if self.solver is not None:
            return Choice(self, self)
        preconditioned = replace(self, solver=SVRG(seed=problem.seed))
        rank = preconditioned.rank(problem.memory_of(self.max_memory), problem.num_samples)
        if rank >= self._LEAST_RANK:
            return Choice(preconditioned, self, f"as asked for, preconditioned by {rank} vectors")
        return Choice(replace(self, solver=SGD(seed=problem.seed)), self, "as asked for, without a preconditioner")

    def check(self, problem: Problem) -> None:
        if problem.tangent.in_order:
            raise ValueError(
                f'method="{self.name}" draws mini-batches, but a stream of data that is too large to be kept can be '
                'read in its order only: use method="krylov", or a map-style dataset.'
            )
        super().check(problem)

    def rank(self, memory: Memory, num_samples: int) -> int:
        """Rank of the preconditioner, at most."""
        largest = self.solver.max_rank if isinstance(self.solver, SVRG) else SVRG().max_rank
        room = memory.vectors - num_samples - self.stacks
        return max(1, min(largest, int(room / self._SVRG_STACKS)))

    def preconditioner_vectors(self, memory: Memory, num_samples: int) -> int:
        return 0 if self.plain else self.rank(memory, num_samples)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        settings = self.solver
        if isinstance(settings, SGD):
            asked = largest_error(tolerance, task.num_samples)
            settings = settings if task.start is None else settings.shortened(self._WARM)
            return replace(settings, tolerance=asked if settings.tolerance is None else settings.tolerance)
        assert isinstance(settings, SVRG)
        # Its tolerance is one of `ε²`, and judged by an estimate, which takes a third of `2τ`.
        error = min(2 * tolerance, 0.5)
        solver = replace(settings, tolerance=error / 3, max_rank=self.rank(task.memory, task.num_samples))
        noise = task.model.likelihood.noise_precisions()
        # Noises of several outputs change `M` by more than a factor while they are learnt.
        keeps = noise is None or noise.dim() == 0 or not task.model.likelihood.learns_noise
        return solver.hold(task.scaled_ggn()) if keeps else solver

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        if isinstance(solver, SVRG):
            return sampled.error, math.sqrt(solver.tolerance)
        assert isinstance(solver, SGD)
        assert solver.tolerance is not None
        return sampled.error, solver.tolerance


def largest_error(tolerance: float, num_samples: int) -> float:
    """The largest `ε` with `ε²/2 + ε/√K ≤ τ`, a half at most."""
    root = num_samples**-0.5
    return min(0.5, math.sqrt(root**2 + 2 * tolerance) - root)


@dataclass(frozen=True, kw_only=True)
class Dual(Solves):
    """Conjugate gradients on vectors of `N·C` numbers, one for each observation; for regressions.

    It is for so many weights that memory does not hold a Krylov basis, whose vectors have `P` numbers.

    Args:
        rank: the rank of the preconditioner; 0 for none. By default 400, or fewer if a quarter of the memory holds
            fewer vectors or there are fewer observations.
        max_iterations: the largest number of steps of conjugate gradients in each solve.
        accuracy: the largest relative error of a sample's function on the training data; by default what the
            `tolerance` of a fit needs.
    """

    # Rank of the preconditioner, whose vectors have `N·C` numbers, and the share of memory that it takes at most. For a
    # regression of 900 data 127 passes at 400 and at 800, which the decay of the kernel makes equal, and 202 at 200.
    _RANK, _SHARE = 400, 0.25

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

    def remark(self, problem: Problem, memory: Memory) -> str:
        return f", conjugate gradients in observation space (N·C = {problem.num_observations} observations)"

    def check_likelihood(self, likelihood: Likelihood) -> None:
        if not likelihood.quadratic:
            raise ValueError(
                f'method="dual" is for regression with a Gaussian likelihood, but the likelihood is '
                f'{likelihood.name!r}; use method="exact", "krylov" or "stochastic".'
            )

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> DualCG:
        rows, ggn = task.model.num_observations, task.scaled_ggn()
        held = max(1, min(self._RANK, rows, int(self._SHARE * task.memory.bytes / (8 * rows))))
        solver = DualCG(
            tolerance=min(2 * tolerance, 0.5) if self.accuracy is None else self.accuracy,
            rank=held if self.rank is None else self.rank,
            max_iterations=self.max_iterations,
            seed=task.seed,
        )
        return solver.hold(WhitenedGram(ggn, torch.full((ggn.size,), 1 / (shift or 1.0), device=ggn.device)))

    def tune_by_evidence(self, task: Task) -> Hyperparameters:
        """By the evidence itself where the Gram matrix is small; else by EM."""
        return _by_gram_matrix(task) if _has_small_gram(task) else super().tune_by_evidence(task)

    def judge(self, sampled: PosteriorSamples, solver: Any) -> tuple[Tensor, float]:
        return sampled.error, solver.tolerance

    def fit_of(self, *parts: Any) -> "DualFit":
        return DualFit(*parts)


def _has_small_gram(task: Task) -> bool:
    """Whether the Gram matrix gives the hyperparameters: for one prior precision, and cheaper than EM."""
    features = task.model.features
    rows = features.num_data * features.num_outputs
    return rows <= _GRAM_ROWS and len(task.prior.names) == 1 and fits_in_observation_space(features, task.memory)


def _by_gram_matrix(task: Task) -> Hyperparameters:
    """The hyperparameters of the exact method; its matrices are freed."""
    return replace(by_gram_matrix(_in_float64(task)), work=None)


def _in_float64(task: Task) -> Task:
    """With features in float64 where the network allows."""
    prior = task.prior.to(task.model.features.device, torch.float64)
    return replace(task, model=replace(task.model, features=task.model.features.in_float64()), prior=prior)


class DualFit(Fit):
    """A fit in observation space: where the Gram matrix fits in memory, its evidence is exact."""

    @cached_property
    def _gram(self) -> GramPosterior | None:
        if not fits_in_observation_space(self.model.features, self.task.memory):
            return None
        task = _in_float64(self.task)
        return GramPosterior.of(task.model, task.prior)

    def traces(self, decades: float) -> Traces:
        if self._gram is None:
            return super().traces(decades)
        return Traces.of_eigenvalues(self._gram.precisions[1] * self._gram.eigenvalues, self.alpha)

    def mode_curve(self, alphas: Tensor) -> ModeCurve:
        return super().mode_curve(alphas) if self._gram is None else self._gram.mode_curve(alphas)
