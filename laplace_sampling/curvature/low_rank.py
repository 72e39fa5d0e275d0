r"""`LowRank`: the leading eigenvectors of a curvature, `M̂ = FᵀF` with orthogonal rows `F = Λ^{1/2}U`.

A function of `M̂ + s` that is `f(s)` on all directions outside the rows is

    f(M̂ + s) = f(s) I + Fᵀ diag((f(Λ + s) − f(s))/Λ) F,

and the quotient has a closed form without the difference for the inverse, `−1/(s(Λ + s))`, and for its root.

**Where the spectrum is cut.** An eigenvector that is left out has the variance `1/s` in place of `1/(λ + s)`. So the
variances at the training data, weighted by the curvature of the loss, whose sum is the effective dimension
`γ = Σ_j λ_j/(λ_j + s)`, grow by `Σ_{j>r} λ_j²/(s(λ_j + s)) = 2εγ`, and standard deviations by the factor `1 + ε`. At
100 test images of Fashion-MNIST (a LeNet of 61,706 weights) they grew by `2ε` on average and by `6ε` at most, for `r`
from 8 to 512.

The full covariance of a part of the data: `M̂ = Σ_j w_j g_j g_jᵀ`, of as many rows as memory and operations allow.

With the weighted rows `G`, `[m, P]`, and the eigenvalues `Λ` and eigenvectors `V` of the Gram matrix `GGᵀ`, the rows of
`VᵀG` are orthogonal, and the leading ones are a `LowRank` curvature. A `Sketch` has what a search for the prior
precision needs before these are formed.

**The correction.** `M̂` is unbiased, but its inverse is not: `E[(M̂ + s)⁻¹] ≥ (M + s)⁻¹`. Random rows act as a larger
shift. With `γ̂(s) = Tr M̂(M̂ + s)⁻¹` of `m` independent rows of equal leverage (Sherman and Morrison's formula for each
row; also LeJeune, Patil, Javadi, Baraniuk and Tibshirani 2024, "Asymptotics of the sketched pseudoinverse"),

    (M + α)⁻¹ ≈ c (M̂ + cα)⁻¹ = (M̂/c + α)⁻¹,        c = 1 − ρ γ̂(cα)/m,

where `ρ` is the part of the trace that is estimated, `1 − Σ_j ‖g_j‖²/Σ_j w_j‖g_j‖²`: one if rows are independent, and
zero once all that count are taken. It costs next to nothing, for each `α` one
equation in the eigenvalues. Errors of standard deviations on 300 test images, with and without it, on 10,000 images of
Fashion-MNIST with a LeNet of 3,206 weights at `α = 100`, where `γ = 322`, against dense algebra (mean of two seeds):

    rows             250   500  1000  2000  3205
    with            .223  .129  .073  .043  .037
    without         .318  .189  .106  .061  .048
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import inner_products
from laplace_sampling.solvers.lapack import symmetric_eigen
from laplace_sampling.solvers.operator import Operator, row_products
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.preconditioners import Curvature

# The error at test data that are the worst of 100, in units of that at the training data; and of products with rows in
# float32, in units of its rounding: of one row it is 8 (`methods/closed_form.py`), sums of many numbers have some more.
_LARGEST, _ROUNDINGS = 6.0, 10.0


def errors_by_rank(eigenvalues: Float[Tensor, " m"], shift: float) -> Float[Tensor, " m"]:
    """`ε`, the relative error of standard deviations at a shift, of the first `r = 0, 1, …` eigenvectors.

    Args:
        eigenvalues: all of them, falling.
        shift: `s`, the prior precision.
    """
    values = eigenvalues.double().clamp_min(0)
    shares = values / (values + shift)
    return (values / shift * shares).flip(0).cumsum(0).flip(0) / (2 * shares.sum()).clamp_min(1e-300)


class LowRank(Curvature):
    """A curvature by its leading eigenvectors: a product, a solve or a sample takes `2rP` multiplications.

    A shift may be a tensor `[P]`: where it is not constant, the rows are scaled and decomposed again, and the root is
    not the symmetric one.

    Attributes:
        factor: `F`, `[r, P]`, orthogonal rows.
        spectrum: eigenvalues of the curvature, falling: those of the rows, and those that were cut off.
        passes: products that were spent on it, in units of all data and one vector.
        error: by how much standard deviations are too large by what was cut off, at the worst of 100 inputs.
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
    def leading(self) -> Float[Tensor, " r"]:
        """The eigenvalues of the rows."""
        return self.spectrum[: self.rank]

    def _apply(self, v: Tensor, outside: float, inside: Float[Tensor, " r"]) -> Tensor:
        """`outside · v + Fᵀ diag(inside) F v`."""
        return outside * v + ((inner_products(v, self.factor) * inside).to(self.factor) @ self.factor).to(v.dtype)

    def solve(self, v: Tensor, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.solve(v * scale, s) * scale
        return self._apply(v, 1 / s, -1 / (s * (self.leading + s)))

    def solve_root(self, v: Tensor, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.solve_root(v, s) * scale
        low, high = math.sqrt(s), (self.leading + s).sqrt()
        return self._apply(v, 1 / low, -1 / (low * high * (low + high)))

    def matmul(self, v: Tensor) -> Tensor:
        return self._apply(v, 0.0, torch.ones_like(self.leading))

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """`φ_i (M̂ + s_a)⁻¹ φ_iᵀ` in float64, `(φφᵀ − q(Λ + s)⁻¹qᵀ)/s` with `q = φFᵀ`: one product for all shifts."""
        q = inner_products(rows.flatten(0, 1), self.factor).reshape(*rows.shape[:2], -1)
        of_prior = torch.stack([inner_products(phi, phi) for phi in rows])
        return torch.stack([(of_prior - (q / (self.leading + s)) @ q.mT) / s for s in shifts.tolist()])

    def variance(self, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.variance(s) * scale.double() ** 2
        return (1 - self.leverage(s)) / s

    def leverage(self, shift: float | Tensor) -> Tensor:
        s, white, scale = self._white(shift)
        if scale is not None:
            return white.leverage(s)
        inner = 1 / (self.leading + s)
        parts = self.factor.split(max(1, NUMBERS_TOGETHER // self.rank), 1)
        return torch.cat([inner @ columns.double().square() for columns in parts])

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


class Sketch:
    """`M̂ = Σ_j w_j g_j g_jᵀ` for some rows `g`.

    Building it from `m` rows takes `m²P` multiplications for the Gram matrix and about `9m³` operations for its
    eigenvectors; covariances take `nCmP` for all shifts, and `r` leading eigenvectors `rmP`.

    With `chance` above zero all functions of a shift are those of the corrected sketch, `M̂/c`, whose `c` depends on the
    shift; `at` gives it as a sketch of its own.

    Args:
        rows: `g`, in blocks, `[m, P]` in all.
        weights: `w`, `[m]`.
        products: `gᵢᵀgⱼ`, `[m, m]` in float64, if they are known.
        passes: products that were spent on it, in units of all data and one vector.
        chance: `ρ` of the correction: one for independent rows, zero for none.
    """

    # The smallest correction, a floor where there are far fewer rows than directions that the data decide; and the
    # steps that find a correction to 10⁻¹¹, at half of them to 10⁻⁶.
    _LEAST_CORRECTION, _BISECTIONS = 1e-3, 40

    def __init__(
        self,
        rows: Sequence[Float[Tensor, "n P"]],
        weights: Float[Tensor, " m"],
        products: Float[Tensor, "m m"] | None = None,
        passes: float = 0.0,
        chance: float = 0.0,
    ) -> None:
        self.rows, self.weights = list(rows), weights.to(rows[0].device, torch.float64)
        self._products, self.passes, self.chance = products, passes, chance
        self.size, self.num_rows = rows[0].shape[1], len(weights)
        # Eigenvalues and eigenvectors of the Gram matrix.
        self._known: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_eigenvectors(cls, values: Float[Tensor, " P"], vectors: Float[Tensor, "P P"], num_rows: int) -> "Sketch":
        """`M̂` of so many rows from its own eigenvalues and eigenvectors, one a row."""
        found = cls([vectors * values.sqrt()[:, None]], torch.ones_like(values))
        # Rows that are orthogonal to each other are the eigenvectors of their Gram matrix.
        found._known = (values, torch.eye(len(values), dtype=values.dtype, device=values.device))
        found.num_rows = num_rows
        return found

    @property
    def products(self) -> Float[Tensor, "m m"]:
        """`gᵢᵀgⱼ`, without weights."""
        if self._products is None:
            self._products = torch.cat([torch.cat([inner_products(a, b) for b in self.rows], 1) for a in self.rows])
        return self._products

    @property
    def _eigen(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "m m"]]:
        if self._known is None:
            root = self.weights.sqrt()
            self._known = symmetric_eigen(root[:, None] * self.products * root)
        return self._known

    @property
    def spectrum(self) -> Float[Tensor, " m"]:
        """The eigenvalues of `M̂` in the span of the rows, in ascending order; all others are zero."""
        return self._eigen[0]

    def project(self, v: Float[Tensor, "n P"]) -> Float[Tensor, "n m"]:
        """`v GᵀV` in float64."""
        return self.turned(torch.cat([inner_products(v, rows) for rows in self.rows], 1))

    def turned(self, products: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """`v GᵀV` from the products of `v` with the rows, in float64."""
        return (products * self.weights.sqrt()) @ self._eigen[1]

    def _combine(self, coefficients: Float[Tensor, "K m"], dtype: torch.dtype) -> Float[Tensor, "K P"]:
        """`c VᵀG`."""
        of_rows = ((coefficients @ self._eigen[1].T) * self.weights.sqrt()).split([len(rows) for rows in self.rows], 1)
        return sum(
            (c.to(rows) @ rows for c, rows in zip(of_rows[1:], self.rows[1:], strict=True)),
            of_rows[0].to(self.rows[0]) @ self.rows[0],
        ).to(dtype)

    def solve_root(self, v: Tensor, shift: float) -> Tensor:
        """`(M̂ + s)^{-1/2} v_k`, the symmetric root."""
        c = self.correction(shift)
        low, high = math.sqrt(shift), (self.spectrum / c + shift).sqrt()
        # A sample is the difference of numbers as large as the prior's standard deviation, and a variance of those as
        # large as its square: float32 leaves `10⁻⁷` of the former, which is 10⁻⁴ of a posterior's that is 10⁻³ of it.
        products = torch.cat([v.to(rows) @ rows.T for rows in self.rows], 1).double()
        inside = self.turned(products) / (-c * low * high * (low + high))
        return v / low + self._combine(inside, v.dtype)

    def low_rank(self, shift: float | Tensor, accuracy: float, bytes_: float = math.inf) -> LowRank:
        """The leading eigenvectors, with which standard deviations at a shift are right to a relative accuracy.

        They are in float64 where rounding would be more than the accuracy.

        Args:
            shift: a shift for each weight, `[P]`, is taken as it is, without a correction.
            accuracy: of standard deviations at inputs like the training data; zero keeps all eigenvectors. In any
                direction they are right to three times as much: without an eigenvector they are `(1 + λ/s)^{1/2}` times
                as large.
            bytes_: memory for the eigenvectors.
        """
        if isinstance(shift, Tensor):
            scale = shift.rsqrt()
            scaled = Sketch([rows * scale.to(rows) for rows in self.rows], self.weights)
            return scaled.low_rank(1.0, accuracy, bytes_).congruent(1 / scale)
        values, c = self.spectrum.flip(0).clamp_min(0), self.correction(shift)
        errors, dtype = _LARGEST * errors_by_rank(values / c, shift), self.rows[0].dtype
        most = int(min(bytes_ / (self.size * dtype.itemsize), len(values)))
        too_much = (errors > accuracy) | (values > 2 * 3 * accuracy * c * shift)
        rank = max(1, min(most, int(too_much.sum())))
        rounding = _ROUNDINGS * torch.finfo(dtype).eps * float(values[0]) / (c * shift)
        if rounding > accuracy and 8 * rank * self.size <= bytes_:
            dtype = torch.float64
        # `V_jᵀG` of the leading eigenvectors, a few columns at a time for copies in float64.
        of_rows = (self._eigen[1].flip(1)[:, :rank] * self.weights.sqrt()[:, None] / math.sqrt(c)).T.to(dtype)
        columns = []
        for some in torch.arange(self.size, device=of_rows.device).split(max(1, NUMBERS_TOGETHER // self.num_rows)):
            parts = zip(of_rows.split([len(rows) for rows in self.rows], 1), self.rows, strict=True)
            columns.append(sum(coefficients @ rows[:, some].to(dtype) for coefficients, rows in parts))
        error = float(errors[rank]) if rank < len(errors) else 0.0
        return LowRank(torch.cat(columns, 1), values / c, self.passes, error)

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """`φ_i (M̂ + s_a)⁻¹ φ_iᵀ` in float64, `(φφᵀ − q(Λ + s)⁻¹qᵀ)/s` with `q = φGᵀV`: one rotation for all shifts."""
        q = self.project(rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
        of_prior = torch.stack([inner_products(phi, phi) for phi in rows])
        blocks = [(of_prior - (q / (self.spectrum + self.correction(s) * s)) @ q.mT) / s for s in shifts.tolist()]
        return torch.stack(blocks)

    def variances(self, norms: Float[Tensor, " n"], projected: Float[Tensor, "n m"], shift: float) -> Tensor:
        """`r (M̂ + s)⁻¹ rᵀ` of some rows, from their squared norms and `project` of them."""
        return (norms - (projected.square() / (self.spectrum + self.correction(shift) * shift)).sum(1)) / shift

    def dimension(self, shift: float) -> float:
        """`γ = Tr(M̂ + s)⁻¹M̂`."""
        return float((self.spectrum / (self.spectrum + self.correction(shift) * shift)).sum())

    def eigenvalues(self) -> Float[Tensor, " m"]:
        """The eigenvalues that may not be zero, rising."""
        return self.spectrum

    def correction(self, shift: float) -> float:
        """`c` at a shift; one without a correction."""
        if self.chance == 0:
            return 1.0
        low, high = self._LEAST_CORRECTION, 1.0
        for _ in range(self._BISECTIONS):
            c = math.sqrt(low * high)
            taken = float((self.spectrum / (self.spectrum + c * shift)).sum()) / self.num_rows
            low, high = (c, high) if c < 1 - self.chance * taken else (low, c)
        return math.sqrt(low * high)

    def at(self, shift: float) -> "Sketch":
        """The corrected sketch of this shift, `M̂/c`, without a correction of its own."""
        return self.times(1 / self.correction(shift), 0.0)

    def times(self, factor: float, chance: float | None = None) -> "Sketch":
        """`factor · M̂`, without a new decomposition."""
        chance = self.chance if chance is None else chance
        other = Sketch(self.rows, self.weights * factor, self._products, self.passes, chance)
        other._known, other.num_rows = (self._eigen[0] * factor, self._eigen[1]), self.num_rows
        return other
