"""The Gram matrix of a whitened problem, its preconditioner, and conjugate gradients on it.

`S = LᵀΦA⁻¹ΦᵀL`, `[N·C, N·C]`, with a root `L Lᵀ = B` of the curvature: `I + S` has no eigenvalue below one. A product
is a VJP and a JVP over all data.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.networks.solving import LOCK
from laplace_sampling.solvers.placement import normal
from laplace_sampling.solvers.recorded import recorded

__all__ = ["DualSolve", "LowRank", "WhitenedGram", "backward", "forward", "randomised_svd", "solve_shifted"]

# Runs of conjugate gradients at most, each from where the last one ended. On a spectrum that falls as a power one run
# reaches tolerances down to 1e-13, so that one or six make no difference there; a guard for worse ones.
_RESTARTS = 3
# Without rounding, conjugate gradients end after as many steps as the matrix has rows at most; so many times that is
# the bound on those that they take with it.
_MOST_STEPS = 10
# Memory for a stack of vectors in weight space, in a product with many: a definition, 64 MiB.
_STACK_BYTES = 2**26


class WhitenedGram:
    """`S = LᵀΦA⁻¹ΦᵀL`, `[N·C, N·C]` in float64, known by its products.

    Args:
        variance: the diagonal of `A⁻¹`, `[P]`.
        ggn: `M = ΦᵀL LᵀΦ`.

    Attributes:
        rows: how many vectors it was multiplied with so far.
    """

    def __init__(self, variance: Float[Tensor, " P"], ggn: GGN) -> None:
        self.variance, self.ggn = variance.detach().double(), ggn
        self.rows = 0

    def __len__(self) -> int:
        return self.ggn.outputs.numel()

    def matmul(self, columns: Float[Tensor, "NC K"]) -> Float[Tensor, "NC K"]:
        """`S v` of each column."""
        self.rows += columns.shape[1]
        # Few enough at a time for their stacks in weight space, which are larger by P/(N·C).
        parts = columns.mT.split(max(1, int(_STACK_BYTES / (8 * self.ggn.size))))
        products = [_product(self.ggn, self.variance, part) for part in parts]
        return torch.cat(products).mT.contiguous()


@recorded
def _product(ggn: GGN, variance: Float[Tensor, " P"], u: Float[Tensor, "K NC"]) -> Float[Tensor, "K NC"]:
    """`S u`."""
    return forward(ggn, variance * backward(ggn, u))


@recorded
def backward(ggn: GGN, u: Float[Tensor, "K NC"]) -> Float[Tensor, "K P"]:
    """`ΦᵀL u`, in float64."""
    rows = ggn.likelihood.root(ggn.outputs, u.reshape(-1, *ggn.outputs.shape), ggn.targets)
    total = torch.zeros(len(u), ggn.size, dtype=torch.float64, device=ggn.device)
    with ggn.features.summing(total):
        for batch in ggn.features.own_chunks():
            total += ggn.features.vjp(rows[:, batch].to(ggn.dtype), batch)
    return total


@recorded
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
        """The preconditioner of `I + factor · S`."""
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
        # Least squares, by the pseudoinverse: where all `s` are equal the two columns are dependent.
        line = torch.stack([torch.ones_like(s), 1 + s], dim=1)
        a, b = (torch.linalg.pinv(line) @ (1 / (1 + s))).tolist()
        off = (off_x**2).sum(1) - a * ((off_x * off_r).sum(1) - size) - b * ((off_r**2).sum(1) - size - rest)
        return len(self.vectors) - leading - off


def _decay(largest: float, total: float, num: int) -> Float[Tensor, " num"]:
    """A geometric series of `num` terms below `largest` with the sum `total`; equal terms where that is too large."""
    total, powers = max(total, 0.0), torch.arange(1, num + 1, dtype=torch.float64)
    if total >= num * largest:
        return torch.full((num,), total / max(num, 1), dtype=torch.float64)
    from scipy.optimize import brentq  # slow to import

    ratio: Any = brentq(lambda q: float((largest * q**powers).sum()) - total, 0.0, 1.0)
    return largest * ratio**powers


def randomised_svd(
    S: WhitenedGram,
    rank: int,
    *,
    oversampling: int = 10,
    seed: int = 0,
    start: Float[Tensor, "NC r"] | None = None,
) -> LowRank:
    r"""The leading eigenvectors of `S` by randomised range finding (Halko et al. 2011; thesis §7.3.2).

    `Q = qr(S R)` for a normal `R` of `r + p` columns, `QᵀSQ = VΛVᵀ`, `U = QV`: two products a column.

    Args:
        S: the matrix.
        rank: `r`, at most its size.
        oversampling: `p`, columns that are dropped in the end.
        seed: of `R`.
        start: a range that is near already, orthonormal, in the place of `Q`: one product a column.
    """
    if rank < 1:
        raise ValueError(f"The rank of a preconditioner must be at least 1, but is {rank}.")
    rank = min(rank, len(S))
    columns = min(len(S), rank + oversampling)
    before = S.rows
    if start is None:
        test = normal(
            len(S),
            columns,
            seed=seed,
            dtype=torch.float64,
            device=S.variance.device,
            drawn_in=torch.float64,
        )
        Q = torch.linalg.qr(S.matmul(test))[0]
    else:
        Q = start
    # Ritz values on the range: exactly diag(UᵀSU), which `LowRank.traces` relies on.
    core = Q.mT @ S.matmul(Q)
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    return LowRank(Q @ vectors[:, -rank:], values[-rank:].clamp_min(0), S.rows - before)


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
        max_iterations: at most so many, and at most ten times the size of the matrix: without rounding one is enough.
        preconditioner: of `I + S`.
        init: a start.
    """
    if not tolerance > 0 or max_iterations < 1:
        raise ValueError(
            f"`tolerance` must be positive and `max_iterations` at least 1, but are {tolerance} and {max_iterations}."
        )
    max_iterations = min(max_iterations, _MOST_STEPS * rhs.shape[1])
    before, rhs = S.rows, rhs.double()
    run = _Run(S, 0.5 * tolerance, preconditioner)
    x = torch.zeros_like(rhs.mT).contiguous() if init is None else init.double().mT.contiguous()
    norm = rhs.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    history: list[float] = []
    iterations, converged, residual = 0, False, torch.ones_like(norm)
    for _ in range(_RESTARTS):
        # The residual of the recurrence may drift from the true one: then go on from where it ended.
        x, norms = run.iterate(rhs, x, max_iterations - iterations)
        history += norms if iterations == 0 else norms[1:]
        iterations += max(len(norms) - 1, 0)
        residual = (rhs.mT - x - S.matmul(x)).norm(dim=0) / norm
        converged = bool((residual <= tolerance).all())
        if converged or iterations >= max_iterations or len(norms) <= 1:
            break
    return DualSolve(x.mT, residual, iterations, history, S.rows - before, converged)


