r"""Krylov runs that give an `EvidencePath`: block Lanczos for the traces, and a solve for the mode at every `α`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath, FixedPoint
from laplace_sampling.evidence.expansion import Expansion, Point, expand
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.bounds import Bounds
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.basis import Basis
from laplace_sampling.solvers.quadrature import Quadrature, TraceEstimator
from laplace_sampling.solvers.solver import Afford, unlimited

__all__ = ["EvidenceGoal", "FixedPointGoal", "KrylovRun", "evidence_path", "run_curves", "traces_at_network"]

# "Problems" below are those of `fixed_point`. `Tr M` takes C VJPs a datum, C/2 products; it is computed for at most so
# many outputs, where that is no more than a few steps of the probes. Half and twice have no effect on the problems,
# which have one and three.
_TRACE_OUTPUTS = 64
# A basis is extended by a vector for every so many that it has, before curves are computed again. It saves time for
# large bases; half and twice cost about six percent more passes on the problems.
_LARGE = 50
# The error of a mode may stay as it is for at least so many vectors before it is given up. Half and twice have no
# effect on the problems: it ends runs on separable classes, whose mode has no end.
_PATIENCE = 100
# Steps of the probes that are always made. They take the leading eigenvectors out of the variance.
_FIRST_STEPS = 5
# Curves are right for `α` above this multiple of the rounding of products. On naval-propulsion-plant (UCI), for a
# network of 3,451 weights in float32, `γ` is too large by 10 % at a multiple of 6 and by 1.6 % at 60.
_CARRIED = 100
# The relative error of the mode by rounding that leaves `‖θ̄‖²` within the usual tolerance of `log α`, 0.03.
_MODE_ROUNDING = 0.015
# Residuals below this multiple of the unit of rounding, relative to the right-hand side, are noise. Half and twice have
# no effect on the problems.
_ROUNDING = 4


class KrylovRun:
    """Block Lanczos with reorthogonalisation, of probes for the traces and from `θ` and `∇ℓ` for the mode.

    Both share a basis if they share `B`. The mode's part grows by its residual at the present `α`: with `θ` and the
    gradient in the space, it converges as conjugate gradients from `θ` do, and faster by what the probes have found.

    Attributes:
        path: the curves, as of the last `update`.
        trace: `Tr M`, if it is known.
        full: whether `max_basis` has stopped the run.
        rounding: the error of products, in units of eigenvalues of `M`, as far as it shows.
        fit_vectors: the number of vectors that were added for the mode.
    """

    def __init__(
        self, expansion: Expansion, probes: Float[Tensor, "R P"], trace: float | None, max_basis: int | None
    ) -> None:
        self.expansion, self.probes, self.max_basis = expansion, probes, max_basis
        self.joint = expansion.operator is expansion.at_mode
        self.fit_basis = Basis(expansion.at_mode)
        self.fit_basis.extend(torch.cat([expansion.theta[expansion.theta.any(1)], expansion.gradient]))
        self.basis = self.fit_basis if self.joint else Basis(expansion.operator)
        product = torch.zeros_like(expansion.theta)
        if bool(expansion.theta.any()):
            # θ lies in the basis: its product has been made.
            product = self.fit_basis.combine_products(self.fit_basis.project(expansion.theta))
        self.rhs, self._start = expansion.complete(product)
        self.trace, self._trace_passes = trace, 0.0
        self._estimator: TraceEstimator | None = None
        self._traces = expansion.path.traces
        self._fit = Quadrature.of(self.fit_basis, self.rhs, self.fit_basis.size)
        # Whether a space is invariant, so that nothing can be added to it.
        self._exact = self._fit_exact = False
        self.full, self.fit_vectors, self.path = False, 0, self._start
        self.rounding = 0.0

    def find_trace(self) -> None:
        """Computes `Tr M`, if it is not known and costs few products."""
        outputs = self.expansion.operator.features.num_outputs
        if self.trace is None and outputs <= _TRACE_OUTPUTS:
            self.trace, self._trace_passes = self.expansion.operator.trace(), outputs / 2

    @property
    def steps(self) -> int:
        return 0 if self._estimator is None else self._estimator.steps

    @property
    def nearly_exhausted(self) -> bool:
        """Whether a step has added less than a block: few more products then make the traces exact."""
        return self._estimator is not None and self._estimator.width < len(self.probes)

    def grow_traces(self) -> bool:
        """Makes a block step of the probes; returns whether it added anything."""
        self._estimator = self._estimator or TraceEstimator(self.basis, self.probes, self.trace)
        if self._exact or not self._has_room(self._estimator.width):
            return False
        self._exact = not self._estimator.step()
        self._traces = self._estimator.quadrature or self._traces
        return not self._exact

    def grow_fit(self, alpha: float) -> bool:
        """Adds a vector for the mode at some `α`, or a few to a large basis; returns whether there was a new one."""
        # Curves are computed from all of the basis, which takes longer than a product where the basis is large.
        num, before = 1 + self.fit_basis.size // _LARGE, self.fit_vectors
        while self.fit_vectors < before + num and self._add_residual(alpha):
            pass
        return self.fit_vectors > before

    def _add_residual(self, alpha: float) -> bool:
        if self._fit_exact or not self._has_room(1):
            return False
        residual = self._residual(alpha)[0]
        # What rounding leaves has no new direction; at other `α` there may be one.
        if not residual.norm() > _ROUNDING * torch.finfo(residual.dtype).eps * self.rhs.norm():
            return False
        if not self.fit_basis.extend(residual):
            self._fit_exact = True
            return False
        self.fit_vectors += 1
        return True

    def _has_room(self, num: int) -> bool:
        total = self.basis.size + (0 if self.joint else self.fit_basis.size)
        if self.max_basis is not None and total + num > self.max_basis:
            self.full = True
        return not self.full

    def update(self) -> None:
        """Brings `path` to the present basis."""
        passes = self._trace_passes + self.expansion.path.passes + self.basis.passes
        self.rounding = max(basis.indefiniteness for basis in {self.basis, self.fit_basis})
        if len(self._fit.nodes) < self.fit_basis.size:
            before = replace(self._fit, before=None)
            fit = Quadrature.of(self.fit_basis, self.rhs, self.fit_basis.size)
            self._fit = replace(fit, truncated=before, before=before)
        exact_fit = self._fit_exact or (self.joint and self._exact)
        self.path = replace(
            self._start,
            traces=self._traces,
            fit=replace(self._fit, truncated=None) if exact_fit else self._fit,
            passes=passes if self.joint else passes + self.fit_basis.passes,
            full=self.full,
        )

    def _solve(self, alpha: float) -> Float[Tensor, "1 m"]:
        return self._solved(alpha, self.fit_basis.project(self.rhs))

    def _solved(self, alpha: float, rhs: Float[Tensor, "1 m"]) -> Float[Tensor, "1 m"]:
        T = self.fit_basis.T
        inner = T + alpha * torch.eye(len(T), dtype=T.dtype, device=T.device)
        return torch.linalg.solve(inner, rhs.T).T

    def _residual(self, alpha: float) -> tuple[Float[Tensor, "1 P"], Float[Tensor, "1 P"]]:
        y = self._solve(alpha)
        theta = self.fit_basis.combine(y)
        return self.rhs - self.fit_basis.combine_products(y) - alpha * theta, theta

    def missing_evidence(self, alpha: float) -> float:
        """Bound of what the mode's part of the evidence lacks, `½ rᵀ(M + α)⁻¹r ≤ ½ ‖r‖²/α`."""
        return 0.5 * float(self._residual(alpha)[0].norm()) ** 2 / alpha

    def fit_error(self, alpha: float) -> float:
        """Bound of the error of the mode in the norm of `M + α`, relative to its norm in that of the prior."""
        residual, theta = self._residual(alpha)
        return float(residual.norm() / (alpha * theta.norm()).clamp_min(1e-300))

    @property
    def least(self) -> float:
        """The smallest `α` at which rounding leaves the curves of the traces as they are."""
        return _CARRIED * self.rounding

    def carries(self, alpha: float) -> bool:
        """Whether products are accurate enough for the curves at some `α`."""
        return alpha >= self.least and self._mode_rounding(alpha) <= _MODE_ROUNDING

    def _mode_rounding(self, alpha: float) -> float:
        """The relative error of the mode by that part of its residual which would be zero without rounding."""
        residual, theta = self._residual(alpha)
        error = self._solved(alpha, self.fit_basis.project(residual))
        return float(error.norm() / theta.double().norm().clamp_min(1e-300))

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        """`(M + α)⁻¹ b`, in the scaled coordinates of the prior."""
        return self.fit_basis.combine(self._solve(alpha)) * self.expansion.white


