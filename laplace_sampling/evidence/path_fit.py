r"""Prior and noise precision at MacKay's fixed point, and the mode, from a few Krylov runs."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.evidence.curves import EvidencePath, FixedPoint
from laplace_sampling.evidence.em import EMStep, check_bounds
from laplace_sampling.evidence.expansion import ExactRun, Point, Run, expand, run_curves, total_loss
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior

__all__ = ["PathResult", "fit_path"]


@dataclass(frozen=True)
class PathResult:
    """What `fit_path` ends with: hyperparameters, mode `[P]` (unscaled), the curves, and a record of each round.

    `full` tells that the memory held too small a basis for the accuracy.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    mode: Float[Tensor, " P"]
    path: EvidencePath
    converged: bool
    full: bool
    history: list[EMStep]


# Standard errors of log α that successive rounds of `fit_path` aim at: B moves with α, and rounds far from the end
# need not be exact. The last one is a third of the tolerance.
_ROUNDS = (0.25, 0.08)
# Probes of the last round, to begin with: each of them sees the Krylov spaces of all others.
_PROBES = 12
# Within this factor of the present α the expansion at the mode is trusted.
_TRUSTED = 4.0
# By what a round shrinks the distance to the end where B is at the mode: mean and spread of what was seen in practice,
# between which and what is measured `_Secant` weighs.
_RATE, _RATE_SPREAD = 0.37, 0.1
# Fixed points by the same probes have most of their errors in common.
_OWN = 0.3
# A step of the mode of this length, relative, leaves an error of at most its square.
_NEAR = 0.15
# By how many probes at most a round's are multiplied for the next.
_MORE_PROBES = 3


class _Secant:
    """The next `α` while `B` moves with it, from the fixed points of the curves of earlier rounds.

    Where only the mode moves, curves around it are right to first order, and the fixed point needs no correction.
    """

    def __init__(self, moving: bool) -> None:
        self.rate, self.spread = (_RATE, _RATE_SPREAD) if moving else (0.0, 0.0)
        self.visited: list[tuple[float, float, float, int]] = []
        self.beyond: list[float] = []

    def next(self, fixed_point: float, before: float, error: float, num_probes: int) -> float:
        """`α` to go to, from the fixed point of curves made at `before`, whose standard error (of `log α`) is given."""
        x, s = math.log(before), math.log(fixed_point)
        trust = self.trust(s - x)
        if trust == math.log(_TRUSTED):
            self.beyond = []
        if abs(s - x) > trust:
            # Farther off than the curves hold: go so far, and twice as far (in log α) if that was not enough.
            self.visited.clear()
            self.beyond.append(s - x)
            return math.exp(x + math.copysign(trust, s - x))
        self.beyond.clear()
        self.visited.append((x, s, error, num_probes))
        if self.spread > 0 and len(self.visited) > 1:
            self._measure(*self.visited[-2:])
        return math.exp(s + self.rate / (1 - self.rate) * (s - x))

    def trust(self, move: float) -> float:
        """How far curves are believed, in `log α`: farther each time that was not far enough, in one direction."""
        onward = self.beyond and self.beyond[-1] * move >= 0
        return math.log(_TRUSTED) * (2 ** len(self.beyond) if onward else 1)

    def _measure(self, last: tuple[float, float, float, int], this: tuple[float, float, float, int]) -> None:
        noise = math.hypot(last[2], this[2]) * (_OWN if last[3] == this[3] else 1.0)
        moved = this[0] - last[0]
        weight = (self.spread * moved) ** 2
        if weight > 0 and math.isfinite(noise):
            weight /= weight + noise**2
            self.rate += weight * ((this[1] - last[1]) / moved - self.rate)
            self.rate = min(max(self.rate, -0.9), 0.7)

    def error(self, fixed_point: float, before: float, error: float) -> float:
        """Standard error of `log α` after `next`."""
        return math.hypot(error, self.spread * math.log(fixed_point / before) / (1 - self.rate)) / (1 - self.rate)


