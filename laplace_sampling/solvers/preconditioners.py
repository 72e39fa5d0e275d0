"""Approximate inverses of `M + shift·I`, built once from `M` and used for every shift."""

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.lapack import symmetric_eigen
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.placement import normal

# Data whose rows are computed together: the rows of all are held in any case, temporary ones only of these.
_ROWS_TOGETHER = 256


class Preconditioner(ABC):
    """A symmetric positive definite `P ≈ M + shift·I`, for every `shift > 0`.

    `passes` counts the products that were spent on building it, in units of all data and one vector.
    """

    passes: float

    @abstractmethod
    def solve(self, v: Float[Tensor, "K P"], shift: float) -> Float[Tensor, "K P"]:
        """`P⁻¹ v_k`."""

    @abstractmethod
    def solve_root(self, v: Float[Tensor, "K P"], shift: float) -> Float[Tensor, "K P"]:
        """`P^{-1/2} v_k`, the symmetric root."""

    @abstractmethod
    def congruent(self, w: Float[Tensor, " P"]) -> "Preconditioner":
        """The preconditioner of `WMW`, `W = diag(w)`: no product is made."""

    def adapted(self, operator: Operator) -> "Preconditioner":
        """The preconditioner of a matrix that is about a multiple of `M`; one product may find the factor."""
        return self

    def adapted_to(self, operator: Operator, w: Float[Tensor, " P"]) -> "tuple[Preconditioner, float]":
        """The preconditioner of `W operator W`, `W = diag(w)`, and the passes that it took to adapt it."""
        adapted = self.adapted(operator)
        return adapted if bool((w == 1).all()) else adapted.congruent(w), adapted.passes - self.passes


