r"""Samples and mode in observation space by preconditioned conjugate gradients, for few outputs and many weights.

With a root `L Lᵀ = B` and `S = Lᵀ Φ A⁻¹ Φᵀ L`, `[N·C, N·C]` (Matheron's rule; thesis eq. 2.16–2.19, §7.3.3)

    ζ = θ⁰ + A⁻¹ΦᵀL (I + S)⁻¹ (z − LᵀΦθ⁰)        = θ⁰ − A⁻¹Φᵀ (K + B⁻¹)⁻¹ (ε + Φθ⁰),  ε = −L⁻ᵀ z ~ N(0, B⁻¹)

which holds for a singular `B` too, and whose matrix has no eigenvalue below one. A product with `S` is a VJP and a JVP
over all data. The solver is that of `linear_operator`, with every tolerance explicit.
"""

import warnings
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_operators import IndexType, LinearOperator, NumericalWarning, linear_cg, settings
from laplace_sampling.operators import GGN, Operator
from laplace_sampling.priors import GaussianPrior
from laplace_sampling.sampling import Draws, LinearModel
from laplace_sampling.solvers import (
    ConvergenceWarning,
    Minimum,
    Objective,
    Quadratic,
    Solution,
    Solver,
    function_error,
    newton,
    relative_residual,
)

__all__ = [
    "DualCG",
    "DualMode",
    "DualSolution",
    "DualSolve",
    "LowRank",
    "WhitenedGram",
    "dual_mode",
    "pivoted_cholesky",
    "randomised_svd",
    "sample_matheron",
    "solve_shifted",
]


# Runs of conjugate gradients at most, each from where the last one ended.
_RESTARTS = 3


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
        product = forward(self.ggn, self.variance * backward(self.ggn, stack)).reshape(columns.mT.shape).mT
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
    rows = ggn.likelihood.root(ggn.outputs, u.reshape(-1, *ggn.outputs.shape))
    total = torch.zeros(len(u), ggn.size, dtype=torch.float64, device=ggn.device)
    for batch in ggn.features.chunks():
        total += ggn.features.vjp(rows[:, batch].to(ggn.dtype), batch)
    return total


def forward(ggn: GGN, v: Float[Tensor, "K P"]) -> Float[Tensor, "K NC"]:
    """`LᵀΦ v`, in float64."""
    outputs = ggn.features.outputs(v.to(ggn.dtype)).double()
    return ggn.likelihood.root_transpose(ggn.outputs, outputs).flatten(1)


@dataclass(frozen=True)
class LowRank:
    r"""The preconditioner `P = I + UΛUᵀ ≈ I + S`, by `P⁻¹ = I − U diag(λ/(λ + 1)) Uᵀ`.

    Attributes:
        vectors: `U`, orthonormal, `[N·C, r]`.
        eigenvalues: `λ`, `[r]`.
        products: with `S` that it took.
    """

    vectors: Float[Tensor, "NC r"]
    eigenvalues: Float[Tensor, " r"]
    products: int

    def solve(self, v: Float[Tensor, "NC K"]) -> Float[Tensor, "NC K"]:
        """`P⁻¹v`."""
        weights = self.eigenvalues / (self.eigenvalues + 1)
        return v - self.vectors @ (weights[:, None] * (self.vectors.mT @ v))

    def rescaled(self, factor: float) -> "LowRank":
        """That of `factor · S`."""
        return replace(self, eigenvalues=self.eigenvalues * factor, products=0)


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


@dataclass(frozen=True)
class DualSolution(Solution):
    """A `Solution` from observation space; `value` is `ζ/s`, so that `value * prior.scale` are posterior samples.

    Attributes:
        coefficients: `x`, with `δ = A⁻¹ΦᵀL x`, `[K, N·C]`: a start for a later solve.
        iterations: of conjugate gradients, of the slowest row.
        dual_residual: `‖b − (I + S)x‖ / ‖b‖`, one a row.
    """

    coefficients: Float[Tensor, "K NC"] = field(kw_only=True)
    iterations: int = field(kw_only=True)
    dual_residual: Float[Tensor, " K"] = field(kw_only=True)