class Goal(Protocol):
    """How accurate a run has to be."""

    def missing(self, run: KrylovRun) -> tuple[bool, list[float]]:
        """Whether the traces need another step, and the `α` at which the mode needs another vector."""
        ...


class EvidenceGoal:
    """The evidence at some `α` to a relative accuracy; these `α` are a function of the curves."""

    def __init__(self, alphas: Callable[[EvidencePath], Tensor], accuracy: float) -> None:
        self.alphas, self.accuracy = alphas, accuracy

    def missing(self, run: KrylovRun) -> tuple[bool, list[float]]:
        alphas = self.alphas(run.path)
        traces, fit = run.path.remaining_of_evidence(alphas)
        sizes = run.path.log_marginal_likelihood(alphas)[0].abs().tolist()
        # A comparison with NaN is false: a change that cannot be computed is not small.
        inaccurate = [
            alpha
            for alpha, size in zip(alphas.tolist(), sizes, strict=True)
            if not fit < self.accuracy or run.missing_evidence(alpha) / size > self.accuracy
        ]
        return not traces < self.accuracy, inaccurate


class DeterminantGoal:
    """`log|I + M/α|` at some `α` to a relative accuracy, without a mode."""

    def __init__(self, alphas: Tensor, accuracy: float) -> None:
        self.alphas, self.accuracy = alphas, accuracy

    def missing(self, run: KrylovRun) -> tuple[bool, list[float]]:
        value, change = run.path.log_determinant_and_change(self.alphas)
        return not bool((change < self.accuracy * value).all()), []


