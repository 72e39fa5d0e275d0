"""`Krylov`: block Krylov on all data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import Traces
from laplace_sampling.evidence.network_evidence import NetworkEvidence
from laplace_sampling.linear_model.bounds import clamped
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.fit import Task, Tuned
from laplace_sampling.methods.method import Tuning, has_path
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.methods.solver_method import (
    BASIS_STACKS,
    SolverMethod,
    basis_that_fits,
    settled,
    traces_of,
    tuned_by_traces,
)
from laplace_sampling.methods.start import Start
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.preconditioners import Nystrom, Preconditioner
from laplace_sampling.solvers.solver import Solver

# The fewest vectors of a Krylov basis that are worth having. A linear layer of 9,003 weights with 16 samples and 500
# vectors of memory takes 24 passes with a basis, at half the same; at twice there is none, and it takes 69.
LEAST_BASIS = 64
# Vectors alive for each vector of a Nyström preconditioner in the making, the peak of a fit in float32: at
# half a fit that may take 100 vectors takes 139, at twice the rank is half and 82 passes replace 70. The largest rank
# makes no difference to that fit at half and at twice; it bounds the cost of the decomposition.
_NYSTROM_STACKS, _LARGEST_RANK, _BLOCK = 18, 256, 16
# Of the modes of a search for the largest evidence, an error of the function that leaves `‖θ̄‖²` accurate enough.
_MODE_ACCURACY = 2e-3


@dataclass(frozen=True, kw_only=True)
class Krylov(SolverMethod):
    """Block Krylov on all data: a few passes for all samples together, whatever `N` is.

    Prior and noise precision are at MacKay's fixed point: a Krylov run of a few probes gives the effective dimension
    for every `α`, and each precision that is tried takes a mode. Where memory holds no basis worth having, conjugate
    gradients with a Nyström preconditioner take its place.
    """

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

    def short(self, memory: Memory, num_samples: int) -> bool:
        """Whether a Krylov basis worth having does not fit."""
        return basis_that_fits(memory, num_samples) < LEAST_BASIS

    def remark(self, problem: Problem, memory: Memory) -> str:
        if not self.short(memory, problem.num_samples):
            return ""
        return "; memory holds no Krylov basis: preconditioned conjugate gradients"

    def _rank(self, memory: Memory, num_samples: int) -> int:
        """Rank of the Nyström preconditioner, at most; 0 for none."""
        room = memory.vectors - num_samples - self.stacks
        rank = min(_LARGEST_RANK, int(memory.vectors / _NYSTROM_STACKS), int(room / 2))
        return rank if rank >= 4 else 0

    def preconditioner_vectors(self, memory: Memory, num_samples: int) -> int:
        if self.short(memory, num_samples):
            return self._rank(memory, num_samples)
        return BASIS_STACKS * basis_that_fits(memory, num_samples)

    def making_vectors(self, memory: Memory, num_samples: int) -> int:
        return self._rank(memory, num_samples) if self.short(memory, num_samples) else 0

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        error = _largest_error(tolerance)
        if not self.short(task.memory, task.num_samples):
            return BlockKrylov(error, max_basis=basis_that_fits(task.memory, task.num_samples))
        rank = self._rank(task.memory, task.num_samples)
        if rank == 0:
            return CG(error)
        if task.start is not None and (earlier := _earlier(task, task.start)) is not None:
            return CG(error, preconditioner=earlier)
        preconditioner = Nystrom.of(
            task.scaled_ggn(),
            block=min(_BLOCK, rank),
            max_rank=rank,
            shift=shift,
            num_rhs=task.num_samples,
            seed=task.seed,
        )
        return CG(error, preconditioner=preconditioner)

    def em_rows(self, solver: Solver, memory: Memory, num_samples: int, in_em: int) -> int:
        # A Krylov basis is of all rows together, and bounds its own memory.
        return in_em if isinstance(solver, BlockKrylov) else super().em_rows(solver, memory, num_samples, in_em)

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        solver = self.make_solver(task, tuning.tolerance, None)
        if not (isinstance(solver, BlockKrylov) and has_path(task)):
            return self.tune_by_em(task, tuning, solver)

        def ratio(traces: Traces) -> float:
            """Where the evidence of the network itself is largest, which needs no mode."""
            alpha, factor = NetworkEvidence.of(task.model, task.prior, task.trained_weights, traces).best()
            return clamped(alpha / factor, tuning.precision_bounds)

        def near(found: Traces) -> bool:
            return settled(found, ratio(found) * torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64))

        def accurate(found: Traces) -> bool:
            gamma, error = found.effective_dimension(torch.tensor([ratio(found)], dtype=torch.float64))
            # What the data do not determine tells the noise.
            free = max(task.model.num_observations - float(gamma), 0.0)
            return near(found) and (not task.model.likelihood.learns_noise or float(error) <= tuning.tolerance * free)

        traces = traces_of(task, accurate)
        if traces.full and not near(traces):
            return self.tune_by_em(task, tuning, solver)
        modes = CG(_MODE_ACCURACY).within(task.budget.for_tuning)
        return tuned_by_traces(task, tuning, traces, modes, ratio(traces), _MODE_ACCURACY, solver)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        assert isinstance(solver, BlockKrylov | CG)
        return sampled.error, solver.tolerance


def _earlier(task: Task, start: Start) -> Preconditioner | None:
    """The preconditioner of the posterior that a fit starts from, in the present coordinates, if there was one."""
    held = start.solver.preconditioner if isinstance(start.solver, CG) else None
    if held is None:
        return None
    device, dtype = task.model.features.device, task.model.features.dtype
    return held.congruent(start.change_of_scale(task.prior.to(device, dtype)))


def _largest_error(tolerance: float) -> float:
    """The error of the function that samples may have, where accuracy is cheap."""
    return min(2 * tolerance, 0.5)
