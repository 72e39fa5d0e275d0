r"""The evidence of a regression as a function of `α` and `b`, from one eigendecomposition, and its largest maximum.

With the eigenvalues `λ` of `R^{-1/2} K R^{-1/2}`, the targets `c` along its eigenvectors and `v = λ/α + 1/b` (thesis
eq. 2.43–2.46; Rasmussen & Williams 2006, ch. 5)

    log p(y) = −½ Σ_j (log v_j + c_j²/v_j) − ½ log|R| − ½ N·C log 2π          γ = Σ_j (λ_j/α) / v_j

in `O(N·C)` for each `(α, b)`.
"""

import math
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.bounds import (
    NOISE_BOUNDS,
    PRECISION_BOUNDS,
    Bounds,
    check_bounds,
    clamped,
    is_at_bound,
)

__all__ = [
    "HyperparameterBounds",
    "Optimum",
    "RegressionEvidence",
    "largest_evidence",
]


@dataclass(frozen=True)
class HyperparameterBounds:
    """The bounds within which a search keeps `α` (`precision`) and `b` (`noise`)."""

    precision: Bounds = PRECISION_BOUNDS
    noise: Bounds = NOISE_BOUNDS

    def __post_init__(self) -> None:
        check_bounds(self.precision, self.noise)


@dataclass(frozen=True)
class Optimum:
    r"""Hyperparameters of largest evidence.

    Attributes:
        precision: `α`, overall: the geometric mean over the weights, where there are several groups.
        noise_precision: `b`; where noise variances are given, the noise variance of a datum is its given one over `b`.
        log_evidence: `log p(y)`, a sum over the data.
        gradient: `∂ log p/∂ log α` and `∂ log p/∂ log b`, zero for what was learnt.
        standard_errors: of `log α` and `log b`, from the second derivatives; NaN where there is no maximum.
        num_maxima: local maxima on a grid of ten points per factor e; the largest was taken.
        at_bounds: which of `"precision"` and `"noise_precision"` ended at one of its bounds.
        converged: whether the gradient of what was learnt vanishes, inside the bounds.
    """

    precision: float
    noise_precision: float
    log_evidence: float
    gradient: tuple[float, float]
    standard_errors: tuple[float, float]
    num_maxima: int
    at_bounds: tuple[str, ...]
    converged: bool