class Curvature(Preconditioner):
    """An approximation `M̂` of `M` of which all eigenvalues are known: it defines a posterior, too.

    A shift may be a tensor `[P]` that is constant within each block of `M̂`, as within a layer.
    """

    @abstractmethod
    def solve(self, v: Float[Tensor, "K P"], shift: float | Tensor) -> Float[Tensor, "K P"]:
        """`(M̂ + shift)⁻¹ v_k`."""

    @abstractmethod
    def solve_root(self, v: Float[Tensor, "K P"], shift: float | Tensor) -> Float[Tensor, "K P"]:
        """`(M̂ + shift)^{-1/2} v_k`, the symmetric root."""

    @abstractmethod
    def congruent(self, w: Float[Tensor, " P"]) -> "Curvature": ...

    @abstractmethod
    def matmul(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        """`M̂ v_k`."""

    @abstractmethod
    def variance(self, shift: float | Tensor) -> Float[Tensor, " P"]:
        """The diagonal of `(M̂ + shift)⁻¹`."""

    @abstractmethod
    def leverage(self, shift: float | Tensor) -> Float[Tensor, " P"]:
        """The diagonal of `(M̂ + shift)⁻¹M̂`."""

    @abstractmethod
    def eigenvalues(self) -> Float[Tensor, " P"]:
        """All eigenvalues of `M̂`, in no order."""

    def dimension(self, shift: float) -> float:
        """`γ = Tr(M̂ + shift)⁻¹M̂`."""
        values = self.eigenvalues().double()
        return float((values / (values + shift)).sum())

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it consists of, for saving."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Curvature":
        """The inverse of `tensors`."""

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """`φ_i (M̂ + s_a)⁻¹ φ_iᵀ` for rows `φ_i` and several shifts, in float64."""
        flat, blocks = rows.flatten(0, 1), []
        for shift in shifts.tolist():
            solved = self.solve(flat, shift).reshape(rows.shape)
            block = rows.double() @ solved.double().mT
            blocks.append((block + block.mT) / 2)
        return torch.stack(blocks)


class Jacobi(Curvature):
    """`P = diag(M) + shift·I`."""

    def __init__(self, diagonal: Float[Tensor, " P"], passes: float = 0.0) -> None:
        self.diagonal, self.passes = diagonal, passes

    def solve(self, v: Tensor, shift: float | Tensor) -> Tensor:
        return v / (self.diagonal + shift)

    def solve_root(self, v: Tensor, shift: float | Tensor) -> Tensor:
        return v / (self.diagonal + shift).sqrt()

    def congruent(self, w: Tensor) -> "Jacobi":
        return Jacobi(self.diagonal * w**2, self.passes)

    def matmul(self, v: Tensor) -> Tensor:
        return v * self.diagonal

    def variance(self, shift: float | Tensor) -> Tensor:
        return 1 / (self.diagonal + shift)

    def leverage(self, shift: float | Tensor) -> Tensor:
        return self.diagonal / (self.diagonal + shift)

    def eigenvalues(self) -> Tensor:
        return self.diagonal

    def tensors(self) -> dict[str, Tensor]:
        return {"diagonal": self.diagonal}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Jacobi":
        return cls(tensors["diagonal"])


class Nystrom(Preconditioner):
    r"""`P = U(Λ + shift)Uᵀ + (λ_r + shift)(I − UUᵀ)`, with `UΛUᵀ` the Nyström approximation of `M`.

    `UΛUᵀ = (MΩ)(ΩᵀMΩ)⁺(MΩ)ᵀ` for a random orthonormal `Ω` of `r` columns, computed by the stable algorithm of
    Frangella, Tropp and Udell (2023), "Randomized Nyström preconditioning", Alg. 2.1. Up to the
    factor `λ_r + shift`, `P` is that paper's preconditioner.

    Attributes:
        vectors: `U`, one eigenvector a row, `[r, P]`.
        eigenvalues: `Λ`, falling, `[r]`.
        passes: products spent, of all data and one vector.
    """

    def __init__(self, vectors: Float[Tensor, "r P"], eigenvalues: Float[Tensor, " r"], passes: float) -> None:
        self.vectors, self.eigenvalues, self.passes = vectors, eigenvalues, passes

    @classmethod
    def of(cls, operator: Operator, rank: int, seed: int = 0) -> "Nystrom":
        """The approximation of `M` by `r` products, with an `Ω` of this seed."""
        shape = min(rank, operator.size), operator.size
        generator = torch.Generator().manual_seed(seed)
        white = normal(*shape, seed=generator, dtype=torch.float64, device=operator.device, drawn_in=torch.float64)
        test = torch.linalg.qr(white.T)[0].T
        sketch = operator.matmul(test.to(operator.dtype)).double()
        vectors, eigenvalues = _nystrom(test, sketch, torch.finfo(operator.dtype).eps)
        return cls(vectors.to(operator.dtype), eigenvalues.to(operator.dtype), float(len(eigenvalues)))

    @classmethod
    def of_rows(
        cls, operator: Operator, data: Tensor, weights: Tensor, *, max_rank: int, generator: torch.Generator
    ) -> "Nystrom":
        r"""The leading eigenvectors of `Σ_j w_j g_j g_jᵀ`, with one random row `g_j` of each of some data.

        It estimates `M` if the weights are those of the data drawn. A row is half a product of one datum, so that this
        costs `n/2N` passes whatever the rank, and much less than the sketch that `of` makes.

        Args:
            operator: `M`.
            data: indices, `[n]`; a datum may come twice.
            weights: `[n]`.
            max_rank: the largest rank; a few times less than `n`, as the small eigenvalues of a sample are mostly its
                noise.
            generator: of the rows.
        """
        rows = torch.empty(len(data), operator.size, dtype=operator.dtype, device=operator.device)
        for part, indices in zip(rows.split(_ROWS_TOGETHER), data.split(_ROWS_TOGETHER), strict=True):
            part.copy_(operator.random_rows(indices, generator))
        rows *= weights.sqrt().to(rows)[:, None]
        return cls.of_factor(rows, max_rank, len(data) / (2 * operator.num_data))

    @classmethod
    def of_root(cls, operator: Operator, *, max_rank: int) -> "Nystrom":
        """The leading eigenvectors of `M` itself, from all its rows, for few data: half a pass for each output."""
        rows = torch.cat(list(operator.root_rows()))
        return cls.of_factor(rows, max_rank, len(rows) / (2 * operator.num_data))

    @classmethod
    def of_factor(cls, rows: Float[Tensor, "n P"], max_rank: int, passes: float) -> "Nystrom":
        """The leading eigenvectors of `RᵀR`, for which `passes` were spent."""
        num_rows, size, dtype = *rows.shape, rows.dtype
        # The smaller of the two Gram matrices; both have the eigenvalues of the sum.
        wide = num_rows <= size
        gram = (rows @ rows.T if wide else rows.T @ rows).double()
        if not wide:
            rows = rows[:0].clone()  # frees memory: the decomposition takes several times that of `gram`
        if not bool(gram.isfinite().all()):
            raise FloatingPointError(
                "The rows of the curvature are not finite: the Jacobian products of the model contain NaN or infinity."
            )
        eigenvalues, vectors = symmetric_eigen(gram)
        eigenvalues = eigenvalues.flip(-1)
        # Rounding errors of the Gram matrix are of the size eps·λ_1: smaller eigenvalues are noise.
        large = eigenvalues > 10 * torch.finfo(dtype).eps * eigenvalues[0]
        rank = max(1, min(max_rank, int(large.sum())))
        eigenvalues, vectors = eigenvalues[:rank], vectors[:, -rank:].flip(-1).T
        if wide:
            # From left to right singular vectors.
            root = eigenvalues.sqrt()[:, None]
            vectors = (vectors / torch.where(root > 0, root, 1.0)).to(rows) @ rows
        return cls(vectors.to(dtype), eigenvalues.to(dtype), passes)

    def solve(self, v: Tensor, shift: float) -> Tensor:
        return self._apply(v, 1 / (self.eigenvalues + shift))

    def solve_root(self, v: Tensor, shift: float) -> Tensor:
        return self._apply(v, (self.eigenvalues + shift) ** -0.5)

    def congruent(self, w: Tensor) -> "Nystrom":
        half = self.eigenvalues.sqrt()[:, None] * self.vectors * w
        _, singular, vectors = torch.linalg.svd(half, full_matrices=False)
        return Nystrom(vectors, singular**2, self.passes)

    def adapted(self, operator: Operator) -> "Nystrom":
        leading = self.vectors[:1]
        # The leading eigenvector tells the factor best: a multiple of `M` keeps it, and its product is the largest.
        ratio = float((leading * operator.matmul(leading)).sum() / self.eigenvalues[0].clamp_min(1e-30))
        return Nystrom(self.vectors, self.eigenvalues * ratio, self.passes + 1)

    def _apply(self, v: Tensor, inside: Tensor) -> Tensor:
        """`U diag(inside) Uᵀ v`, and outside the span of `U` the last entry of `inside` times `v`."""
        return inside[-1] * v + ((v @ self.vectors.T) * (inside - inside[-1])) @ self.vectors


def _nystrom(test: Tensor, sketch: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors `[r, P]` and eigenvalues of the Nyström approximation from `Ωᵀ` and `(MΩ)ᵀ`, in float64."""
    norm = float(sketch.norm())
    # The shift hides the rounding of the products, which may make ΩᵀMΩ indefinite; it is subtracted in the end.
    shift = max(eps * norm, 1e-290)
    core = test @ sketch.T
    core = (core + core.T) / 2
    eye = torch.eye(len(core), dtype=core.dtype, device=core.device)
    # Products in float32 may have larger errors than `eps`: a shift that is too small is raised.
    factor, failed = torch.linalg.cholesky_ex(core + shift * eye)
    while bool(failed) and shift < 0.01 * norm:
        shift *= 10
        factor, failed = torch.linalg.cholesky_ex(core + shift * eye)
    if bool(failed) or not math.isfinite(norm):
        raise FloatingPointError(
            "The sketch of the curvature is not finite or not positive semi-definite: the Jacobian products of the "
            "model contain NaN or infinity, or are too inaccurate in its precision."
        )
    # The singular values of C⁻¹(MΩ)ᵀ are the roots of the eigenvalues: more accurate than an eigendecomposition.
    half = torch.linalg.solve_triangular(factor, sketch + shift * test, upper=False)
    _, singular, vectors = torch.linalg.svd(half, full_matrices=False)
    return vectors, (singular**2 - shift).clamp_min(0)