def sample_matheron(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    preconditioner: LowRank | None = None,
    init: Float[Tensor, "K NC"] | None = None,
) -> DualSolution:
    r"""Zero-mean posterior samples `ζ ~ N(0, (M + A)⁻¹)` by Matheron's rule, in the scaled coordinates `ζ/s`.

    For the same draws they are those of `sample_posterior`. A `ConvergenceWarning` names the residual if conjugate
    gradients did not reach their tolerance.

    Args:
        ggn: `M`, unscaled.
        prior: `A`.
        draws: the frozen noise, `θ⁰` and `z`.
        tolerance: of the residual in observation space, relative to `z − LᵀΦθ⁰`.
        max_iterations: of conjugate gradients.
        preconditioner: of `I + S` with `S = WhitenedGram(1/prior.diagonal(), ggn)`; see `randomised_svd` and
            `pivoted_cholesky`.
        init: `coefficients` of an earlier solve.
    """
    S = WhitenedGram(1 / prior.diagonal().double(), ggn)
    spread, scale = prior.spread().double(), prior.scale.double()
    centre = draws.prior(ggn.size).to(ggn.device).double() / spread.sqrt()
    white = draws.noise(ggn.features.num_outputs)(torch.arange(ggn.num_data)).to(ggn.device).double()
    rhs = white.flatten(1) - forward(ggn, centre * scale)
    solve = solve_shifted(
        S, rhs, tolerance=tolerance, max_iterations=max_iterations, preconditioner=preconditioner, init=init
    )
    _warn(solve, "sample_matheron", tolerance)
    delta = backward(ggn, solve.value) * scale / spread
    zeta = centre + delta
    product = backward(ggn, forward(ggn, zeta * scale)) * scale
    fit, pull = product - backward(ggn, white.flatten(1)) * scale, spread * delta
    error = function_error(fit + pull, zeta, product, float(spread.min()))
    dtype = ggn.dtype
    return DualSolution(
        zeta.to(dtype),
        delta.to(dtype),
        relative_residual(fit, pull).to(dtype),
        (zeta * product).to(dtype),
        float(solve.products + 2.5 * len(zeta)),
        solve.converged,
        error=error,
        coefficients=solve.value,
        iterations=solve.iterations,
        dual_residual=solve.residual,
    )


def _warn(solve: DualSolve, call: str, tolerance: float) -> None:
    if not solve.converged:
        warnings.warn(
            f"`{call}`: conjugate gradients stopped after {len(solve.history) - 1} iterations at a relative residual "
            f"of {float(solve.residual.max()):.2g}, above the tolerance {tolerance:.2g}. Raise `max_iterations`, or "
            "give a preconditioner of higher rank.",
            ConvergenceWarning,
            stacklevel=3,
        )


@dataclass(frozen=True)
class DualMode(Minimum):
    """A `Minimum`, `value` in the scaled coordinates `θ̄/s`, with the outputs `h(θ̄, x_i)` and all iterations of CG."""

    outputs: Float[Tensor, "N C"]
    iterations: int


def dual_mode(
    model: LinearModel,
    prior: GaussianPrior,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 1000,
    preconditioner: LowRank | None = None,
    max_steps: int = 50,
) -> DualMode:
    r"""`θ̄ = A⁻¹Φᵀa` in observation space; with a Gaussian likelihood `a = (K + B⁻¹)⁻¹(y − o)`, one solve.

    For the affine model the target `y − o` is `Y − f + Φw̄` (thesis eq. 7.11). Other likelihoods by Newton's method,
    `a ← b − L(I + S)⁻¹LᵀK b`, `b = B(h − o) − ∂ℓ/∂h`, with steps halved until the objective goes down.

    Args:
        model: the linear model on the training data.
        prior: `A`.
        tolerance: of the solves, and of the change of `a` that ends Newton's method.
        max_iterations: of conjugate gradients, in each solve.
        preconditioner: of `I + S`, for a Gaussian likelihood.
        max_steps: of Newton's method.
    """
    likelihood, targets = model.likelihood, model.targets
    offset, variance = model.offset.double(), 1 / prior.diagonal().double()
    a, h = torch.zeros_like(offset), offset
    passes, iterations, steps = 0.0, 0, 0

    def kernel(a: Tensor) -> tuple[Tensor, Tensor]:
        """`A⁻¹Φᵀa` and `Ka`."""
        features = model.features
        theta = torch.zeros(1, features.size, dtype=torch.float64, device=features.device)
        for batch in features.chunks():
            theta += features.vjp(a[None, batch].to(features.dtype), batch)
        theta *= variance
        return theta, features.outputs(theta.to(features.dtype))[0].double()

    def objective(a: Tensor, h: Tensor) -> float:
        return float(likelihood.loss(h, targets).sum()) + 0.5 * float((a * (h - offset)).sum())

    value, theta, converged = objective(a, h), torch.zeros(1, model.features.size).to(offset), False
    start = float(likelihood.gradient(offset, targets).norm())
    while steps < max_steps and not converged:
        steps += 1
        slope = likelihood.gradient(h, targets)
        b = likelihood.curvature(h, h - offset) - slope
        S = WhitenedGram(variance, model.ggn(h))
        rhs = likelihood.root_transpose(h, kernel(b)[1][None]).flatten(1)
        solve = solve_shifted(S, rhs, tolerance=tolerance, max_iterations=max_iterations, preconditioner=preconditioner)
        _warn(solve, "dual_mode", tolerance)
        step = b - likelihood.root(h, solve.value.reshape(1, *h.shape))[0] - a
        direction, change = kernel(step)
        passes += solve.products + 2
        iterations += solve.iterations
        length, moved = 1.0, False
        while length > 1e-8 and not moved:
            candidate = objective(a + length * step, h + length * change)
            if moved := candidate <= value + 1e-13 * abs(value):
                a, h, theta, value = a + length * step, h + length * change, theta + length * direction, candidate
            else:
                length /= 2
        # A quadratic objective is done after one step.
        small = float(step.norm()) <= tolerance * float(a.norm())
        converged = solve.converged and (model.likelihood.name == "regression" or (small and length == 1))
        if not moved:
            break
    residual = float((a + likelihood.gradient(h, targets)).norm()) / max(start, 1e-300)
    return DualMode(theta / prior.scale.double(), residual, passes, converged, h, iterations)


