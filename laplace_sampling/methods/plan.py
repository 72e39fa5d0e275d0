"""Which method a problem takes, and its solvers, within the memory that they may take.

**Memory** is counted in vectors of `P` numbers: what a solve holds for each of its rows, a basis or a preconditioner,
and the samples themselves. Activations of the network, of products with the rows of a group, come on top.

**Cost** is counted in floating-point operations, for a choice by the clock would not be the same in two runs.

**The exact method has two spaces**: that of the weights, with the Jacobian and a matrix `[P, P]`, or that of the
observations, with the Gram matrix `[N·C, N·C]` and no Jacobian, for `N·C < P`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.gp.gram import size_of
from laplace_sampling.gp.whitened_gram import WhitenedGram
from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.linear_model.factored import FACTORED, FactoredSampler
from laplace_sampling.linear_model.features import BLOCK_BYTES, GGN, Features
from laplace_sampling.networks.memory import free_memory
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import InGroups, Solver
from laplace_sampling.solvers.svrg import SVRG

__all__ = ["METHODS", "Plan", "make_plan"]

METHODS = ("auto", "exact", "dual", "cg", "sgd", "svrg", "ciq", *FACTORED)

# "auto" takes the exact method up to this size of its matrix, and of the Jacobian that it holds (in numbers).
_EXACT_SIZE, _EXACT_JACOBIAN = 2000, 5e7
_EXACT_BYTES = 8 * 2**30
# Full-batch Krylov methods need a few passes whatever N is, stochastic ones a number of steps: up to this many data.
_KRYLOV_DATA = 20_000
# Counts of operations overrule sizes if they differ by this factor, and by more than so many (a minute or so).
_CHEAPER, _WORTH = 3.0, 1e12
# Typical of `fit_hyperparameters`: passes of one vector with "cg", factorisations with "exact".
_PASSES, _FACTORISATIONS = 400, 50
# In observation space: one eigendecomposition, in units of `(N·C)³`, and Gram matrices that are in memory.
_EIGEN, _GRAMS = 9, 4
# Passes a sample that the preconditioner of svrg saves against sgd.
_SAVED = 5

# The fewest vectors of a Krylov basis that are worth having, and vectors held for each (its product, and room to move).
_LEAST_BASIS, _BASIS_STACKS = 64, 3
# Vectors of P numbers alive for each row of a solve, products of the network included; measured in float32.
_STACKS = {"exact": 0, "diagonal": 0, "kfac": 0, "dual": 24, "cg": 16, "sgd": 16, "svrg": 22, "ciq": 80}
# The same for each row of EM that is not being solved, and for each vector of a Nyström preconditioner in the making.
_EM_STACKS, _NYSTROM_STACKS = 12, 18
# Of the preconditioner of svrg, for each of its rank: four rows of data, their factor, and what a product needs.
_SVRG_STACKS = 8
_LARGEST_RANK = 256
# Rank of the preconditioner of "dual", whose vectors have `N·C` numbers, and the share of memory that it takes.
_DUAL_RANK, _DUAL_SHARE = 400, 0.25

# The error of predicted standard deviations for which solvers' own defaults are made.
_TOLERANCE = 0.015


@dataclass(frozen=True)
class Plan:
    """A method, why it was taken, and what it may hold in memory.

    Attributes:
        method: `"exact"`, `"dual"`, `"cg"`, `"sgd"`, `"svrg"`, `"ciq"`, `"diagonal"` or `"kfac"`.
        reason: in words.
        vectors: of `P` numbers that memory holds.
        num_samples: `K`.
        cost: of products, if it was measured.
        space: where the exact method works, `"weights"` or `"observations"`.
        dual_rank: of the preconditioner of `"dual"`.
    """

    method: str
    reason: str
    vectors: float
    num_samples: int
    cost: Cost | None = None
    space: str = "weights"
    dual_rank: int = 0

    def holds_gram(self, features: Features) -> bool:
        """Whether memory holds the exact method in observation space."""
        vector = features.size * torch.empty((), dtype=features.dtype).element_size()
        bytes_ = _exact_bytes("observations", features.num_data * features.num_outputs, features.size)
        return bytes_ <= min(_EXACT_BYTES, self.vectors * vector)

    @property
    def in_observation_space(self) -> bool:
        """Whether the exact method works on the Gram matrix."""
        return self.method == "exact" and self.space == "observations"

    @property
    def holds_jacobian(self) -> bool:
        """Whether the exact method is to be given dense features."""
        return self.method == "exact" and self.space == "weights"

    @property
    def max_basis(self) -> int:
        """Vectors of a Krylov basis that memory holds beside the stacks of a solve of all samples; 4 at least."""
        beside = (_STACKS["cg"] + 1) * self.num_samples
        return max(4, int((self.vectors - beside) / _BASIS_STACKS))

    @property
    def short(self) -> bool:
        """Whether a Krylov basis worth having does not fit."""
        return self.max_basis < _LEAST_BASIS

    @property
    def rank(self) -> int:
        """Of the preconditioner, at most; 0 for none."""
        if self.method == "svrg":  # made in a solve, beside its rows
            room = self.vectors - self.num_samples - _STACKS["svrg"]
            return max(1, min(SVRG().max_rank, int(room / _SVRG_STACKS)))
        if self.method != "cg" or not self.short:
            return 0
        room = self.vectors - self.num_samples - _STACKS["cg"]
        rank = min(_LARGEST_RANK, int(self.vectors / _NYSTROM_STACKS), int(room / 2))
        return rank if rank >= 4 else 0

    def rows(self, held: float = 0) -> int:
        """Samples to solve for together, beside `held` vectors."""
        stacks = _STACKS[self.method]
        basis = _BASIS_STACKS * self.max_basis if self.method == "cg" and not self.short else self.rank
        return max(1, int((self.vectors - held - basis) / stacks)) if stacks else 2**31

    def em_samples(self, num_samples: int) -> int:
        """Samples of EM that memory holds, at most so many."""
        if self.method == "exact":
            return num_samples
        making = _SVRG_STACKS if self.method == "svrg" else 1
        room = self.vectors - making * self.rank - _STACKS[self.method]
        return max(1, min(num_samples, int(room / _EM_STACKS)))

    def solver(self, tolerance: float, given: SGD | DualCG | None, seed: int) -> Solver:
        r"""The solver of the method for a relative error `τ` of predicted standard deviations, a mean over the data.

        A sample `ζ` is independent of the simulated data `d = u − Mθ⁰` that it is conditioned on (`Cov(ζ, d) =
        H⁻¹(M − AA⁻¹M) = 0`), and all that a solver does from `δ = 0` is a function of `d`. So its error `e = ζ̂ − ζ` is
        independent of `ζ`: variances add, and an error of the function of relative size `ε = ‖Φe‖_B / ‖Φζ‖_B` makes
        standard deviations too large by the factor `√(1 + ε²)`, that is by `ε²/2`. Of `K` samples the sum of the
        products `⟨Φζ, Φe⟩`, of mean zero, moves it by about `ε/√K`, too.

        `ε² = 2τ` is enough for the first. `SVRG`, whose tolerance is of `ε²` and judged by an estimate, takes a third
        of it. Krylov solvers, for which accuracy is cheap, take `ε = 2τ`, and so does `DualCG`. For `τ = 0.015` these
        are the defaults of the first two. `SGD` judges itself by its gradient; its tolerance shrinks in proportion.
        """
        error = min(2 * tolerance, 0.5)
        if self.method == "exact":
            return Dense()
        if self.method == "sgd":
            given = given if isinstance(given, SGD) else SGD(seed=seed)
            return replace(given, tolerance=given.tolerance * min(1.0, tolerance / _TOLERANCE))
        if self.method == "dual":
            given = given if isinstance(given, DualCG) else DualCG(seed=seed)
            rank = self.dual_rank if given.rank is None else given.rank
            return replace(given, rank=rank, tolerance=error if given.tolerance is None else given.tolerance)
        if self.method in FACTORED:
            return FactoredSampler(self.method, CG(error), seed)
        if self.method == "svrg":
            return SVRG(tolerance=error / 3, max_rank=self.rank, seed=seed)
        return CG(error) if self.short else BlockKrylov(error, max_basis=self.max_basis)

    def precondition(
        self, solver: Solver, operator: Callable[[], GGN], shift: float | None, num_rhs: int, seed: int
    ) -> Solver:
        """The solver with one preconditioner for every `α`: of `"dual"`, `"svrg"`, and `"cg"` where memory is short."""
        if isinstance(solver, SVRG):
            return solver.hold()
        if isinstance(solver, DualCG):
            ggn = operator()
            return solver.hold(WhitenedGram(torch.full((ggn.size,), 1 / (shift or 1.0), device=ggn.device), ggn))
        if self.rank == 0 or not isinstance(solver, CG):
            return solver
        preconditioner = Nystrom.of(
            operator(), block=min(16, self.rank), max_rank=self.rank, shift=shift, num_rhs=num_rhs, seed=seed
        )
        return replace(solver, preconditioner=preconditioner)

    def for_em(self, solver: Solver, num_samples: int) -> Solver:
        """The solver, in groups of rows where memory does not hold all of them."""
        if isinstance(solver, Dense | BlockKrylov):
            return solver
        rows = self.rows(_EM_STACKS * num_samples)
        return solver if rows >= num_samples else InGroups(solver, rows)

    def judge(self, solution: Any, solver: Solver) -> tuple[Tensor, float]:
        """What the solver judges its rows by, the error of the function or the gradient, and its tolerance."""
        if self.method == "ciq":
            return solution.residual, 0.1
        if isinstance(solver, SVRG):
            return solution.error, math.sqrt(solver.tolerance)
        if isinstance(solver, DualCG):
            return solution.error, solver.accuracy
        if isinstance(solver, BlockKrylov | CG):
            return solution.error, solver.tolerance
        return solution.residual, solver.tolerance if isinstance(solver, SGD) else 1e-6


def make_plan(
    method: str,
    features: Features,
    num_samples: int,
    max_memory: float | None,
    cost: Callable[[Features], Cost] | None = None,
    *,
    gram: bool = False,
    dual: bool = False,
) -> Plan:
    """The plan for a problem.

    Args:
        method: one of `METHODS`.
        features: `Φ`.
        num_samples: `K`.
        max_memory: in bytes; half of what is free by default.
        cost: measures products; `measure` by default, asked for `"auto"` only.
        gram: whether the exact method may work in observation space.
        dual: whether `"auto"` may take `"dual"`, as for Gaussian likelihoods.

    Raises:
        ValueError: if memory does not hold what the method cannot do without.
    """
    bytes_ = max_memory if max_memory is not None else 0.5 * free_memory(features.device)
    vector = features.size * torch.empty((), dtype=features.dtype).element_size()
    rows = features.num_data * features.num_outputs
    space = "observations" if gram and rows < features.size else "weights"
    exact_bytes = _exact_bytes(space, rows, features.size)
    allowed = bytes_ if max_memory is not None else min(_EXACT_BYTES, 2 * bytes_)  # all that is free
    if method == "exact" and exact_bytes > allowed:
        others = '"dual" (conjugate gradients in observation space), "cg"' if dual else '"cg"'
        raise ValueError(
            f'method="exact" would need about {size_of(exact_bytes)} for {features.num_data} data, '
            f"{features.num_outputs} outputs and {features.size} weights, more than the {size_of(allowed)} that it may "
            f'take; give more as `max_memory=`, or use method={others} or "sgd".'
        )
    rank = max(1, min(_DUAL_RANK, rows, int(_DUAL_SHARE * bytes_ / (8 * rows))))
    plan = Plan(method, "as asked for", bytes_ / vector, num_samples, dual_rank=rank)
    if method == "auto":
        measured = (cost or measure)(features)
        fits = exact_bytes <= min(_EXACT_BYTES, bytes_)
        chosen, reason = _choose(features, measured, plan, space, fits, dual)
        plan = replace(plan, method=chosen, reason=reason, cost=measured)
    if plan.method == "exact":
        where = f"P = {features.size} weights, N·C = {rows} observations"
        plan = replace(plan, space=space, reason=f"{plan.reason}, in the space of the {space} ({where})")
    needed = num_samples + _STACKS[plan.method]
    if plan.method != "exact" and plan.vectors < needed:
        raise ValueError(
            f"{'max_memory' if max_memory is not None else 'Half of the free memory'} of {bytes_:.3g} bytes holds "
            f"{plan.vectors:.0f} vectors of {features.size} weights, but {num_samples} samples and the solve of a "
            f'single one by method="{plan.method}" take {needed}, or {needed * vector:.3g} bytes. '
            "Give more memory, or lower `num_samples`."
        )
    if plan.method == "cg" and plan.short:
        plan = replace(plan, reason=f"{plan.reason}; memory holds no Krylov basis: preconditioned conjugate gradients")
    return plan


def _exact_bytes(space: str, rows: int, size: int) -> float:
    if space == "observations":
        return 8.0 * _GRAMS * rows**2 + min(BLOCK_BYTES, 8 * rows * size)
    return 8.0 * (rows * size + 3 * min(rows, size) ** 2)


def _exact_operations(space: str, num_data: int, rows: int, size: int, cost: Cost, gaussian: bool) -> float:
    if space == "observations":
        blocks = max(1.0, 16 * rows * size / BLOCK_BYTES)
        # One decomposition; but for a Gaussian likelihood, Newton's steps to the mode at each precision as well.
        dense = _EIGEN if gaussian else _EIGEN + _FACTORISATIONS / 3
        return rows * cost.vjp * (1 + blocks) / 2 + 2 * rows**2 * size + dense * rows**3
    smaller, larger = min(rows, size), max(rows, size)
    outputs = rows // num_data
    return num_data * min(outputs * cost.vjp, size * cost.jvp) + _FACTORISATIONS * (
        2 * smaller**2 * larger + smaller**3 / 3
    )


def _choose(features: Features, cost: Cost, plan: Plan, space: str, fits: bool, dual: bool) -> tuple[str, str]:
    """By size; where counts of operations differ much, by these."""
    num_data, rows, size = features.num_data, features.num_data * features.num_outputs, features.size
    smaller, jacobian = min(rows, size), rows * size
    exact = _exact_operations(space, num_data, rows, size, cost, gaussian=dual)
    krylov = _PASSES * num_data * (cost.jvp + cost.vjp)
    counts = f"about {exact:.1g} operations, against {krylov:.1g} of a few hundred passes"
    held = space == "weights"  # the Jacobian
    small = smaller <= _EXACT_SIZE and (jacobian <= _EXACT_JACOBIAN or not held)
    if fits and exact * _CHEAPER < krylov - _WORTH and not small:
        return "exact", f"products of this network are expensive: {counts}"
    if fits and small and not krylov * _CHEAPER < exact - _WORTH:
        also = f", and a Jacobian of {jacobian:.2g} numbers," if held else ""
        return "exact", f"a matrix of {smaller} rows{also} {'are' if held else 'is'} cheap"
    if num_data > _KRYLOV_DATA:
        rank = replace(plan, method="svrg").rank
        # It saves some passes of all samples, and factorises a matrix of four rows of data for each of its rank.
        saved, factorised = _SAVED * plan.num_samples * num_data * (cost.jvp + cost.vjp), 10 * (4 * rank) ** 3
        if rank >= _LEAST_BASIS and saved > _CHEAPER * factorised:
            return "svrg", f"{num_data} data: a few passes in mini-batches, preconditioned by {rank} vectors"
        return "sgd", f"{num_data} data: steps on few of them cost less than passes over all"
    if dual and plan.short and rows < size and plan.vectors >= plan.num_samples + _STACKS["dual"]:
        return "dual", f"memory holds no Krylov basis of weights, but vectors of N·C = {rows} observations"
    reason = f"{num_data} data: a few passes over all are cheap"
    if small and fits:
        reason += f", dense algebra would take {counts}"
    return "cg", reason if plan.short else f"{reason}, and memory holds {plan.max_basis} vectors"
