r"""Prior and noise precision at MacKay's fixed point, and the mode, from a few Krylov runs.

With `B` at the mode a change of `α` moves the mode, the mode moves `B`, and `B` moves the fixed point. So each round
expands the loss at the present weights, makes a run there, and goes to the fixed point of its curves.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath, FixedPoint
from laplace_sampling.evidence.dense_curves import DenseCurves, Spectrum
from laplace_sampling.evidence.expansion import Expansion, Point, expand
from laplace_sampling.evidence.krylov_curves import FixedPointGoal, KrylovRun, run_curves
from laplace_sampling.evidence.schedule import PROBES, Schedule
from laplace_sampling.evidence.secant import TRUSTED_FACTOR, Secant
from laplace_sampling.evidence.step import Step
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import NOISE_BOUNDS, PRECISION_BOUNDS, Bounds, check_bounds, clamped
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.progress import progress_bar
from laplace_sampling.solvers.solver import Afford, unlimited

__all__ = ["PathResult", "fit_path"]


@dataclass(frozen=True)
class PathResult:
    """What `fit_path` ends with: hyperparameters, mode `[P]` (unscaled), the curves, and a record of each round.

    `full` says that memory held too small a basis for the accuracy, `rounded` that products were not accurate enough
    for the prior precision that was found.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    mode: Float[Tensor, " P"]
    path: EvidencePath
    converged: bool
    full: bool
    rounded: bool
    history: list[Step]


# "Problems" below are nine fits of classifiers of 3 outputs and two of regressions, of 300 data and 200 weights whose
# curvature falls by a power law, with B at the network or at the mode, α started a factor of 30 off, and two seeds
# each: 4,460 passes in all, and a root mean square error of log α of 0.003 at a tolerance of 0.03.

# Standard errors of log α that successive rounds aim at: B moves with α, so that rounds far from the end need not be
# accurate. The last one aims at a third of the tolerance. Without coarse rounds the problems take 10,830 passes; halved
# targets take 4,430, and doubled ones 4,960.
_ROUNDS = (0.25, 0.08)
# A relative step of the mode that leaves an error of its square. Half and twice change nothing: log α converges last.
_NEAR = 0.15


@dataclass(frozen=True)
class _Outcome:
    """What the curves of a round say.

    Attributes:
        end: their fixed point.
        accurate: whether it is known to the tolerance.
        unsure: whether few probes have found none, so that a bound is not believed yet.
    """

    end: FixedPoint
    accurate: bool
    unsure: bool


