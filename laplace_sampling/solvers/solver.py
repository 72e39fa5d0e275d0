"""Solvers for the two convex problems of the library; they see products and mini-batches, never a network.

- `Quadratic`: `½ζᵀMζ − ⟨u, ζ⟩ + ½‖ζ − θ⁰‖²_A` for `K` rows at once, with minimiser `ζ = H⁻¹(u + Aθ⁰)`, `H = M + A`.
- `Objective`: a smooth convex sum over data plus `½‖θ‖²_A`, for one row.

Both run in coordinates in which the prior is (nearly) isotropic. Iterates are `δ = ζ − θ⁰`: they stay in the range
of `A⁻¹Φᵀ`, so that directions which the data do not determine are exact from the start, also after `A` and `θ⁰` were
rescaled.

`progress_bar` makes all progress bars.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.solvers.operator import Operator, geometric_mean, row_products, tiny

# In a notebook bars are widgets, which need no terminal.
_IN_NOTEBOOK = any(kind.__name__ == "tqdm_notebook" for kind in tqdm.__mro__)


def progress_bar(
    description: str | None, items: Iterable[Any] | None = None, *, total: int | None = None, leave: bool = False
) -> tqdm:
    """A bar over items, or one that is moved on by `update`; shown only where standard error is a terminal.

    Args:
        description: its label; `None` for no bar.
        items: that are iterated over.
        total: how many there are, if they are not given.
        leave: whether the bar stays when it is full.
    """
    # `None` asks tqdm to look for a terminal: in files and pipes bars are only noise.
    hidden = True if description is None else False if _IN_NOTEBOOK else None
    return tqdm(items, desc=description, total=total, disable=hidden, leave=leave)


# Whether so many passes, products of `M` with all data and one vector each, may still be made.
Afford = Callable[[float], bool]


def unlimited(passes: float) -> bool:
    """Any number of passes may be made."""
    return True


class ConvergenceWarning(UserWarning):
    """An iterative method stopped before it reached its tolerance."""


@dataclass(frozen=True)
class Quadratic:
    r"""`½ζᵀMζ − ⟨u, ζ⟩ + ½‖ζ − θ⁰‖²_A`, `K` rows.

    Attributes:
        operator: `M`.
        precision: the diagonal of `A`, `[P]`.
        centre: `θ⁰`.
        linear: `u`.
        dual: whether `ζ` are coefficients of a function that is `Mζ` itself at the data, as with `M` a kernel matrix
            and `A` the noise: the error of a solution is then that of `Mζ`.
    """

    operator: Operator
    precision: Float[Tensor, " P"]
    centre: Float[Tensor, "K P"]
    linear: Float[Tensor, "K P"]
    dual: bool = False

    def gradient(self, delta: Float[Tensor, "K P"], batch: Tensor) -> Float[Tensor, "K P"]:
        """An unbiased estimate of the gradient at `ζ = θ⁰ + δ` from a mini-batch."""
        weight = self.operator.num_data / len(batch)
        # The linear term enters in full: a mini-batch of it would add variance and save no product.
        return weight * self.operator.matmul(self.centre + delta, batch) + self.precision * delta - self.linear


class Objective(ABC):
    """`Σ_i ℓ_i(θ) + ½‖θ‖²_A`, smooth and convex, of one row `[1, P]`."""

    num_data: int
    precision: Float[Tensor, " P"]

    @abstractmethod
    def value(self, theta: Float[Tensor, "1 P"]) -> float:
        """The whole objective."""

    @abstractmethod
    def gradient(self, theta: Float[Tensor, "1 P"], batch: Tensor | None) -> Float[Tensor, "1 P"]:
        """Gradient of the whole objective, the sum over data estimated from a mini-batch; `None` is exact."""

    @abstractmethod
    def curvature(self, theta: Float[Tensor, "1 P"]) -> Operator:
        """The Hessian of the sum over data."""


@dataclass(frozen=True)
class Solution:
    r"""Minimisers of a `Quadratic`, and how good they are.

    Attributes:
        value: `ζ`.
        delta: `ζ − θ⁰`, the warm start of a later solve.
        residual: one a row: `‖Mζ − u + Aδ‖ / (‖Mζ − u‖ + ‖Aδ‖)`, 0 at the solution and at most 1.
        leverage: `ζ ⊙ Mζ`, `[K, P]`, an unbiased sample of the diagonal of `H⁻¹M` when the rows are posterior
            samples; `[1, P]`, that diagonal itself, from a solver that has it exactly.
        passes: Jacobian products spent, in units of all data, one vector, JVP and VJP.
        converged: whether all residuals are below the solver's tolerance.
        exact: whether `leverage` is the diagonal itself.
        error: one a row, a bound of the error of the function on the training data, `‖Φ(ζ − ζ*)‖_B / ‖Φζ‖_B`
            (see `function_error`); of `SVRG` an estimate. For a dual problem `‖M(ζ − ζ*)‖ / ‖Mζ‖`, with data weighted
            by the roots of their precisions.
    """

    value: Float[Tensor, "K P"]
    delta: Float[Tensor, "K P"]
    residual: Float[Tensor, " K"]
    leverage: Float[Tensor, "L P"]
    passes: float
    converged: bool
    exact: bool = False
    error: Float[Tensor, " K"] = field(kw_only=True)


@dataclass(frozen=True)
class Minimum:
    """The minimiser of an `Objective`: `value` `[1, P]`, the norm of its gradient relative to that at zero, passes."""

    value: Float[Tensor, "1 P"]
    residual: float
    passes: float
    converged: bool


class QuadraticSolver(ABC):
    """Solves a `Quadratic`; `init` is a warm start `δ`."""

    @abstractmethod
    def solve(
        self, problem: Quadratic, init: Float[Tensor, "K P"] | None = None, *, description: str | None = None
    ) -> Solution: ...


class Solver(QuadraticSolver):
    """Solves both problems; for `minimise`, `init` is `θ`."""

    @abstractmethod
    def minimise(
        self, objective: Objective, init: Float[Tensor, "1 P"], *, description: str | None = None
    ) -> Minimum: ...

    def within(self, afford: Afford) -> "Solver":
        """Returns a solver that asks before each iteration whether it may be made, and stops where not."""
        return self


@dataclass(frozen=True)
class IterativeSolver(Solver):
    """A solver that may stop after each iteration.

    Attributes:
        afford: whether the passes of another iteration may be made; always by default.
    """

    afford: Afford = field(default=unlimited, kw_only=True, repr=False, compare=False)

    def within(self, afford: Afford) -> Solver:
        return replace(self, afford=afford)


def relative_residual(fit: Float[Tensor, "K P"], pull: Float[Tensor, "K P"]) -> Float[Tensor, " K"]:
    """The gradient of each row relative to the two terms that cancel in it at the solution."""
    return (fit + pull).norm(dim=1) / (fit.norm(dim=1) + pull.norm(dim=1)).clamp_min(tiny(fit))


def function_error(
    residual: Float[Tensor, "K P"],
    zeta: Float[Tensor, "K P"],
    product: Float[Tensor, "K P"],
    precision: float,
) -> Float[Tensor, " K"]:
    r"""Relative error of the function of each row, `‖Φ(ζ − ζ*)‖_B / ‖Φζ‖_B`, in float64.

    A bound: with residual `r = H(ζ* − ζ)`, `‖Φ(ζ − ζ*)‖²_B = rᵀH⁻¹MH⁻¹r ≤ ‖r‖²/(4α)`, as no eigenvalue of `H⁻¹MH⁻¹` is
    larger. Estimates from the last steps of a solver would be closer, but fail on plateaus of ill-conditioned problems.

    Args:
        residual: `r`.
        zeta: the iterate.
        product: `Mζ`.
        precision: `α`, the least.
    """
    squared = row_products(residual, residual) / (4 * precision)
    energy = row_products(zeta, product)
    # A residual of zero is no error, also where the function itself is zero.
    return torch.where(squared > 0, (squared / energy.clamp_min(tiny(energy))).sqrt(), 0.0)


def dual_error(residual: Float[Tensor, "K P"], product: Float[Tensor, "K P"]) -> Float[Tensor, " K"]:
    r"""`‖M(ζ − ζ*)‖ / ‖Mζ‖` of the rows of a dual problem with `A = αI`.

    A bound: with residual `r = (M + α)(ζ* − ζ)`, `M(ζ* − ζ) = M(M + α)⁻¹r`, and `M(M + α)⁻¹ < I`.

    Args:
        residual: `r`.
        product: `Mζ`.
    """
    norm = residual.norm(dim=1).double()
    return torch.where(norm > 0, norm / product.norm(dim=1).clamp_min(tiny(product)), 0.0)


class LeastResidual:
    """On the line from the state that is kept to each new one, the state of the least residual, for each row.

    It makes any iteration one that never returns more than it was given, at no product (residual smoothing,
    Schönauer). Early conjugate gradients of an ill-conditioned kernel matrix are worse than no data without it.

    Attributes:
        delta: `δ`.
        residual: `u − M(θ⁰ + δ) − Aδ`.
    """

    def __init__(self, delta: Float[Tensor, "K P"], residual: Float[Tensor, "K P"]) -> None:
        self.delta, self.residual = delta.clone(), residual.clone()

    def take(self, delta: Float[Tensor, "k P"], residual: Float[Tensor, "k P"], rows: Any = slice(None)) -> None:
        """Moves some rows towards a new state of them."""
        start, kept = self.delta[rows], self.residual[rows]
        step, change = delta - start, residual - kept
        length = -(kept * change).sum(1, keepdim=True) / (change * change).sum(1, keepdim=True)
        # A state that is not finite, or the same one again.
        sound = length.isfinite() & step.isfinite().all(1, keepdim=True)
        self.delta[rows] = torch.where(sound, start + length * step, start)
        self.residual[rows] = torch.where(sound, kept + length * change, kept)


def whitening(precision: Float[Tensor, " P"], mean: float | None = None) -> tuple[float, Float[Tensor, " P"]]:
    """`α` and `w` for which `A = αI` in coordinates `ζ/w`; `α` is the geometric mean of `A` unless it is given."""
    # The product of `w` is one with the geometric mean, so that log determinants need no correction.
    alpha = geometric_mean(precision) if mean is None else mean
    return alpha, (alpha / precision).sqrt()


def whiten(problem: Quadratic, mean: float | None = None) -> tuple[Quadratic, float, Float[Tensor, " P"]]:
    """Returns the problem in coordinates `ζ/w` in which `A = αI`, with `α` and `w`; see `whitening`."""
    precision = problem.precision
    if bool((precision == precision[0]).all()):
        return problem, float(precision[0]), torch.ones_like(precision)
    alpha, w = whitening(precision, mean)
    white = replace(
        problem,
        operator=problem.operator.scaled(w),
        precision=torch.full_like(precision, alpha),
        centre=problem.centre / w,
        linear=problem.linear * w,
    )
    return white, alpha, w