class FixedPointGoal:
    """A fixed point to an accuracy of `log α`; `sought` gives it as a function of the curves."""

    def __init__(self, sought: Callable[[EvidencePath], FixedPoint], accuracy: float) -> None:
        self.sought, self.accuracy = sought, accuracy
        self._error, self._progress = math.inf, Progress()

    def missing(self, run: KrylovRun) -> tuple[bool, list[float]]:
        end = self.sought(run.path)
        if run.steps >= _FIRST_STEPS and not run.carries(end.precision):
            return False, []  # more steps would resolve what is rounding
        alpha, needed = end.precision, self.accuracy * end.slope
        traces, fit = run.path.remaining(alpha)
        error = run.fit_error(alpha)
        self._progress.see(alpha, error, run.fit_vectors)
        inaccurate = not fit < needed or error > needed
        deeper = self._pays(run.steps, end.error)
        return deeper or not traces < needed, [alpha] if inaccurate and not self._progress.stalled else []

    def _pays(self, steps: int, error: float) -> bool:
        """Whether another step reduces the error of the traces more than the same number of products of new probes."""
        before, self._error = self._error, error
        # With probes the error goes down as the root of the products.
        return self.accuracy < error and (steps < _FIRST_STEPS or error < before * math.sqrt(1 - 1 / steps))


class Progress:
    """Tells whether the error of a mode still goes down as vectors are added for it.

    At an `α` that is far too small, as where classes are separable, the mode may need nearly as many vectors as there
    are weights, and each takes longer than the last.
    """

    def __init__(self) -> None:
        self.alpha, self.least, self.num, self.stalled = math.nan, math.inf, 0, False

    def see(self, alpha: float, error: float, num: int) -> None:
        """The error after so many vectors; errors at `α` that differ by more than a factor of two are not compared."""
        moved = not 0.5 < alpha / self.alpha < 2
        if moved or error < self.least / 2:
            self.alpha, self.least, self.num = alpha if moved else self.alpha, error, num
        self.stalled = num > 2 * max(self.num, _PATIENCE)


