r"""The evidence of a regression as a function of `α` and `b`, from one eigendecomposition, and its largest maximum.

A regression has the mean `o`, the kernel `K/α` and the noise `R/b`, `R` diagonal. With the eigenvalues `λ` of
`R^{-1/2} K R^{-1/2}`, the residuals `c` of `n` targets along its eigenvectors and `v = λ/α + 1/b` (thesis eq. 2.43 to
2.46; Rasmussen & Williams 2006, ch. 5)

    log p(y) = −½ Σ_j (log v_j + c_j²/v_j) − ½ log|R| − ½ n log 2π          γ = Σ_j (λ_j/α) / v_j

in `O(n)` for each `(α, b)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.bounds import (
    NOISE_BOUNDS,
    PRECISION_BOUNDS,
    Bounds,
    check_bounds,
    clamped,
    is_at_bound,
)
from laplace_sampling.solvers.root import falling_root

# Of `log α` and `log b` where they are roots.
_ROOT_TOLERANCE = 1e-10


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
        precision: `α`.
        noise_precision: `b`.
        log_evidence: `log p(y)`, a sum over the data.
        gradient: `∂ log p/∂ log α` and `∂ log p/∂ log b`, zero for what was learnt.
        at_bounds: which of `"precision"` and `"noise_precision"` ended at one of its bounds.
        converged: whether the gradient of what was learnt vanishes, inside the bounds.
    """

    precision: float
    noise_precision: float
    log_evidence: float
    gradient: tuple[float, float]
    at_bounds: tuple[str, ...]
    converged: bool


