"""The next prior precision while the curvature moves with it, by the secant method."""

import math
from dataclasses import dataclass

__all__ = ["TRUSTED_FACTOR", "Secant"]

# The expansion at the mode is trusted within this factor of the present α. On the problems of `fixed_point` 2 changes
# the passes by one percent and doubles the error, within the tolerance; 8 has no effect.
TRUSTED_FACTOR = 4.0
# The factor by which a round shrinks the distance to the end where B is at the mode: mean and spread of what was seen
# in practice. `Secant` weighs between them and what it measures. On the problems of `fixed_point` half the mean
# takes ten percent fewer passes, and at twice the mean 7 of 22 fits do not converge; half and twice the spread change
# the passes by less than four percent.
_RATE, _RATE_SPREAD = 0.37, 0.1
# The part of the error that two fixed points of the same probes do not have in common. Half and twice change no number
# of passes on the problems, and the error from 0.0032 to 0.0036 and 0.0041.
_UNSHARED = 0.3


@dataclass(frozen=True)
class _Visit:
    """A round: `log α` at which curves were made, that of their fixed point, its standard error, and the probes."""

    start: float
    end: float
    error: float
    num_probes: int


class Secant:
    """The next `α` while `B` moves with it, from the fixed points of the curves of earlier rounds.

    If the fixed point of curves made at `x` is `s(x)`, the end is where `s(x) = x`; `rate` estimates the slope of `s`.
    Where only the mode moves, curves around it are right to first order, and the slope is zero.
    """

    def __init__(self, moving: bool) -> None:
        self.rate, self.spread = (_RATE, _RATE_SPREAD) if moving else (0.0, 0.0)
        self.visited: list[_Visit] = []
        self.beyond: list[float] = []

    def next(self, fixed_point: float, before: float, error: float, num_probes: int) -> float:
        """`α` to go to, from the fixed point of curves made at `before`, and the standard error of its `log α`."""
        x, s = math.log(before), math.log(fixed_point)
        trust = self.trust(s - x)
        if trust == math.log(TRUSTED_FACTOR):
            self.beyond = []
        if abs(s - x) > trust:
            # The fixed point is farther off than the curves hold: the move ends where they are trusted to.
            self.visited.clear()
            self.beyond.append(s - x)
            return math.exp(x + math.copysign(trust, s - x))
        self.beyond.clear()
        self.visited.append(_Visit(x, s, error, num_probes))
        if self.spread > 0 and len(self.visited) > 1:
            self._measure(*self.visited[-2:])
        # Where the line of this slope through (x, s) meets the diagonal.
        return math.exp(s + self.rate / (1 - self.rate) * (s - x))

    def trust(self, move: float) -> float:
        """The largest trusted move of `log α`, which doubles each time that it was too small in the same direction."""
        onward = self.beyond and self.beyond[-1] * move >= 0
        return math.log(TRUSTED_FACTOR) * (2 ** len(self.beyond) if onward else 1)

    def _measure(self, last: _Visit, this: _Visit) -> None:
        """Updates the rate by the slope between two rounds, weighted by inverse variances."""
        noise = math.hypot(last.error, this.error) * (_UNSHARED if last.num_probes == this.num_probes else 1.0)
        moved = this.start - last.start
        weight = (self.spread * moved) ** 2
        if weight > 0 and math.isfinite(noise):
            weight /= weight + noise**2
            self.rate += weight * ((this.end - last.end) / moved - self.rate)
            self.rate = min(max(self.rate, -0.9), 0.7)

    def error(self, fixed_point: float, before: float, error: float) -> float:
        """Standard error of `log α` after `next`."""
        return math.hypot(error, self.spread * math.log(fixed_point / before) / (1 - self.rate)) / (1 - self.rate)
