"""Dense algebra in float64: exact, for small problems.

`DenseCurvature` is `M` itself by its eigenvectors, where weights are few and data many. `M = Σᵢ φᵢᵀ Bᵢ φᵢ` is a sum
over data, so one pass over blocks of their rows gives it, and no Jacobian is held.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.lapack import accurate_factor, sum_of_squares, symmetric_eigen
from laplace_sampling.solvers.newton import newton
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver, relative_residual


class DenseCurvature(Curvature):
    """`M` itself, in float64, for functions of `M + s`.

    It is decomposed once, `M = V diag(λ) Vᵀ` (about `9 P³` operations), when something first needs that; from then on a
    shift `s` that is one number costs nothing. Solves and diagonals of other shifts, or before there is a
    decomposition, take a Cholesky factor of `M + s` (`P³/3`), and roots with a shift that differs between weights a
    decomposition of `M + diag(s)`; both are kept until another shift comes. Vectors are taken and given in their own
    dtype.

    Args:
        matrix: `M`, symmetric and positive semi-definite; `None` if its eigenvectors are given.
        passes: the passes that it took, as in a `Preconditioner`.
        eigen: `λ`, not negative, and `V`, one eigenvector a column, if they are known.
    """

    def __init__(
        self,
        matrix: Float[Tensor, "P P"] | None,
        passes: float,
        eigen: tuple[Float[Tensor, " P"], Float[Tensor, "P P"]] | None = None,
    ) -> None:
        self.passes, self._matrix, self._eigen = passes, matrix, eigen
        # Of the last shift: a Cholesky factor, and eigenvalues and eigenvectors.
        self._factor: tuple[Tensor, Tensor | None] | None = None
        self._shifted: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, matrix: Float[Tensor, "P P"], passes: float) -> "DenseCurvature":
        """`M` that is known, symmetric and positive semi-definite; it is not changed.

        Raises:
            FloatingPointError: if it contains NaN or infinity.
        """
        if not bool(matrix.isfinite().all()):
            raise FloatingPointError(
                "The curvature is not finite: the Jacobian products of the model contain NaN or infinity."
            )
        return cls(matrix.double(), passes)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "DenseCurvature":
        """The inverse of `tensors`."""
        return cls(None, 0.0, (tensors["eigenvalues"], tensors["vectors"]))

    def tensors(self) -> dict[str, Tensor]:
        return {"eigenvalues": self.spectrum, "vectors": self.vectors}

    @property
    def matrix(self) -> Float[Tensor, "P P"]:
        """`M`."""
        if self._matrix is None:
            assert self._eigen is not None
            values, vectors = self._eigen
            self._matrix = (vectors * values) @ vectors.T
        return self._matrix

    @property
    def decomposed(self) -> bool:
        """Whether eigenvectors are known."""
        return self._eigen is not None

    @property
    def spectrum(self) -> Float[Tensor, " P"]:
        """`λ`."""
        return self._decomposition()[0]

    @property
    def vectors(self) -> Float[Tensor, "P P"]:
        """`V`."""
        return self._decomposition()[1]

    def eigenvalues(self) -> Tensor:
        return self.spectrum

    def solve(self, v: Tensor, shift: float | Tensor) -> Tensor:
        factor = None if self._is_free(shift) else self.factor(shift)
        if factor is not None:
            return torch.cholesky_solve(v.to(factor).T, factor).T.to(v)
        eigenvalues, vectors = self._at(shift)
        return _applied(vectors, 1 / eigenvalues, v)

    def solve_root(self, v: Tensor, shift: float | Tensor) -> Tensor:
        eigenvalues, vectors = self._at(shift)
        return _applied(vectors, eigenvalues.rsqrt(), v)

    def matmul(self, v: Tensor) -> Tensor:
        return (v.to(self.matrix) @ self.matrix).to(v)

    def variance(self, shift: float | Tensor) -> Tensor:
        factor = None if self._is_free(shift) else self.factor(shift)
        if factor is not None:
            return torch.cholesky_inverse(factor).diagonal()
        eigenvalues, vectors = self._at(shift)
        return vectors.square() @ (1 / eigenvalues)

    def leverage(self, shift: float | Tensor) -> Tensor:
        if self._is_free(shift):
            eigenvalues, vectors = self._at(shift)
            return vectors.square() @ (self.spectrum / eigenvalues)
        return 1 - torch.as_tensor(shift).to(self.matrix) * self.variance(shift)

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """The blocks `φ_i (M + s)⁻¹ φ_iᵀ` for many shifts `s`: one rotation of the rows serves all of them."""
        rotated = rows.double() @ self.vectors
        return torch.stack([rotated / (self.spectrum + shift) @ rotated.mT for shift in shifts.to(rotated)])

    def congruent(self, w: Tensor) -> "DenseCurvature":
        """`diag(w) M diag(w)`, which keeps the decomposition if all scales are the same."""
        scales = w.to(torch.float64)
        if bool((scales == scales[0]).all()):
            return self.times(float(scales[0]) ** 2)
        return DenseCurvature(scales[:, None] * self.matrix * scales, self.passes)

    def times(self, factor: float) -> "DenseCurvature":
        """A multiple of `M`."""
        if factor == 1:
            return self
        eigen = None if self._eigen is None else (self._eigen[0] * factor, self._eigen[1])
        return DenseCurvature(None if eigen else self.matrix * factor, self.passes, eigen)

    def factor(self, shift: float | Tensor) -> Float[Tensor, "P P"] | None:
        """The Cholesky factor of `M + shift`, or `None` where it would have lost its digits."""
        diagonal = torch.as_tensor(shift).to(self.matrix).expand(len(self.matrix))
        if self._factor is None or not torch.equal(self._factor[0], diagonal):
            self._factor = diagonal.clone(), accurate_factor(self.matrix, diagonal)
        return self._factor[1]

    def _is_free(self, shift: float | Tensor) -> bool:
        """Whether the decomposition of `M` is known and serves this shift."""
        return self.decomposed and as_number(shift) is not None

    def _decomposition(self) -> tuple[Tensor, Tensor]:
        if self._eigen is None:
            self._eigen = symmetric_eigen(self.matrix.clone())
        return self._eigen

    def _at(self, shift: float | Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of `M + shift`."""
        number = as_number(shift)
        if number is not None:
            return self.spectrum + number, self.vectors
        assert isinstance(shift, Tensor)
        shift = shift.to(self.matrix)
        if self._shifted is None or not torch.equal(self._shifted[0], shift):
            eigenvalues, vectors = symmetric_eigen(self.matrix + torch.diag(shift))
            # Rounding takes eigenvalues below the smallest shift, as `M` is positive semi-definite.
            self._shifted = shift.clone(), eigenvalues.clamp_min(float(shift.min())), vectors
        return self._shifted[1:]