@dataclass(frozen=True)
class RegressionEvidence:
    """Evidence and effective dimension for every `α` and `b`, which may be tensors that broadcast.

    Attributes:
        eigenvalues: `λ`; those of outputs without a target are zero.
        rotated: `c`, zero there, too.
        num_targets: `n`.
        log_noise: `log|R|`.
    """

    eigenvalues: Float[Tensor, " NC"]
    rotated: Float[Tensor, " NC"]
    num_targets: int
    log_noise: float = 0.0

    @classmethod
    def of_leading(
        cls, values: Float[Tensor, " m"], inside: Float[Tensor, " m"], squared_norm: float, num_targets: int
    ) -> "RegressionEvidence":
        """The evidence where the leading eigenvalues are known; all others count as zero.

        Args:
            values: leading eigenvalues.
            inside: residuals along their eigenvectors.
            squared_norm: `‖R^{-1/2}(y − o)‖²`.
            num_targets: `n`.
        """
        num_outside = max(num_targets - len(inside), 0)
        outside = (squared_norm - inside.square().sum()).clamp_min(0) / max(num_outside, 1)
        zeros = values.new_zeros(num_outside)
        return cls(torch.cat([zeros, values]), torch.cat([zeros + outside.sqrt(), inside]), num_targets)

    def objective(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`Σ ℓ + ½ θ̄ᵀAθ̄` at the mode."""
        signal, noise, _ = self._terms(precision, noise_precision)
        return -self.log_evidence(precision, noise_precision) - 0.5 * (signal / noise).log1p().sum(-1)

    def _terms(self, precision: float | Tensor, noise_precision: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`λ/α`, `1/b` and `v`, with the broadcast shape of the precisions before the axis of eigenvalues."""
        alpha, b = (
            torch.as_tensor(value, dtype=torch.float64, device=self.eigenvalues.device)[..., None]
            for value in (precision, noise_precision)
        )
        signal, noise = self.eigenvalues / alpha, 1 / b
        return signal, noise, signal + noise

    def log_evidence(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`log p(y)`, a sum over the data."""
        _, noise, v = self._terms(precision, noise_precision)
        missing = len(self.eigenvalues) - self.num_targets
        constant = 0.5 * self.log_noise + 0.5 * self.num_targets * math.log(2 * math.pi)
        return 0.5 * missing * noise[..., 0].log() - 0.5 * (v.log() + self.rotated**2 / v).sum(-1) - constant

    def gradient(self, precision: float | Tensor, noise_precision: float | Tensor) -> Float[Tensor, "* 2"]:
        """`∂ log p/∂ log α = ½(γ − θ̄ᵀAθ̄)` and `∂ log p/∂ log b = ½(n − γ − b·SSE)`."""
        signal, noise, v = self._terms(precision, noise_precision)
        slope = 0.5 * (1 / v - self.rotated**2 / v**2)
        missing = len(self.eigenvalues) - self.num_targets
        return torch.stack([(slope * signal).sum(-1), (slope * noise).sum(-1) - 0.5 * missing], -1)

    def effective_dimension(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`γ = Tr(H⁻¹M)`."""
        signal, _, v = self._terms(precision, noise_precision)
        return (signal / v).sum(-1)

    def mode_norm(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`θ̄ᵀA₁θ̄`: `‖θ̄‖²` in the scaled coordinates of a prior of one group."""
        _, _, v = self._terms(precision, noise_precision)
        alpha = torch.as_tensor(precision, dtype=torch.float64, device=v.device)[..., None]
        return (self.eigenvalues * self.rotated**2 / (alpha * v) ** 2).sum(-1)

    def largest(
        self,
        start: tuple[float, float],
        learn: tuple[bool, bool],
        precision_bounds: Bounds = PRECISION_BOUNDS,
        noise_bounds: Bounds = NOISE_BOUNDS,
    ) -> Optimum:
        """The `α` and `b` of largest evidence, to rounding.

        Args:
            start: `α` and `b`, which stay where they are not learnt.
            learn: which of both are learnt.
            precision_bounds: within which `α` is kept.
            noise_bounds: within which `b` is kept.
        """
        check_bounds(precision_bounds, noise_bounds)
        bounds = (precision_bounds, noise_bounds)
        precisions = start
        if all(learn):
            precisions = self._largest_in_both(bounds)
        elif any(learn):
            precisions = self._largest_in_one(start, learn.index(True), bounds)
        gradient = self.gradient(*precisions).tolist()
        names = ("precision", "noise_precision")
        ended = zip(names, precisions, bounds, learn, strict=True)
        at_bounds = tuple(name for name, value, ends, learnt in ended if learnt and is_at_bound(value, ends))
        flat = all(abs(g) <= 1e-9 * self.num_targets for g, learnt in zip(gradient, learn, strict=True) if learnt)
        return Optimum(
            *precisions, float(self.log_evidence(*precisions)), tuple(gradient), at_bounds, flat and not at_bounds
        )

    def largest_for(
        self, likelihood: Gaussian, squares: float, start: tuple[float, float], bounds: HyperparameterBounds
    ) -> Optimum:
        """The `α` and `b` that a likelihood asks for: of largest evidence, or `b` by what the network leaves.

        Args:
            likelihood: says whether `b` is learnt, and by which errors.
            squares: `Σ(y − f)²/R` of the network.
            start: `α` and `b`.
            bounds: of both.
        """
        if not likelihood.learn or likelihood.noise_at == "mode":
            return self.largest(start, (True, likelihood.learn), bounds.precision, bounds.noise)

        def at(noise_precision: float) -> Optimum:
            return self.largest((start[0], noise_precision), (True, False), bounds.precision)

        def excess(log_noise: float) -> float:
            """The logarithm of `(n − γ)/Σ(y − f)²/R` over `b`, which changes sign once where `γ` rises with `b`."""
            found = at(math.exp(log_noise))
            free = self.num_targets - float(self.effective_dimension(found.precision, found.noise_precision))
            return math.log(max(free, 1e-300)) - math.log(max(squares, 1e-300)) - log_noise

        # The root is at or below `n/Σ(y − f)²/R`.
        b, ended = root_within(excess, self.num_targets / max(squares, 1e-300), bounds.noise)
        found = at(b)
        at_bounds = found.at_bounds + ("noise_precision",) * ended
        return replace(found, at_bounds=at_bounds, converged=found.converged and not ended)

    def _largest_in_both(self, bounds: tuple[Bounds, Bounds]) -> tuple[float, float]:
        alpha, b = self._largest_in_ratio(*bounds)
        outside = [not low < x < high for x, (low, high) in zip((alpha, b), bounds, strict=True)]
        if all(outside) and b >= bounds[1][1]:
            outside[0] = False  # without noise the evidence has a maximum in α of its own
        start = (clamped(alpha, bounds[0]), clamped(b, bounds[1]))
        # Where one of them is at its bound, the other is learnt along it.
        return self._largest_in_one(start, 1 - outside.index(True), bounds) if sum(outside) == 1 else start

    def _largest_in_ratio(self, precision_bounds: Bounds, noise_bounds: Bounds) -> tuple[float, float]:
        """The maximum over `ρ = α/b` alone, at `b = n / Σ c²/(λ/ρ + 1)` in closed form."""
        values, squares, size = self.eigenvalues, self.rotated**2, self.num_targets

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

        # At these ends the largest variance of the signal is e⁴⁰ times that of the noise, or e⁻²⁰ of it: all or
        # nothing.
        largest = max(float(values.max()), 1e-300)
        ends = (math.log(largest) - 40, math.log(largest) + 20)
        log_ratio = _maximise(value, slope, ends, values.device)
        b = float(parts(torch.tensor(log_ratio, dtype=torch.float64, device=values.device))[2])
        if log_ratio == ends[1]:  # the evidence rises to no signal
            return precision_bounds[1], b
        if log_ratio == ends[0]:  # the evidence rises to no noise
            return clamped(math.exp(log_ratio) * b, precision_bounds), noise_bounds[1]
        return math.exp(log_ratio) * b, b

    def _largest_in_one(
        self, start: tuple[float, float], which: int, bounds: tuple[Bounds, Bounds]
    ) -> tuple[float, float]:
        """The maximum in `α` (`which` is 0) or in `b` (1), the other as at the start."""

        def precisions(u: Any) -> tuple[Any, Any]:
            return (u, start[1]) if which == 0 else (start[0], u)

        ends = (math.log(bounds[which][0]), math.log(bounds[which][1]))
        u = _maximise(
            lambda u: self.log_evidence(*precisions(u.exp())),
            lambda u: self.gradient(*precisions(u.exp()))[..., which],
            ends,
            self.eigenvalues.device,
        )
        # A bound is given back to the last bit, so that it is recognised.
        return precisions(bounds[which][ends.index(u)] if u in ends else math.exp(u))


def root_within(excess: Callable[[float], float], start: float, bounds: Bounds) -> tuple[float, bool]:
    """Where a falling function of a logarithm is zero, or the bound that it points to; and whether it is a bound."""
    low, high = (math.log(bound) for bound in bounds)
    root, inside = falling_root(excess, min(max(math.log(start), low), high), (low, high), _ROOT_TOLERANCE)
    # A bound is given back to the last bit.
    value = math.exp(root) if inside else bounds[root == high]
    return value, is_at_bound(value, bounds)


def _maximise(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    ends: tuple[float, float],
    device: torch.device,
) -> float:
    """The largest maximum of a function of a logarithm between two ends; a grid of ten points per unit brackets all."""
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
    return max(candidates, key=lambda u: float(value(number(u))))
