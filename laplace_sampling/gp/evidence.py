r"""The evidence of a regression as a function of `α` and `b`, from one eigendecomposition, and its largest maximum.

A regression has the mean `o`, the kernel `K/α` and the noise `R/b`, `R` diagonal. With the eigenvalues `λ` of
`R^{-1/2} K R^{-1/2}`, the residuals `c` of `n` targets along its eigenvectors and `v = λ/α + 1/b` (thesis eq. 2.43 to
2.46; Rasmussen & Williams 2006, ch. 5)

    log p(y) = −½ Σ_j (log v_j + c_j²/v_j) − ½ log|R| − ½ n log 2π          γ = Σ_j (λ_j/α) / v_j

in `O(n)` for each `(α, b)`.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.hyperparameters.hyperparameters import (
    NOISE_BOUNDS,
    PRECISION_BOUNDS,
    Bounds,
    check_bounds,
    is_at_bound,
    mackay_root,
)


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
        gradient: `∂ log p/∂ log α` and `∂ log p/∂ log b`.
        at_bounds: which of `"precision"` and `"noise_precision"` ended at one of its bounds.
        converged: whether the evidence is flat in an `α` that was learnt, and nothing ended at a bound.
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
        bounds: HyperparameterBounds | None = None,
        squares: float | None = None,
    ) -> Optimum:
        """The `α` of largest evidence at `b = (n − γ)/s`, where `s` are the squared errors of a network or of the mode.

        For the errors of the mode that is the `b` of largest evidence, too.

        Args:
            start: `α` and `b`, which stay where they are not learnt.
            learn: which of both are learnt.
            bounds: within which they are kept.
            squares: `s = Σ(y − f)²/R` of a network `f`; by default those of the mode.
        """
        bounds = HyperparameterBounds() if bounds is None else bounds

        @cache
        def precision_at(b: float) -> float:
            return self._best_precision(b, bounds.precision) if learn[0] else start[0]

        def free(b: float) -> float:
            return self.num_targets - float(self.effective_dimension(precision_at(b), b))

        def left(b: float) -> float:
            return b * (self._squares(precision_at(b), b) if squares is None else squares)

        b = start[1]
        if learn[1]:
            # The root for the errors of a network is at or below this.
            most = float(self.rotated.square().sum()) if squares is None else squares
            b, _ = mackay_root(free, left, self.num_targets / max(most, 1e-300), bounds.noise)
        found = precision_at(b), b
        ended = zip(("precision", "noise_precision"), found, (bounds.precision, bounds.noise), learn, strict=True)
        at_bounds = tuple(name for name, value, ends, learnt in ended if learnt and is_at_bound(value, ends))
        gradient = self.gradient(*found).tolist()
        flat = not learn[0] or abs(gradient[0]) <= 1e-9 * self.num_targets
        return Optimum(*found, float(self.log_evidence(*found)), tuple(gradient), at_bounds, flat and not at_bounds)

    def _squares(self, precision: float, noise_precision: float) -> float:
        """`Σ(y − h)²/R` of the mode."""
        _, noise, v = self._terms(precision, noise_precision)
        return float((noise * self.rotated / v).square().sum())

    def _best_precision(self, noise_precision: float, bounds: Bounds) -> float:
        """The largest maximum in `α`; a grid of ten points per unit of its logarithm brackets all."""
        low, high = (math.log(bound) for bound in bounds)
        device = self.eigenvalues.device
        grid = torch.linspace(low, high, max(3, math.ceil(10 * (high - low))), dtype=torch.float64, device=device)

        def slope(log_precision: Tensor) -> Tensor:
            return self.gradient(log_precision.exp(), noise_precision)[..., 0]

        # 64 points at a time: the slopes of all at once would take as much memory as a Gram matrix.
        slopes = torch.cat([slope(part) for part in grid.split(64)]).cpu().numpy()
        candidates = [] if slopes[0] > 0 else [bounds[0]]
        for i in np.flatnonzero((slopes[:-1] > 0) & (slopes[1:] <= 0)):
            left, right = float(grid[i]), float(grid[i + 1])
            # By bisection: scipy's root finders keep the function, and the matrices behind it, in a reference cycle.
            while left < (middle := 0.5 * (left + right)) < right:
                rising = float(slope(torch.tensor(middle, dtype=torch.float64, device=device))) > 0
                left, right = (middle, right) if rising else (left, middle)
            candidates.append(math.exp(right))
        if slopes[-1] > 0 or not candidates:
            candidates.append(bounds[1])
        return max(candidates, key=lambda alpha: float(self.log_evidence(alpha, noise_precision)))