@dataclass
class _Schedule:
    """How accurate a round is to be, and by how many probes: more of both as rounds settle."""

    targets: list[float]
    max_probes: int
    max_basis: int | None
    level: int = 0
    _last_probes: int = _PROBES

    @property
    def last(self) -> bool:
        return self.level == len(self.targets) - 1

    @property
    def target(self) -> float:
        return self.targets[self.level]

    @property
    def wished(self) -> int:
        return min(self._last_probes if self.last else 2 * (self.level + 1), self.max_probes)

    @property
    def num_probes(self) -> int:
        return self.wished if self.max_basis is None else min(self.wished, self.max_basis // 4)

    def add_probes(self, error: float) -> None:
        factor = min(max(error / self.targets[-1], 1) ** 2, _MORE_PROBES)
        self._last_probes = math.ceil(self._last_probes * factor)

    def refine(self) -> None:
        self.level = min(self.level + 1, len(self.targets) - 1)


@dataclass
class _Rounds:
    """The state between rounds; `play` is one."""

    model: LinearModel
    prior: GaussianPrior
    hessian_at: str
    tolerance: float
    precision_bounds: tuple[float, float]
    noise_bounds: tuple[float, float]
    exact: bool
    schedule: _Schedule
    converged: bool = False
    full: bool = False
    history: list[EMStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        likelihood, features = self.model.likelihood, self.model.features
        self.quadratic = isinstance(likelihood, Gaussian)
        self.learn = isinstance(likelihood, Gaussian) and likelihood.learn
        # B moves with the mode, and the mode with α.
        self.moving = not self.quadratic and self.hessian_at == "mode"
        self.secant = _Secant(self.moving)
        self.mode = torch.zeros(1, features.size, device=features.device, dtype=features.dtype)
        self.point = Point.of(self.model, self.prior, self.mode)
        self.step = 0.0 if self.quadratic else 1.0
        self.path: EvidencePath | None = None
        # By how much the noise precision grew after the last run.
        self.factor = 1.0
        self._trace: float | None = None
        self._first_gradient = 0.0
        self._network_loss = total_loss(self.model, self.model.network_outputs)

    def play(self, seed: int, stream: int) -> None:
        started, before = time.perf_counter(), float(self.prior.precision)
        run, gradient = self._run(before, seed, stream)
        self.path = path = run.path
        end = self._fixed_point(path)
        error = self.secant.error(end.precision, before, end.error)
        # A bound is believed if more probes find no fixed point before it either.
        unseen = math.isinf(error)
        accurate = (
            path.exact or error <= 1.5 * self.schedule.targets[-1] or (unseen and self.schedule.num_probes > _PROBES)
        )
        unsure = unseen and not self.schedule.last
        alpha = self._next(path, end, before, unsure)
        noise, self.factor = self._update_noise(end, accurate)
        updated = min(max(alpha * self.factor, self.precision_bounds[0]), self.precision_bounds[1])
        passes = path.passes
        self.mode = run.mode(alpha)
        if self.quadratic:
            # The curves hold everywhere: a run that is not accurate yet is made again where it was.
            updated = updated if accurate else before
        else:
            self._move(updated)
            passes += 0.5
        self.prior = self.prior.with_precision(torch.tensor([updated], dtype=torch.float64))
        self._record(alpha, before, noise, gradient, passes, time.perf_counter() - started)
        self._judge(run, end, abs(math.log(updated / before)), accurate, unsure)

    def _run(self, before: float, seed: int, stream: int) -> tuple[Run | ExactRun, float]:
        """The run of this round, and the gradient it starts from, relative to the first round's."""
        expansion = expand(self.model, self.prior, self.point, self.hessian_at)
        gradient = float((expansion.gradient + before * expansion.theta).norm())
        self._first_gradient = self._first_gradient or gradient
        relative = gradient / max(self._first_gradient, 1e-300)
        if self.exact:
            return ExactRun(expansion), relative
        run = run_curves(
            expansion,
            Draws(self.schedule.num_probes, seed, stream),
            partial(self._sought, before),
            self.schedule.target * (1 - self.secant.rate),
            max_basis=self.schedule.max_basis,
            trace=self._trace,
            find_trace=self.schedule.level > 0 or not self.moving,
        )
        if not self.moving:
            self._trace = run.trace
        return run, relative

    def _fixed_point(self, path: EvidencePath) -> FixedPoint:
        return path.fixed_point(self.precision_bounds, self.learn, follow=not self.quadratic)

    def _sought(self, before: float, path: EvidencePath) -> FixedPoint:
        """Where curves are to be accurate: at their fixed point, or as far toward it as `_next` goes.

        At a bound of `α` hardly less than a basis of everything would do, and the next round has other curves.
        """
        at = self._fixed_point(path)
        if math.isinf(at.error) and not self.schedule.last:
            trust = math.log(_TRUSTED)
        elif self.quadratic or (not self.history and math.isfinite(at.error)):
            return at
        else:
            trust = self.secant.trust(math.log(at.precision / before))
        move = min(max(math.log(at.precision / before), -trust), trust)
        return replace(at, precision=before * math.exp(move))

    def _next(self, path: EvidencePath, end: FixedPoint, before: float, unsure: bool) -> float:
        """`α` to go to.

        Curves around zero weights are good for every `α`, those around a mode only near its own; and curves of few
        probes may miss a fixed point where they are flat.
        """
        if unsure:
            alpha = before / math.exp(float(path.mackay(torch.tensor([before], dtype=torch.float64))[0]))
            return min(max(alpha, before / _TRUSTED), before * _TRUSTED)
        if self.quadratic or (not self.history and math.isfinite(end.error)):
            return end.precision
        # An error of the mode is one of B.
        error = math.hypot(end.error, self.step**2)
        return self.secant.next(end.precision, before, error, self.schedule.num_probes)

    def _update_noise(self, end: FixedPoint, accurate: bool) -> tuple[list[float], float]:
        """The noise precision before, and the factor by which it grows."""
        likelihood = self.model.likelihood
        if not isinstance(likelihood, Gaussian):
            return [], 1.0
        noise = torch.as_tensor(likelihood.noise_precision).reshape(-1).tolist()
        if not (self.learn and accurate):
            return noise, 1.0
        kept = min(max(noise[0] * end.noise_factor, self.noise_bounds[0]), self.noise_bounds[1])
        self.model = self.model.with_likelihood(likelihood.with_precision(kept))
        return noise, kept / noise[0]

    def _move(self, alpha: float) -> None:
        """To the new mode, or as far toward it as lowers the objective."""
        proposal = Point.of(self.model, self.prior, self.mode)
        following = self.point.toward(self.model, proposal, alpha)
        self.step, self.point = self.point.distance(self.model, following, alpha), following
        self.mode = following.theta

    def _judge(self, run: Run | ExactRun, end: FixedPoint, moved: float, accurate: bool, unsure: bool) -> None:
        """Whether rounds are at their end, or how the next one is to be made."""
        schedule = self.schedule
        # The secant has taken most of what the curvature will change by the move.
        near = len(self.history) > 1 and 0.3 * moved <= self.tolerance / 2 and self.step <= _NEAR
        self.full = schedule.last and (run.full or (schedule.num_probes < schedule.wished and not accurate))
        self.converged = schedule.last and (self.quadratic or near) and accurate and not self.full
        if schedule.last and not accurate:
            schedule.add_probes(end.error / (1 - self.secant.rate))
        if self.quadratic or unsure or moved <= 3 * schedule.target:
            schedule.refine()

    def _record(
        self, alpha: float, before: float, noise: list[float], gradient: float, passes: float, seconds: float
    ) -> None:
        assert self.path is not None
        at = torch.tensor([alpha], dtype=torch.float64)
        gamma, gamma_se = self.path.effective_dimension(at)
        self.history.append(
            EMStep(
                step=len(self.history) + 1,
                prior_precision=[before],
                new_prior_precision=self.prior.precision.tolist(),
                noise_precision=noise,
                effective_dimension=gamma.tolist(),
                effective_dimension_se=gamma_se.tolist(),
                mode_norm=self.path.mode_norm(at).tolist(),
                loss=float(self.path.data_fit(at)),
                network_loss=self._network_loss,
                mode_residual=gradient,
                sample_residual=0.0,
                passes=passes,
                seconds=seconds,
            )
        )


def fit_path(
    model: LinearModel,
    prior: GaussianPrior,
    seed: int,
    stream: int,
    *,
    hessian_at: str,
    tolerance: float = 0.03,
    max_rounds: int = 12,
    max_probes: int = 256,
    precision_bounds: tuple[float, float] = (1e-8, 1e12),
    noise_bounds: tuple[float, float] = (1e-12, 1e12),
    max_basis: int | None = None,
    exact: bool = False,
    progress: bool = False,
    callback: Callable[[EMStep], object] | None = None,
) -> PathResult:
    r"""Prior precision (one group) and noise precision (one for all outputs) at MacKay's fixed point, by Krylov runs.

    With a Gaussian likelihood `B` is constant, and the fixed point of one run's curves is the answer. Else each round
    expands the loss around the present weights, makes one Krylov run there, and goes to the fixed point of its curves
    and to the mode at that `α`: a step of Newton's method for the mode, from the weights where all are zero, together
    with one for `α`. Rounds go on until both stay, with more probes as they settle.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale stays fixed.
        seed: of the probes.
        stream: likewise.
        hessian_at: `"network"` or `"mode"`.
        tolerance: of `log α`.
        max_rounds: at most so many.
        max_probes: at most so many probes.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which the noise precision is kept.
        max_basis: vectors in memory at most.
        exact: all eigenvalues by dense algebra instead of Krylov runs.
        progress: show progress bars.
        callback: called with the record of each round.
    """
    check_bounds(precision_bounds, noise_bounds)
    known = isinstance(model.likelihood, Gaussian) or exact
    coarse = [] if known else [level for level in _ROUNDS if level > tolerance]
    rounds = _Rounds(
        model,
        prior.to(model.features.device, model.features.dtype),
        hessian_at,
        tolerance,
        precision_bounds,
        noise_bounds,
        exact,
        _Schedule([*coarse, tolerance / 3], max_probes, max_basis),
    )
    with tqdm(total=max_rounds, desc="evidence", disable=not progress) as bar:
        while len(rounds.history) < max_rounds and not (rounds.converged or rounds.full):
            rounds.play(seed, stream)
            last = rounds.history[-1]
            if callback is not None:
                callback(last)
            bar.update()
            bar.set_postfix(alpha=f"{last.new_prior_precision[0]:.3g}", gamma=f"{last.effective_dimension[0]:.3g}")
    assert rounds.path is not None
    mode = (rounds.mode * rounds.prior.scale)[0]
    path = rounds.path if rounds.factor == 1 else rounds.path.rescaled(rounds.factor)
    return PathResult(rounds.prior, rounds.model.likelihood, mode, path, rounds.converged, rounds.full, rounds.history)