@dataclass
class _Run:
    """A run of the conjugate gradients of `linear_operator`, which calls back for products and preconditioning.

    Attributes:
        matrix: `S`.
        target: relative residual at which a row is done.
        preconditioner: of `I + S`.
        active: rows that are not done.
        norms: the largest relative residual of a row before each iteration.
    """

    matrix: WhitenedGram
    target: float
    preconditioner: LowRank | None
    active: Tensor = field(init=False)
    norms: list[float] = field(init=False)

    def iterate(
        self, rhs: Float[Tensor, "K NC"], x: Float[Tensor, "NC K"], max_iterations: int
    ) -> tuple[Float[Tensor, "NC K"], list[float]]:
        """The iterate at the end, and norms of residuals until all rows are done."""
        from laplace_sampling.gp.linear_operators import NumericalWarning, linear_cg, settings  # slow to import

        self.active, self.norms = torch.ones(len(rhs), dtype=torch.bool, device=rhs.device), []
        with (
            LOCK,  # filters and settings are those of all threads
            warnings.catch_warnings(),
            settings.terminate_cg_by_size(False),
            settings.verbose_linalg(False),
        ):
            warnings.simplefilter("ignore", NumericalWarning)  # the result says whether it converged
            x = linear_cg(
                self._multiply,
                rhs.mT.contiguous(),
                n_tridiag=0,
                tolerance=self.target,
                eps=1e-100,
                stop_updating_after=self.target,
                max_iter=max_iterations,
                max_tridiag_iter=0,
                initial_guess=x,
                preconditioner=self._precondition,
            )
        # It goes on for some iterations after the last row is done, at no products: they do not count.
        done = next((i for i, norm in enumerate(self.norms) if norm < self.target), max(len(self.norms) - 1, 0))
        return x, self.norms[: done + 1]

    def _precondition(self, residual: Float[Tensor, "NC K"]) -> Float[Tensor, "NC K"]:
        # `linear_cg` normalises the right-hand sides, so that these are relative residuals.
        norms = residual.norm(dim=0)
        self.norms.append(float(norms.max()))
        self.active.copy_(norms >= self.target)
        return residual.clone() if self.preconditioner is None else self.preconditioner.solve(residual)

    def _multiply(self, v: Float[Tensor, "NC K"]) -> Float[Tensor, "NC K"]:
        # The product of a row that is done is not used.
        product = v.clone()
        if bool(self.active.any()):
            product[:, self.active] += self.matrix.matmul(v[:, self.active])
        return product