def run_curves(
    expansion: Expansion,
    draws: Draws,
    goal: Goal,
    *,
    max_basis: int | None,
    trace: float | None = None,
    find_trace: bool = True,
    afford: Afford = unlimited,
) -> KrylovRun:
    """A run that goes on until the curves reach a goal, or until nothing can be added.

    Args:
        expansion: the loss around a point.
        draws: of the probes.
        goal: the accuracy.
        max_basis: largest number of vectors in memory.
        trace: `Tr M`, if it is known.
        find_trace: whether to compute it otherwise.
        afford: the run ends where the passes of another step are not allowed.
    """
    probes = draws.prior(expansion.path.size).to(expansion.theta)
    # Of equal norms: the variance of an estimate is then that of directions alone.
    probes = probes * (math.sqrt(expansion.path.size) / probes.norm(dim=1, keepdim=True))
    run = KrylovRun(expansion, probes, trace, max_basis)
    if find_trace:
        run.find_trace()
    for _ in range(2):  # the fewest steps of which the last one's change is known
        run.grow_traces()
    grown = True
    while grown and afford(len(probes)):
        run.update()
        traces_needed, alphas = goal.missing(run)
        grown = (traces_needed or run.nearly_exhausted) and run.grow_traces()
        for alpha in alphas:
            grown = run.grow_fit(alpha) or grown
    run.update()
    return run


def evidence_path(
    model: LinearModel,
    prior: GaussianPrior,
    draws: Draws,
    mode: Float[Tensor, "1 P"],
    *,
    accuracy: float,
    decades: float | None = None,
    learn_noise: bool = False,
    bounds: Bounds = (1e-8, 1e12),
    max_basis: int | None = None,
) -> tuple[EvidencePath, Callable[[float], Float[Tensor, "1 P"]]]:
    """The curves around a mode (in scaled coordinates), from one Krylov run, and the mode as a function of `α`.

    Args:
        model: the linear model on the training data.
        prior: its precision is where the run is made; several groups are scaled together.
        draws: of the probes.
        mode: around which a loss that is not quadratic is expanded.
        accuracy: relative, of the change that further Lanczos steps would make: of `γ` and `‖θ̄‖²` at the fixed point;
            or, with `decades`, of the evidence at the precision of the prior and so many decades to both sides of it.
        decades: see `accuracy`.
        learn_noise: as for `EvidencePath.fixed_point`.
        bounds: of the prior precision.
        max_basis: largest number of vectors in memory.
    """

    def ends(path: EvidencePath) -> Tensor:
        assert decades is not None
        return path.at * torch.tensor([10.0**-decades, 1.0, 10.0**decades], dtype=torch.float64)

    def fixed_point(path: EvidencePath) -> FixedPoint:
        return path.fixed_point(bounds, learn_noise, follow=not isinstance(model.likelihood, Gaussian))

    goal = FixedPointGoal(fixed_point, accuracy) if decades is None else EvidenceGoal(ends, accuracy)
    expansion = expand(model, prior, Point.of(model, prior, mode))
    run = run_curves(expansion, draws, goal, max_basis=max_basis)
    return run.path, run.mode


def traces_at_network(
    model: LinearModel,
    prior: GaussianPrior,
    draws: Draws,
    accuracy: float,
    decades: float,
    max_basis: int | None = None,
) -> EvidencePath:
    """Curves of the traces of the curvature at the network's outputs, from one Krylov run; of no mode.

    Args:
        model: the linear model on the training data.
        prior: its precision is where the run is made; several groups are scaled together.
        draws: of the probes.
        accuracy: relative, of the change of the log determinant by further Lanczos steps.
        decades: to both sides of the precision of the prior, where it is that accurate.
        max_basis: largest number of vectors in memory.
    """
    at = Point.of(model, prior, torch.zeros_like(prior.scale)[None])
    expansion = expand(model, prior, at)
    ends = expansion.path.at * torch.tensor([10.0**-decades, 1.0, 10.0**decades], dtype=torch.float64)
    return run_curves(expansion, draws, DeterminantGoal(ends, accuracy), max_basis=max_basis).path
