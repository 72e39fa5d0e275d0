r"""`LowRank`: the leading eigenvectors of a curvature, `M̂ = FᵀF` with orthogonal rows `F = Λ^{1/2}U`.

A function of `M̂ + s` that is `f(s)` on all directions outside the rows is

    f(M̂ + s) = f(s) I + Fᵀ diag((f(Λ + s) − f(s))/Λ) F,

and the quotient has a closed form without the difference for the inverse, `−1/(s(Λ + s))`, and for its root.

**Where the spectrum is cut.** An eigenvector that is left out has the variance `1/s` in place of `1/(λ + s)`. So the
variances at the training data, weighted by the curvature of the loss, whose sum is the effective dimension
`γ = Σ_j λ_j/(λ_j + s)`, grow by `Σ_{j>r} λ_j²/(s(λ_j + s)) = 2εγ`, and standard deviations by the factor `1 + ε`. At
100 test images of Fashion-MNIST (a LeNet of 61,706 weights) they grew by `2ε` on average and by `6ε` at most, for `r`
from 8 to 512.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.datum_rows import inner_products
from laplace_sampling.solvers.lapack import symmetric_eigen
from laplace_sampling.solvers.operator import Operator, row_products
from laplace_sampling.solvers.preconditioners import Factored

# Columns whose squares are summed together. It changes memory only.
_COLUMNS = 2048


def errors_by_rank(eigenvalues: Float[Tensor, " m"], shift: float) -> Float[Tensor, " m"]:
    """`ε`, the relative error of standard deviations at a shift, of the first `r = 0, 1, …` eigenvectors.

    Args:
        eigenvalues: all of them, falling.
        shift: `s`, the prior precision.
    """
    values = eigenvalues.double().clamp_min(0)
    shares = values / (values + shift)
    return (values / shift * shares).flip(0).cumsum(0).flip(0) / (2 * shares.sum()).clamp_min(1e-300)


class LowRank(Factored):
    """A curvature by its leading eigenvectors: a product, a solve or a sample takes `2rP` multiplications.

    A shift may be a tensor `[P]`: where it is not constant, the rows are scaled and decomposed again, and the root is
    not the symmetric one.

    Attributes:
        factor: `F`, `[r, P]`, orthogonal rows.
        spectrum: eigenvalues of the curvature, falling: those of the rows, and those that were cut off.
        passes: products that were spent on it, in units of all data and one vector.
        error: by how much standard deviations may be too large, in any direction, by what was cut off.
    """

    def __init__(
        self, factor: Float[Tensor, "r P"], spectrum: Float[Tensor, " m"], passes: float = 0.0, error: float = 0.0
    ) -> None:
        self.factor, self.spectrum, self.passes, self.error = factor, spectrum, passes, error
        # The last shift that was not constant, and the curvature in coordinates in which it is one.
        self._scaled: tuple[Tensor, LowRank] | None = None

    @classmethod
    def of(cls, rows: Float[Tensor, "m P"], passes: float = 0.0) -> "LowRank":
        """`GᵀG` of a few rows."""
        values, vectors = symmetric_eigen(inner_products(rows, rows))
        return cls(vectors.flip(1).T.to(rows) @ rows, values.flip(0).clamp_min(0), passes)

    @property
    def rank(self) -> int:
        """`r`."""
        return len(self.factor)

    @property
    def size(self) -> int:
        """`P`."""
        return self.factor.shape[1]

    @property
    def _leading(self) -> Float[Tensor, " r"]:
        return self.spectrum[: self.rank]

    def _apply(self, v: Tensor, outside: float, inside: Float[Tensor, " r"]) -> Tensor:
        """`outside · v + Fᵀ diag(inside) F v`."""
        return outside * v + ((inner_products(v, self.factor) * inside).to(self.factor) @ self.factor).to(v.dtype)

    def solve(self, v: Tensor, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.solve(v * scale, s) * scale
        return self._apply(v, 1 / s, -1 / (s * (self._leading + s)))

    def solve_root(self, v: Tensor, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.solve_root(v, s) * scale
        low, high = math.sqrt(s), (self._leading + s).sqrt()
        return self._apply(v, 1 / low, -1 / (low * high * (low + high)))

    def matmul(self, v: Tensor) -> Tensor:
        return self._apply(v, 0.0, torch.ones_like(self._leading))

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """`φ_i (M̂ + s_a)⁻¹ φ_iᵀ` in float64, `(φφᵀ − q(Λ + s)⁻¹qᵀ)/s` with `q = φFᵀ`: one product for all shifts."""
        q = inner_products(rows.flatten(0, 1), self.factor).reshape(*rows.shape[:2], -1)
        of_prior = torch.stack([inner_products(phi, phi) for phi in rows])
        return torch.stack([(of_prior - (q / (self._leading + s)) @ q.mT) / s for s in shifts.tolist()])

    def variance(self, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.variance(s) * scale.double() ** 2
        return (1 - self.leverage(s)) / s

    def leverage(self, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.leverage(s)
        inner = 1 / (self._leading + s)
        return torch.cat([inner @ columns.double().square() for columns in self.factor.split(_COLUMNS, 1)])

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, those that were cut off among them, and zeros."""
        values = self.spectrum[: self.size]
        return torch.cat([values, values.new_zeros(self.size - len(values))])

    def dimension(self, shift: float) -> float:
        return float((self.spectrum / (self.spectrum + shift)).sum())

    def congruent(self, w: Tensor) -> "LowRank":
        if bool((w == w[0]).all()):
            return self.times(float(w[0]) ** 2)
        found = LowRank.of(self.factor * w.to(self.factor), self.passes)
        found.error = self.error
        return found

    def times(self, ratio: float) -> "LowRank":
        """`ratio · M̂`."""
        return LowRank(self.factor * math.sqrt(ratio), self.spectrum * ratio, self.passes, self.error)

    def adapted(self, operator: Operator) -> "LowRank":
        leading = self.factor[:1] / self.factor[:1].norm().clamp_min(1e-150)
        ratio = float(row_products(leading, operator.matmul(leading))[0] / self.spectrum[0].clamp_min(1e-300))
        found = self.times(ratio if ratio > 0 else 1.0)
        found.passes = self.passes + 1
        return found

    def _white(self, shift: float | Tensor) -> tuple[float, "LowRank", Tensor | None]:
        """A shift as one number; where it is none, 1 with `A^{-1/2}M̂A^{-1/2}` and `A^{-1/2}`."""
        if not isinstance(shift, Tensor) or shift.dim() == 0:
            return float(shift), self, None
        if bool((shift == shift[0]).all()):
            return float(shift[0]), self, None
        if self._scaled is None or not torch.equal(self._scaled[0], shift):
            self._scaled = (shift, self.congruent(shift.rsqrt()))
        return 1.0, self._scaled[1], shift.rsqrt()

    def tensors(self) -> dict[str, Tensor]:
        return {"factor": self.factor, "spectrum": self.spectrum, "error": torch.tensor(self.error)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "LowRank":
        """The inverse of `tensors`."""
        return cls(tensors["factor"], tensors["spectrum"], error=float(tensors["error"]))