@dataclass(frozen=True)
class DualCG(Solver):
    r"""A `Solver` in observation space, for `fit_em` and all else that takes one.

    `H⁻¹w = A⁻¹w − A⁻¹ΦᵀL (I + S)⁻¹ LᵀΦA⁻¹w` (Woodbury). The two terms cancel where the data determine much, so that the
    solve is refined on its residual. `sample_matheron`, which knows the noise itself, has no such loss.

    Args:
        tolerance: of the error of the function, as `Solution.error`.
        rank: of the preconditioner; 0 for none.
        preconditioner: `"svd"` or `"cholesky"`.
        max_iterations: of conjugate gradients, in each solve.
        max_refinements: solves with the residual of the last one, at most.
        seed: of the preconditioner.
    """

    tolerance: float = 1e-3
    rank: int = 0
    preconditioner: str = "svd"
    max_iterations: int = 1000
    max_refinements: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preconditioner not in ("svd", "cholesky"):
            raise ValueError(f'`preconditioner={self.preconditioner!r}` is not known; use "svd" or "cholesky".')
        if not self.tolerance > 0 or self.rank < 0 or self.max_iterations < 1 or self.max_refinements < 0:
            raise ValueError(
                f"tolerance and max_iterations must be positive, rank and max_refinements not negative: {self}."
            )

    def precondition(self, S: WhitenedGram) -> LowRank | None:
        """The preconditioner of `I + S`."""
        if self.rank == 0:
            return None
        return (
            randomised_svd(S, self.rank, seed=self.seed)
            if self.preconditioner == "svd"
            else pivoted_cholesky(S, self.rank)
        )

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        operator = _check_operator(problem.operator)
        precision, centre = problem.precision.double(), problem.centre.double()
        delta = torch.zeros_like(centre) if init is None else init.double()
        S = WhitenedGram(1 / precision, operator)
        preconditioner = self.precondition(S)
        iterations, small = 0, float(precision.min())
        dual_residual = torch.zeros(len(centre), dtype=torch.float64, device=centre.device)
        coefficients = torch.zeros(len(centre), len(S), dtype=torch.float64, device=centre.device)
        refinements = 0
        while True:
            zeta = centre + delta
            product = backward(operator, forward(operator, zeta))
            fit, pull = product - problem.linear.double(), precision * delta
            error = function_error(fit + pull, zeta, product, small)
            converged = bool((error <= self.tolerance).all())
            if converged or refinements == self.max_refinements:
                break
            step, solve = self._inverse(operator, S, -(fit + pull), precision, preconditioner, 0.1 * self.tolerance)
            delta, coefficients = delta + step, coefficients + solve.value
            iterations, refinements, dual_residual = iterations + solve.iterations, refinements + 1, solve.residual
        dtype = problem.centre.dtype
        return DualSolution(
            zeta.to(dtype),
            delta.to(dtype),
            relative_residual(fit, pull).to(dtype),
            (zeta * product).to(dtype),
            float(S.rows + (2 * refinements + 1) * len(centre)),
            converged,
            error=error,
            coefficients=coefficients,
            iterations=iterations,
            dual_residual=dual_residual,
        )

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method, each direction by conjugate gradients in observation space."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, accuracy: float) -> tuple[Tensor, float]:
            ggn = _check_operator(operator)
            S = WhitenedGram(1 / precision.double(), ggn)
            step, _ = self._inverse(
                ggn, S, gradient.double(), precision.double(), self.precondition(S), 0.01 * accuracy
            )
            return step.to(gradient.dtype), float(S.rows + 2)

        return newton(objective, init, direction, tolerance=self.tolerance, description=description)

    def _inverse(
        self,
        ggn: GGN,
        S: WhitenedGram,
        w: Float[Tensor, "K P"],
        precision: Float[Tensor, " P"],
        preconditioner: LowRank | None,
        tolerance: float,
    ) -> tuple[Float[Tensor, "K P"], DualSolve]:
        """`H⁻¹w`."""
        solve = solve_shifted(
            S,
            forward(ggn, w / precision),
            tolerance=tolerance,
            max_iterations=self.max_iterations,
            preconditioner=preconditioner,
        )
        return (w - backward(ggn, solve.value)) / precision, solve


def _check_operator(operator: Operator) -> GGN:
    if not isinstance(operator, GGN):
        raise TypeError(f"`DualCG` needs a GGN with its features, but got a {type(operator).__name__}.")
    return operator
