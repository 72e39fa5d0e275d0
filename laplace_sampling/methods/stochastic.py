"""`Stochastic`: mini-batches, for many data."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.fit import Task
from laplace_sampling.methods.method import Choice
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.methods.solver_method import SolverMethod, largest_error
from laplace_sampling.solvers.checks import refuse_class
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Solver
from laplace_sampling.solvers.svrg import SVRG

# Vectors held for each of the rank of SVRG's preconditioner: four rows of data, their factor, and what a product needs.
# Where a fit may take 100 vectors (a linear layer of 9,003 weights), 226 passes at 8, 276 at 4, as rows have less room
# beside a higher rank, and 210 at 16; the peak is 107, 89 and 106 vectors.
_SVRG_STACKS = 8
# A preconditioner of a lower rank is not worth having. Passes a sample that one saves against plain mini-batches. Both
# are round numbers: half or twice moves where `SGD` takes over from `SVRG` by as much, when 64 vectors hardly fit.
_LEAST_RANK, _SAVED_PASSES = 64, 5
# The part of its descents that plain mini-batches make from a warm start, of samples and of the mode.
_WARM = 0.25
# How many times cheaper it has to be than what it saves.
_CHEAPER = 3.0


@dataclass(frozen=True, kw_only=True)
class Stochastic(SolverMethod):
    """Mini-batch gradients: their number of steps, not of passes, is what stays fixed as `N` grows.

    Args:
        solver: `SVRG(...)`, preconditioned mini-batches, which need memory and a few passes; or `SGD(...)`,
            plain ones. By default the first, where its preconditioner fits in memory and pays, counted in operations.
    """

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
        # The peak of a fit in float32, as of `Krylov.stacks`: at half a fit that may take 100 vectors, and 17 for the
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
        return self.decide(problem, measure(problem.features), "as asked for")

    def decide(self, problem: Problem, cost: Cost, reason: str) -> Choice:
        """With a preconditioner, or without: whichever takes fewer operations.

        A preconditioner saves some passes of all samples, and factorises a matrix of four rows of data for each of its
        rank.
        """
        num_data, preconditioned = problem.features.num_data, replace(self, solver=SVRG(seed=problem.seed))
        rank = preconditioned.rank(problem.memory_of(self.max_memory), problem.num_samples)
        saved = _SAVED_PASSES * problem.num_samples * num_data * (cost.jvp + cost.vjp)
        if rank >= _LEAST_RANK and saved > _CHEAPER * 10 * (4 * rank) ** 3:
            return Choice(preconditioned, self, f"{reason}, preconditioned by {rank} vectors", cost)
        plain = replace(self, solver=SGD(seed=problem.seed))
        return Choice(plain, self, f"{reason}, without a preconditioner", cost)

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
        return max(1, min(largest, int(room / _SVRG_STACKS)))

    def preconditioner_vectors(self, memory: Memory, num_samples: int) -> int:
        return 0 if self.plain else self.rank(memory, num_samples)

    def making_vectors(self, memory: Memory, num_samples: int) -> int:
        return _SVRG_STACKS * self.preconditioner_vectors(memory, num_samples)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        settings = self.solver
        if isinstance(settings, SGD):
            asked = largest_error(tolerance, task.num_samples)
            settings = settings if task.start is None else settings.shortened(_WARM)
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