@dataclass
class _Rounds:
    """The state between rounds; `play` makes one."""

    model: LinearModel
    prior: GaussianPrior
    tolerance: float
    precision_bounds: Bounds
    noise_bounds: Bounds
    exact: bool
    spectrum_of: Callable[[GGN], Spectrum] | None
    schedule: Schedule
    mode: Tensor
    afford: Afford = unlimited
    converged: bool = False
    full: bool = False
    rounded: bool = False
    warm: bool = False
    history: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        likelihood = self.model.likelihood
        self.quadratic = isinstance(likelihood, Gaussian)
        self.learn = isinstance(likelihood, Gaussian) and likelihood.learn
        # B moves with the mode, and the mode with α.
        self.moving = False
        self.secant = Secant(self.moving)
        self.warm = bool(self.mode.any())
        if self.warm:
            # Where it starts is where it ends, most likely: a coarse round would lead away from there.
            self.schedule.level = len(self.schedule.targets) - 1
        self.point = Point.of(self.model, self.prior, self.mode)
        self.mode_step = 0.0 if self.quadratic else 1.0
        self.path: EvidencePath | None = None
        # The factor by which the noise precision grew after the last run.
        self.factor = 1.0
        self._trace: float | None = None
        self._first_gradient = 0.0
        self._network_loss = self.model.total_loss(self.model.network_outputs)

    def play(self, seed: int, stream: int) -> None:
        started, before = time.perf_counter(), float(self.prior.precision)
        expansion = expand(self.model, self.prior, self.point)
        gradient = self._relative_gradient(expansion, before)
        run = self._run(expansion, before, seed, stream)
        self.path = run.path
        outcome = self._outcome(run.path, before)
        alpha = self._next(run.path, outcome, before)
        self.rounded = not run.carries(alpha) or self._rises_beyond(run, outcome.end)
        noise = self._update_noise(outcome)
        updated = self._updated(alpha, outcome.end)
        self.mode, passes = run.mode(alpha), run.path.passes
        if self.quadratic:
            # The curves hold everywhere: a run that is not accurate yet is repeated where it was made.
            updated = updated if outcome.accurate else before
        else:
            self._move_mode(updated)
            passes += 0.5
        self.prior = self.prior.with_precision(torch.tensor([updated], dtype=torch.float64))
        self._record(
            run.path,
            alpha,
            noise_precision=noise,
            mode_residual=gradient,
            passes=passes,
            seconds=time.perf_counter() - started,
        )
        self._judge(run, outcome, abs(math.log(updated / before)))

    def _relative_gradient(self, expansion: Expansion, alpha: float) -> float:
        """The norm of the gradient at the present weights, relative to that of the first round."""
        gradient = float((expansion.gradient + alpha * expansion.theta).norm())
        self._first_gradient = self._first_gradient or gradient
        return gradient / max(self._first_gradient, 1e-300)

    def _run(self, expansion: Expansion, before: float, seed: int, stream: int) -> KrylovRun | DenseCurves:
        if self.exact:
            return DenseCurves(expansion, self.spectrum_of)
        # The secant enlarges errors of the fixed point by 1/(1 − rate).
        accuracy = self.schedule.target * (1 - self.secant.rate)
        run = run_curves(
            expansion,
            Draws(self.schedule.num_probes, seed, stream),
            FixedPointGoal(partial(self._sought, before), accuracy),
            max_basis=self.schedule.max_basis,
            trace=self._trace,
            # The first round of a moving B does not need the trace to be accurate.
            find_trace=self.schedule.level > 0 or not self.moving,
            afford=self.afford,
        )
        if not self.moving:
            self._trace = run.trace
        return run

    def _fixed_point(self, path: EvidencePath) -> FixedPoint:
        return path.fixed_point(self.precision_bounds, self.learn, follow=not self.quadratic)

    def _sought(self, before: float, path: EvidencePath) -> FixedPoint:
        """Where curves are to be accurate: at their fixed point, or as far toward it as `_next` goes."""
        end = self._fixed_point(path)
        # At a bound of α hardly less than a basis of everything would do, and the next round has other curves.
        if math.isinf(end.error) and not self.schedule.last:
            trust = math.log(TRUSTED_FACTOR)
        elif self._holds_everywhere(end):
            return end
        else:
            trust = self.secant.trust(math.log(end.precision / before))
        move = clamped(math.log(end.precision / before), (-trust, trust))
        return replace(end, precision=before * math.exp(move))

    def _holds_everywhere(self, end: FixedPoint) -> bool:
        """Whether curves are good for every `α`: around zero weights they are; around a mode, near its own only."""
        return self.quadratic or (not self.history and not self.warm and math.isfinite(end.error))

    def _rises_beyond(self, run: KrylovRun | DenseCurves, end: FixedPoint) -> bool:
        """Whether the evidence is larger than at the fixed point where rounding begins to hide it."""
        if not (self.quadratic and self.precision_bounds[0] < run.least < end.precision):
            return False
        both = torch.tensor([run.least, end.precision], dtype=torch.float64)
        at_rounding, at_end = run.path.profile(both, self.learn).tolist()
        return at_rounding > at_end

    def _outcome(self, path: EvidencePath, before: float) -> _Outcome:
        end = self._fixed_point(path)
        error = self.secant.error(end.precision, before, end.error)
        at_bound = math.isinf(error)
        # A bound is believed if more probes than the first find no fixed point before it either.
        believed = at_bound and self.schedule.num_probes > PROBES
        accurate = path.exact or error <= 1.5 * self.schedule.targets[-1] or believed
        return _Outcome(end, accurate, at_bound and not self.schedule.last)

    def _next(self, path: EvidencePath, outcome: _Outcome, before: float) -> float:
        """`α` to go to."""
        end = outcome.end
        if outcome.unsure:
            # Curves of few probes may miss a fixed point where they are flat: one update instead, in trusted bounds.
            alpha = before / math.exp(float(path.mackay(torch.tensor([before], dtype=torch.float64))[0]))
            return clamped(alpha, (before / TRUSTED_FACTOR, before * TRUSTED_FACTOR))
        if self._holds_everywhere(end):
            return end.precision
        # An error of the mode is one of B.
        error = math.hypot(end.error, self.mode_step**2)
        return self.secant.next(end.precision, before, error, self.schedule.num_probes)

    def _updated(self, alpha: float, end: FixedPoint) -> float:
        """The prior precision, from `α` before the factor of the noise."""
        low, high = self.precision_bounds
        if self.learn and math.isinf(end.error):
            # The noise may have taken it off the bound that it ended at, where the evidence still points to.
            return high if end.precision > math.sqrt(low * high) else low
        return clamped(alpha * self.factor, self.precision_bounds)

    def _update_noise(self, outcome: _Outcome) -> list[float] | None:
        """Updates the noise precision and its `factor`; returns the one before."""
        likelihood = self.model.likelihood
        self.factor = 1.0
        if not isinstance(likelihood, Gaussian):
            return None
        noise = torch.as_tensor(likelihood.noise_precision).reshape(-1).tolist()
        if self.learn and outcome.accurate:
            updated = clamped(noise[0] * outcome.end.noise_factor, self.noise_bounds)
            self.model = self.model.with_likelihood(likelihood.with_precision(updated))
            self.factor = updated / noise[0]
        return noise

    def _move_mode(self, alpha: float) -> None:
        """Goes to the new mode, or as far toward it as lowers the objective."""
        proposal = Point.of(self.model, self.prior, self.mode)
        following = self.point.toward(self.model, proposal, alpha)
        self.mode_step, self.point = self.point.distance(self.model, following, alpha), following
        self.mode = following.theta

    def _judge(self, run: KrylovRun | DenseCurves, outcome: _Outcome, moved: float) -> None:
        """Decides whether rounds are at their end, or how the next one is made."""
        schedule = self.schedule
        # The secant has predicted most of what the move will change of the curvature; in a first round there is none.
        first = len(self.history) == 1
        changes = (1.0 if first else 0.3) * moved
        near = (self.warm or not first) and changes <= self.tolerance / 2 and self.mode_step <= _NEAR
        few = schedule.num_probes < schedule.wished and not outcome.accurate
        self.full = schedule.last and (run.full or few)
        settled = (self.quadratic or near) and outcome.accurate
        self.converged = schedule.last and settled and not (self.full or self.rounded)
        if schedule.last and not outcome.accurate:
            schedule.add_probes(outcome.end.error / (1 - self.secant.rate))
        if first and self.warm and moved > _ROUNDS[0]:
            schedule.level = 0  # the start is far off
        elif self.quadratic or outcome.unsure or moved <= 3 * schedule.target:
            schedule.refine()

    def _record(self, path: EvidencePath, alpha: float, **measured) -> None:
        at = torch.tensor([alpha], dtype=torch.float64)
        gamma, gamma_se = path.effective_dimension(at)
        step = Step(
            step=len(self.history) + 1,
            prior_precision=[alpha],
            new_prior_precision=self.prior.precision.tolist(),
            effective_dimension=gamma.tolist(),
            effective_dimension_se=None if path.exact else gamma_se.tolist(),
            mode_norm=path.mode_norm(at).tolist(),
            loss=float(path.data_fit(at)),
            network_loss=self._network_loss,
            **measured,
        )
        self.history.append(step)


