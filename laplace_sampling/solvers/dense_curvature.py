r"""Dense curvature, `M` itself by its eigenvectors: exact, where weights are few and data many.

`M = Σᵢ φᵢᵀ Bᵢ φᵢ` is a sum over data, so one pass over blocks of their rows gives it, and no Jacobian is held.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.lapack import accurate_factor, symmetric_eigen
from laplace_sampling.solvers.preconditioners import Curvature


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
