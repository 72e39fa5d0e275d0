"""The Gram matrix of a whitened problem as an operator, its preconditioners, and conjugate gradients on it.

`S = LᵀΦA⁻¹ΦᵀL`, `[N·C, N·C]`, with a root `L Lᵀ = B` of the curvature: `I + S` has no eigenvalue below one. A product
is a VJP and a JVP over all data.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from laplace_sampling.gp.linear_operators import IndexType, LinearOperator, NumericalWarning, linear_cg, settings
from laplace_sampling.linear_model.ggn import GGN

__all__ = [
    "DualSolve",
    "LowRank",
    "WhitenedGram",
    "backward",
    "forward",
    "pivoted_cholesky",
    "randomised_svd",
    "solve_shifted",
]

# Runs of conjugate gradients at most, each from where the last one ended.
_RESTARTS = 3
# Memory for a stack of vectors in weight space, in a product with many.
_STACK_BYTES = 2**26


class WhitenedGram(LinearOperator):
    """`S = LᵀΦA⁻¹ΦᵀL`, `[N·C, N·C]` in float64, as `linear_operator` sees matrices: vectors are columns.

    `rows` counts the vectors that it was multiplied with. Gradients are not supported.

    Args:
        variance: the diagonal of `A⁻¹`, `[P]`.
        ggn: `M = ΦᵀL LᵀΦ`.
    """

    def __init__(self, variance: Float[Tensor, " P"], ggn: GGN) -> None:
        super().__init__(variance.detach().double(), ggn=ggn)
        self.variance, self.ggn = variance.detach().double(), ggn
        self.rows = 0

    def _size(self) -> torch.Size:
        return torch.Size([self.ggn.outputs.numel()] * 2)

    def _transpose_nonbatch(self) -> "WhitenedGram":
        return self

    def _matmul(self, rhs: Float[Tensor, "*B NC K"]) -> Float[Tensor, "*B NC K"]:
        columns = rhs[:, None] if rhs.dim() == 1 else rhs
        stack = columns.mT.reshape(-1, len(self))
        self.rows += len(stack)
        # Few enough at a time for their stacks in weight space.
        parts = stack.split(max(1, int(_STACK_BYTES / (8 * self.ggn.size))))
        products = [forward(self.ggn, self.variance * backward(self.ggn, part)) for part in parts]
        product = torch.cat(products).reshape(columns.mT.shape).mT
        return product.reshape(rhs.shape) if rhs.dim() == 1 else product.contiguous()

    def __len__(self) -> int:
        return self.ggn.outputs.numel()

    def _diagonal(self) -> Float[Tensor, " NC"]:
        return torch.cat([(rows.double() ** 2) @ self.variance for rows in self.ggn.root_rows()])

    def _get_indices(self, row_index: IndexType, col_index: IndexType, *batch_indices: IndexType) -> Tensor:
        assert isinstance(row_index, Tensor)
        assert isinstance(col_index, Tensor)
        # By unit vectors, on the side where fewer are asked for: pivoted Cholesky asks for one row at a time.
        rows, columns = torch.broadcast_tensors(row_index, col_index)
        few, other = (rows, columns) if len(rows.unique()) < len(columns.unique()) else (columns, rows)
        distinct, place = few.unique(return_inverse=True)
        units = torch.zeros(len(self), len(distinct), dtype=torch.float64, device=self.device)
        units[distinct, torch.arange(len(distinct), device=distinct.device)] = 1
        return self._matmul(units)[other, place]


def backward(ggn: GGN, u: Float[Tensor, "K NC"]) -> Float[Tensor, "K P"]:
    """`ΦᵀL u`, in float64."""
    rows = ggn.likelihood.root(ggn.outputs, u.reshape(-1, *ggn.outputs.shape), ggn.targets)
    total = torch.zeros(len(u), ggn.size, dtype=torch.float64, device=ggn.device)
    for batch in ggn.features.chunks():
        total += ggn.features.vjp(rows[:, batch].to(ggn.dtype), batch)
    return total


def forward(ggn: GGN, v: Float[Tensor, "K P"]) -> Float[Tensor, "K NC"]:
    """`LᵀΦ v`, in float64."""
    outputs = ggn.features.outputs(v.to(ggn.dtype)).double()
    return ggn.likelihood.root_transpose(ggn.outputs, outputs, ggn.targets).flatten(1)


@dataclass(frozen=True)
class LowRank:
    r"""The preconditioner `P = I + UΛUᵀ ≈ I + S`, by `P⁻¹ = I − U diag(λ/(λ + 1)) Uᵀ`.

    Attributes:
        vectors: `U`, orthonormal, `[N·C, r]`.
        eigenvalues: `λ`, `[r]`.
        products: with `S` that it took.
        trace: `Tr S`, where `λ = diag(UᵀSU)` exactly; what `traces` needs.
    """

    vectors: Float[Tensor, "NC r"]
    eigenvalues: Float[Tensor, " r"]
    products: int
    trace: float | None = None

    def solve(self, v: Float[Tensor, "NC K"]) -> Float[Tensor, "NC K"]:
        """`P⁻¹v`."""
        weights = self.eigenvalues / (self.eigenvalues + 1)
        return v - self.vectors @ (weights[:, None] * (self.vectors.mT @ v))

    def rescaled(self, factor: float) -> "LowRank":
        """That of `factor · S`."""
        trace = None if self.trace is None else self.trace * factor
        return replace(self, eigenvalues=self.eigenvalues * factor, products=0, trace=trace)

    def traces(self, rhs: Float[Tensor, "K NC"], solved: Float[Tensor, "K NC"]) -> Float[Tensor, " K"]:
        r"""Unbiased estimates of `Tr S(I + S)⁻¹` from `r ~ N(0, I + S)` and `x = (I + S)⁻¹r`, one a row.

        `Tr (I + S)⁻¹` is the mean of `xᵀx`. Control variates take most of its variance: along `U` the squared norm of
        `(I + Λ)⁻¹Uᵀr`, of mean `Σ 1/(1 + λ)`; off it `a xᵀr + b rᵀr`, whose means follow from `Tr S`, with
        `a + b(1 + s) ≈ 1/(1 + s)` for eigenvalues that fall from `λ_min` as a geometric series of the right sum.
        """
        if self.trace is None:
            raise ValueError("`traces` needs `trace`, `Tr S`.")
        along_r, along_x = rhs @ self.vectors, solved @ self.vectors
        off_r, off_x = rhs - along_r @ self.vectors.mT, solved - along_x @ self.vectors.mT
        inverse = 1 / (1 + self.eigenvalues)
        leading = (along_x**2 - (inverse * along_r) ** 2 + inverse).sum(1)
        size, rest = len(self.vectors) - len(self.eigenvalues), self.trace - float(self.eigenvalues.sum())
        s = _decay(float(self.eigenvalues.min()), rest, size)
        line = torch.stack([torch.ones_like(s), 1 + s], dim=1)
        a, b = (torch.linalg.pinv(line) @ (1 / (1 + s))).tolist()
        off = (off_x**2).sum(1) - a * ((off_x * off_r).sum(1) - size) - b * ((off_r**2).sum(1) - size - rest)
        return len(self.vectors) - leading - off


def _decay(largest: float, total: float, num: int) -> Float[Tensor, " num"]:
    """So many numbers of a geometric series below the largest, of a given sum; equal ones where it is too large."""
    total, powers = max(total, 0.0), torch.arange(1, num + 1, dtype=torch.float64)
    if total >= num * largest:
        return torch.full((num,), total / max(num, 1), dtype=torch.float64)
    ratio: Any = brentq(lambda q: float((largest * q**powers).sum()) - total, 0.0, 1.0)
    return largest * ratio**powers


def randomised_svd(S: WhitenedGram, rank: int, *, oversampling: int = 10, seed: int = 0) -> LowRank:
    r"""The leading eigenvectors of `S` by randomised range finding (Halko et al. 2011; thesis §7.3.2).

    `Q = qr(S R)` for a normal `R` of `r + p` columns, `QᵀSQ = VΛVᵀ`, `U = QV`: two products a column.

    Args:
        S: the matrix.
        rank: `r`, at most its size.
        oversampling: `p`, columns that are dropped in the end.
        seed: of `R`.
    """
    rank = _check_rank(S, rank)
    generator = torch.Generator().manual_seed(seed)
    columns = min(len(S), rank + oversampling)
    before = S.rows
    test = torch.randn(len(S), columns, generator=generator, dtype=torch.float64).to(S.device)
    Q = torch.linalg.qr(S._matmul(test))[0]
    core = Q.mT @ S._matmul(Q)
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    return LowRank(Q @ vectors[:, -rank:], values[-rank:].clamp_min(0), S.rows - before)


def pivoted_cholesky(S: WhitenedGram, rank: int, *, tolerance: float = 1e-10) -> LowRank:
    """`S ≈ GGᵀ` by `linear_operator`'s pivoted Cholesky: the exact diagonal, and a product for each column of `G`.

    Args:
        S: the matrix.
        rank: columns of `G` at most.
        tolerance: stop when the trace of the rest is below it, relative to the largest entry of the diagonal.
    """
    rank, before = _check_rank(S, rank), S.rows
    with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants(False):
        G = S.pivoted_cholesky(rank, error_tol=tolerance)
    assert isinstance(G, Tensor)
    U, singular, _ = torch.linalg.svd(G, full_matrices=False)
    return LowRank(U, singular**2, S.rows - before)


def _check_rank(S: WhitenedGram, rank: int) -> int:
    if rank < 1:
        raise ValueError(f"The rank of a preconditioner must be at least 1, but is {rank}.")
    return min(rank, len(S))


@dataclass(frozen=True)
class DualSolve:
    """Solutions of `(I + S) x = b`.

    Attributes:
        value: `x`, `[K, N·C]`.
        residual: `‖b − (I + S)x‖ / ‖b‖`, one a row, computed anew.
        iterations: products with `S` that the slowest row took until the tolerance.
        history: the largest relative residual of a row after each iteration, the first before any.
        products: with `S`, one for each row and iteration until the row's tolerance, and one in the end.
        converged: whether all residuals are below the tolerance.
    """

    value: Float[Tensor, "K NC"]
    residual: Float[Tensor, " K"]
    iterations: int
    history: list[float]
    products: int
    converged: bool


def solve_shifted(
    S: WhitenedGram,
    rhs: Float[Tensor, "K NC"],
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    preconditioner: LowRank | None = None,
    init: Float[Tensor, "K NC"] | None = None,
) -> DualSolve:
    r"""`(I + S)⁻¹ b` by preconditioned conjugate gradients of `linear_operator`, every tolerance given.

    Its defaults are a tolerance of 1 on the mean residual, and absolute thresholds of 1e-10 that stop progress at 1e-5;
    and it makes eleven iterations at least. Here each row stops at its tolerance, and takes no more products then.

    Args:
        S: the matrix.
        rhs: `b`.
        tolerance: of the residual of each row, relative to `b`.
        max_iterations: at most so many.
        preconditioner: of `I + S`.
        init: a start.
    """
    if not tolerance > 0 or max_iterations < 1:
        raise ValueError(
            f"`tolerance` must be positive and `max_iterations` at least 1, but are {tolerance} and {max_iterations}."
        )
    before = S.rows
    rhs = rhs.double()
    history: list[float] = []
    active = torch.ones(len(rhs), dtype=torch.bool, device=rhs.device)
    # Columns are normalised by `linear_cg`, so that these are relative residuals.
    target, iterations = 0.5 * tolerance, 0

    def precondition(residual: Tensor) -> Tensor:
        norms = residual.norm(dim=0)
        history.append(float(norms.max()))
        active.copy_(norms >= target)
        return residual.clone() if preconditioner is None else preconditioner.solve(residual)

    def multiply(v: Tensor) -> Tensor:
        # What is returned for a row that has converged is not used.
        product = v.clone()
        if bool(active.any()):
            product[:, active] += S._matmul(v[:, active])
        return product

    x = torch.zeros_like(rhs.mT).contiguous() if init is None else init.double().mT.contiguous()
    residual, converged = torch.ones_like(rhs[:, 0]), False
    norm = rhs.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    for _ in range(_RESTARTS):
        # The recurrence may drift from the true residual: then go on from where it ended.
        before_run = len(history)
        active.fill_(True)
        with (
            warnings.catch_warnings(),
            settings.terminate_cg_by_size(False),
            settings.verbose_linalg(False),
        ):
            warnings.simplefilter("ignore", NumericalWarning)  # the result says whether it converged
            x = linear_cg(
                multiply,
                rhs.mT.contiguous(),
                n_tridiag=0,
                tolerance=target,
                eps=1e-100,
                stop_updating_after=target,
                max_iter=max_iterations - iterations,
                max_tridiag_iter=0,
                initial_guess=x,
                preconditioner=precondition,
            )
        run = history[before_run:]
        taken = next((i for i, r in enumerate(run) if r < target), max(len(run) - 1, 0))
        history[before_run:] = run[: taken + 1] if iterations == 0 else run[1 : taken + 1]
        iterations += taken
        residual = (rhs.mT - x - S._matmul(x)).norm(dim=0) / norm
        converged = bool((residual <= tolerance).all())
        if converged or iterations >= max_iterations or taken == 0:
            break
    return DualSolve(
        x.mT,
        residual,
        iterations,
        history,
        S.rows - before,
        converged,
    )