def fit_path(
    model: LinearModel,
    prior: GaussianPrior,
    seed: int,
    stream: int,
    *,
    mode: Float[Tensor, "1 P"] | None = None,
    tolerance: float = 0.03,
    max_rounds: int = 12,
    max_probes: int = 256,
    precision_bounds: Bounds = PRECISION_BOUNDS,
    noise_bounds: Bounds = NOISE_BOUNDS,
    max_basis: int | None = None,
    exact: bool = False,
    spectrum_of: Callable[[GGN], Spectrum] | None = None,
    afford: Afford = unlimited,
    progress: bool = False,
    callback: Callable[[Step], object] | None = None,
) -> PathResult:
    r"""Prior precision (one group) and noise precision (one for all outputs) at MacKay's fixed point, by Krylov runs.

    With a Gaussian likelihood `B` is constant, and the fixed point of one run's curves is the answer. Else each round
    expands the loss around the present weights, makes one Krylov run there, and goes to the fixed point of its curves
    and to the mode at that `α`: a step of Newton's method for both, from weights of zero. Rounds go on until both stay.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale stays fixed.
        seed: of the probes.
        stream: likewise.
        mode: where the first round expands a loss that is not quadratic, in scaled coordinates; zero by default.
        tolerance: of `log α`.
        max_rounds: largest number of rounds.
        max_probes: likewise of probes.
        precision_bounds: bounds of `α`.
        noise_bounds: bounds of the noise precision.
        max_basis: largest number of vectors in memory.
        exact: all eigenvalues by dense algebra instead of Krylov runs.
        spectrum_of: finds these, by default `dense_spectrum`.
        afford: whether passes may be made; where not, the last round is the end.
        progress: show progress bars.
        callback: called with the record of each round.
    """
    check_bounds(precision_bounds, noise_bounds)
    # Curves that are exact or hold everywhere need no coarse rounds.
    known = isinstance(model.likelihood, Gaussian) or exact
    coarse = [] if known else [level for level in _ROUNDS if level > tolerance]
    schedule = Schedule([*coarse, tolerance / 3], max_probes, max_basis)
    prior = prior.to(model.features.device, model.features.dtype)
    zero = torch.zeros(1, model.features.size, device=model.features.device, dtype=model.features.dtype)
    # Around zero the start costs no product, and a quadratic is the same around every point.
    mode = zero if mode is None or model.likelihood.quadratic else mode.to(zero)
    settings = tolerance, precision_bounds, noise_bounds, exact, spectrum_of, schedule
    rounds = _Rounds(model, prior, *settings, mode, afford)
    with progress_bar("evidence" if progress else None, total=max_rounds, leave=True) as bar:
        while len(rounds.history) < max_rounds and not (rounds.converged or rounds.full or rounds.rounded):
            if rounds.history and not afford(schedule.least_passes):
                break
            rounds.play(seed, stream)
            last = rounds.history[-1]
            if callback is not None:
                callback(last)
            bar.update()
            bar.set_postfix(alpha=f"{last.new_prior_precision[0]:.3g}", gamma=f"{last.effective_dimension[0]:.3g}")
    assert rounds.path is not None
    mode, likelihood = (rounds.mode * rounds.prior.scale)[0], rounds.model.likelihood
    path = rounds.path if rounds.factor == 1 else rounds.path.rescaled(rounds.factor)
    ended = rounds.converged, rounds.full, rounds.rounded
    return PathResult(rounds.prior, likelihood, mode, path, *ended, rounds.history)