class RegressionEvidence(ABC):
    """Evidence and effective dimension from eigenvalues and rotated targets; `ExactRegression` has both.

    `precision` is `α`, the overall one: several precisions of a prior go up and down together. `noise_precision` is
    `b`. Both may be tensors, which are broadcast, and have gradients.

    Attributes:
        eigenvalues: `λ`, rising, one for each target.
        rotated: `c`, likewise.
        noise_scale: `R`, `[N, C]`.
        observed: places of the targets among the `N·C` outputs; `None` where each output has one.
    """

    eigenvalues: Float[Tensor, " NC"]
    rotated: Float[Tensor, " NC"]
    noise_scale: Float[Tensor, "N C"]

    @property
    def observed(self) -> Tensor | None:
        return None

    @property
    def size(self) -> int:
        """`N·C`, the number of targets."""
        return len(self.eigenvalues)

    def _of_targets(self, rows: Float[Tensor, "*K N C"]) -> Float[Tensor, "*K n"]:
        """The entries of outputs that have a target."""
        flat = rows.flatten(-2)
        return flat if self.observed is None else flat[..., self.observed]

    def _of_outputs(self, values: Float[Tensor, "*K n"]) -> Float[Tensor, "*K N C"]:
        """Numbers of targets at their outputs, zero elsewhere."""
        if self.observed is not None:
            flat = values.new_zeros(*values.shape[:-1], self.noise_scale.numel())
            flat[..., self.observed] = values
            values = flat
        return values.reshape(*values.shape[:-1], *self.noise_scale.shape)

    def _terms(self, precision: float | Tensor, noise_precision: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`λ/α`, `1/b` and `v`, with the broadcast shape of the precisions before the axis of eigenvalues."""
        like = {"dtype": torch.float64, "device": self.eigenvalues.device}
        signal = self.eigenvalues / torch.as_tensor(precision, **like)[..., None]
        noise = 1 / torch.as_tensor(noise_precision, **like)[..., None]
        return signal, noise, signal + noise

    def log_evidence(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`log p(y)`, a sum over the data."""
        _, _, v = self._terms(precision, noise_precision)
        constant = 0.5 * self._of_targets(self.noise_scale).log().sum() + 0.5 * self.size * math.log(2 * math.pi)
        return -0.5 * (v.log() + self.rotated**2 / v).sum(-1) - constant

    def log_evidence_gradient(self, precision: float | Tensor, noise_precision: float | Tensor) -> Float[Tensor, "* 2"]:
        """`∂ log p/∂ log α = ½(γ − θ̄ᵀAθ̄)` and `∂ log p/∂ log b = ½(N·C − γ − b·SSE)`."""
        signal, noise, v = self._terms(precision, noise_precision)
        slope = 0.5 * (1 / v - self.rotated**2 / v**2)
        return torch.stack([(slope * signal).sum(-1), (slope * noise).sum(-1)], -1)

    def log_evidence_hessian(
        self, precision: float | Tensor, noise_precision: float | Tensor
    ) -> Float[Tensor, "* 2 2"]:
        """Second derivatives in `log α` and `log b`."""
        signal, noise, v = self._terms(precision, noise_precision)
        slope = 0.5 * (1 / v - self.rotated**2 / v**2)
        bend = 0.5 * (1 / v**2 - 2 * self.rotated**2 / v**3)
        # Signal and noise fall as exp(−log α) and exp(−log b): `slope · s` has the derivative `bend · s² − slope · s`.
        first = (bend * signal**2 - slope * signal).sum(-1)
        cross = (bend * signal * noise).sum(-1)
        second = (bend * noise**2 - slope * noise).sum(-1)
        return torch.stack([torch.stack([first, cross], -1), torch.stack([cross, second], -1)], -2)

    def effective_dimension(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`γ = Tr(H⁻¹M)`."""
        signal, _, v = self._terms(precision, noise_precision)
        return (signal / v).sum(-1)

    def mode_norm(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`θ̄ᵀA₁θ̄`: `‖θ̄‖²` in the scaled coordinates of a prior of one group."""
        signal, _, v = self._terms(precision, noise_precision)
        alpha = torch.as_tensor(precision, dtype=torch.float64, device=self.eigenvalues.device)
        return (signal * self.rotated**2 / v**2).sum(-1) / alpha

    def squared_error(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`SSE = Σ (y − h(θ̄, x))²/R`."""
        _, noise, v = self._terms(precision, noise_precision)
        return (noise**2 * self.rotated**2 / v**2).sum(-1)


def largest_evidence(
    evidence: RegressionEvidence,
    start: tuple[float, float],
    learn: tuple[bool, bool],
    precision_bounds: Bounds = PRECISION_BOUNDS,
    noise_bounds: Bounds = NOISE_BOUNDS,
) -> Optimum:
    """The `α` and `b` of largest evidence, to rounding.

    Args:
        evidence: as a function of both.
        start: `α` and `b`, which stay where they are not learnt.
        learn: which of both are learnt.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which `b` is kept.
    """
    check_bounds(precision_bounds, noise_bounds)
    bounds = (precision_bounds, noise_bounds)
    if all(learn):
        precisions, num_maxima = _maximise_both_within(evidence, bounds)
    elif any(learn):
        precisions, num_maxima = _maximise_one(evidence, start, learn.index(True), bounds)
    else:
        precisions, num_maxima = start, 1
    gradient = evidence.log_evidence_gradient(*precisions)
    names = ("precision", "noise_precision")
    ended = zip(names, precisions, bounds, learn, strict=True)
    at_bounds = tuple(name for name, value, ends, learnt in ended if learnt and is_at_bound(value, ends))
    flat = bool((gradient[torch.tensor(learn, device=gradient.device)].abs() <= 1e-9 * evidence.size).all())
    return Optimum(
        precision=precisions[0],
        noise_precision=precisions[1],
        log_evidence=float(evidence.log_evidence(*precisions)),
        gradient=(float(gradient[0]), float(gradient[1])),
        standard_errors=_standard_errors(evidence.log_evidence_hessian(*precisions).cpu(), learn),
        num_maxima=num_maxima,
        at_bounds=at_bounds,
        converged=flat and not at_bounds,
    )


def _maximise_both_within(
    evidence: RegressionEvidence, bounds: tuple[Bounds, Bounds]
) -> tuple[tuple[float, float], int]:
    alpha, b, num_maxima = _maximise_both(evidence, *bounds)
    outside = [not low < x < high for x, (low, high) in zip((alpha, b), bounds, strict=True)]
    if all(outside) and b >= bounds[1][1]:
        outside[0] = False  # without noise the evidence has a maximum in α of its own
    start = (clamped(alpha, bounds[0]), clamped(b, bounds[1]))
    if not any(outside):
        return start, num_maxima
    if all(outside):
        return start, 1
    # One of them is at its bound: the other is learnt along it.
    return _maximise_one(evidence, start, 1 - outside.index(True), bounds)


def _maximise_both(
    evidence: RegressionEvidence, precision_bounds: Bounds, noise_bounds: Bounds
) -> tuple[float, float, int]:
    """The maximum over `ρ = α/b` alone, at `b = N·C / Σ c²/(λ/ρ + 1)` in closed form."""
    values, squares, size = evidence.eigenvalues, evidence.rotated**2, evidence.size

    def parts(log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signal = values / log_ratio.exp()[..., None]
        b = size / (squares / (signal + 1)).sum(-1).clamp_min(1e-300)
        return signal, signal + 1, b

    def value(log_ratio: Tensor) -> Tensor:
        _, w, b = parts(log_ratio)
        return 0.5 * size * b.log() - 0.5 * w.log().sum(-1)

    def slope(log_ratio: Tensor) -> Tensor:
        signal, w, b = parts(log_ratio)
        return 0.5 * (signal / w - b[..., None] * squares * signal / w**2).sum(-1)

    # At these ends the largest variance of the signal is e⁴⁰ times that of the noise, or e⁻²⁰ of it: all or nothing.
    largest = max(float(values[-1]), 1e-300)
    ends = (math.log(largest) - 40, math.log(largest) + 20)
    log_ratio, num_maxima = _maximise(value, slope, ends, values.device)
    b = float(parts(torch.tensor(log_ratio, dtype=torch.float64, device=values.device))[2])
    if log_ratio == ends[1]:  # the evidence rises to no signal
        return precision_bounds[1], b, num_maxima
    if log_ratio == ends[0]:  # the evidence rises to no noise
        return clamped(math.exp(log_ratio) * b, precision_bounds), noise_bounds[1], num_maxima
    return math.exp(log_ratio) * b, b, num_maxima


def _maximise_one(
    evidence: RegressionEvidence, start: tuple[float, float], which: int, bounds: tuple[Bounds, Bounds]
) -> tuple[tuple[float, float], int]:
    """The maximum in `α` (`which` is 0) or in `b` (1), the other as at the start."""

    def precisions(u: Any) -> tuple[Any, Any]:
        return (u, start[1]) if which == 0 else (start[0], u)

    ends = (math.log(bounds[which][0]), math.log(bounds[which][1]))
    u, num_maxima = _maximise(
        lambda u: evidence.log_evidence(*precisions(u.exp())),
        lambda u: evidence.log_evidence_gradient(*precisions(u.exp()))[..., which],
        ends,
        evidence.eigenvalues.device,
    )
    # A bound is given back to the last bit, so that it is recognised.
    return precisions(bounds[which][ends.index(u)] if u in ends else math.exp(u)), num_maxima


def _maximise(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    ends: tuple[float, float],
    device: torch.device,
) -> tuple[float, int]:
    """The largest maximum of a function of a logarithm between two ends, and how many local ones the grid shows."""
    grid = torch.linspace(*ends, max(3, math.ceil(10 * (ends[1] - ends[0]))), dtype=torch.float64, device=device)
    # 64 points at a time: the slopes of all at once would take as much memory as a Gram matrix.
    slopes = torch.cat([slope(part) for part in grid.split(64)]).cpu().numpy()

    def number(u: float) -> Tensor:
        return torch.tensor(u, dtype=torch.float64, device=device)

    candidates = [] if slopes[0] > 0 else [ends[0]]
    for i in np.flatnonzero((slopes[:-1] > 0) & (slopes[1:] <= 0)):
        low, high = float(grid[i]), float(grid[i + 1])
        # By bisection: scipy's root finders keep the function, and the matrices behind it, in a reference cycle.
        while low < (middle := 0.5 * (low + high)) < high:
            low, high = (middle, high) if float(slope(number(middle))) > 0 else (low, middle)
        candidates.append(high)
    if slopes[-1] > 0 or not candidates:
        candidates.append(ends[1])
    return max(candidates, key=lambda u: float(value(number(u)))), len(candidates)


def _standard_errors(hessian: Float[Tensor, "2 2"], learn: tuple[bool, bool]) -> tuple[float, float]:
    free = torch.tensor(learn).nonzero()[:, 0]
    errors = [math.nan if on else 0.0 for on in learn]
    if len(free):
        information = -hessian[free][:, free]
        # Away from a maximum the inverse is no covariance.
        if bool(torch.linalg.eigvalsh(information)[0] > 0):
            for i, variance in zip(free.tolist(), torch.linalg.inv(information).diagonal().tolist(), strict=True):
                errors[i] = math.sqrt(variance)
    return errors[0], errors[1]