def as_number(shift: float | Tensor) -> float | None:
    """A shift that is the same for all weights; else `None`."""
    if not isinstance(shift, Tensor) or shift.dim() == 0:
        return float(shift)
    return float(shift[0]) if bool((shift == shift[0]).all()) else None


def _applied(vectors: Tensor, function: Tensor, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
    """`V diag(f) Vᵀ v_k`, in the dtype of `v`."""
    return ((v.to(vectors) @ vectors * function) @ vectors.T).to(v)


@dataclass(frozen=True)
class Dense(Solver):
    """Dense algebra in float64: a Cholesky factor of `H` (`P` small) or of `I + R A⁻¹ Rᵀ` (few outputs)."""

    tolerance: float = 1e-10
    max_steps: int = 100

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        factor = Factor.of(problem.operator, problem.precision)
        centre, linear = problem.centre.double(), problem.linear.double()
        # Solved for δ and not for ζ: directions that the data do not determine are exactly those of θ⁰.
        delta = factor.solve(linear - factor.matmul(centre))
        zeta = centre + delta
        residual = relative_residual(factor.matmul(zeta) - linear, factor.precision * delta)
        error = torch.zeros_like(residual)
        return Solution(zeta, delta, residual, factor.leverage()[None], 0.0, converged=True, exact=True, error=error)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method with exact steps."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, _: float) -> tuple[Tensor, float]:
            return Factor.of(operator, precision).solve(gradient), 0.0

        return newton(objective, init.double(), direction, tolerance=self.tolerance, max_steps=self.max_steps)


@dataclass(frozen=True)
class Factor:
    """`H⁻¹` by dense algebra in float64, by the smaller of two matrices.

    Attributes:
        precision: the diagonal of `A`.
        factor: the Cholesky factor of `H`, if `root` is `None`; else of `I + R A⁻¹ Rᵀ`.
        root: `R` with `RᵀR = M`.
        matrix: `M`, if it was formed.
    """

    # Refinements of a solution by Woodbury's identity, each of which reduces its error by the condition times the unit
    # of rounding.
    _REFINEMENTS = 2

    precision: Tensor
    factor: Tensor
    root: Tensor | None = None
    matrix: Tensor | None = None

    @classmethod
    def of(cls, operator: Operator, precision: Tensor) -> "Factor":
        precision, matrix = precision.double(), operator.matrix()
        if matrix is None and operator.size <= operator.num_rows:
            matrix = sum_of_squares(operator.root_rows(), operator.size, precision.device)
        if matrix is not None:
            return cls(precision, _cholesky_factor(matrix, precision, operator), matrix=matrix)
        root = torch.cat([block.double() for block in operator.root_rows()])
        inner = (root / precision) @ root.T
        factor = torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
        return cls(precision, factor, root)

    def matmul(self, v: Tensor) -> Tensor:
        """`Mv`."""
        if self.root is not None:
            return (v @ self.root.T) @ self.root
        assert self.matrix is not None
        return v @ self.matrix

    def solve(self, rhs: Tensor) -> Tensor:
        """`H⁻¹v`."""
        if self.root is None:
            return torch.cholesky_solve(rhs.T, self.factor).T
        solution = self._by_woodbury(rhs)
        # Its two terms cancel where the data decide: what that has cost is solved for again.
        for _ in range(self._REFINEMENTS):
            solution = solution + self._by_woodbury(rhs - self.matmul(solution) - self.precision * solution)
        return solution

    def _by_woodbury(self, rhs: Tensor) -> Tensor:
        assert self.root is not None
        scaled = rhs / self.precision
        correction = torch.cholesky_solve(self.root @ scaled.T, self.factor)
        return scaled - (self.root.T @ correction).T / self.precision

    def leverage(self) -> Tensor:
        """The diagonal of `H⁻¹M`."""
        if self.root is None:
            # 1 − AH⁻¹ needs no product with M.
            return 1 - self.precision * torch.cholesky_inverse(self.factor).diagonal()
        half = torch.linalg.solve_triangular(self.factor, self.root, upper=False)
        return (half**2).sum(0) / self.precision


def _cholesky_factor(matrix: Tensor, precision: Tensor, operator: Operator) -> Tensor:
    """The factor of `H = M + A`; by a QR decomposition of a root of `H` where the sum of both has lost its digits."""
    factor = accurate_factor(matrix, precision)
    if factor is not None:
        return factor
    # The condition of a root is the square root of that of `H`.
    blocks = [*(block.double() for block in operator.root_rows()), torch.diag(precision.sqrt())]
    upper = torch.linalg.qr(torch.cat(blocks), mode="r")[1]
    return (upper * upper.diagonal().sign()[:, None]).T.contiguous()
