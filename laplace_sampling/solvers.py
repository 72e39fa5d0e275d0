r"""Solvers for the two convex problems of the library; they see products and mini-batches, never a network.

- `Quadratic`: `½ζᵀMζ − ⟨u, ζ⟩ + ½‖ζ − θ⁰‖²_A` for `K` rows at once, with minimiser `ζ = H⁻¹(u + Aθ⁰)`, `H = M + A`.
- `Objective`: a smooth convex sum over data plus `½‖θ‖²_A`, for one row.

Both run in coordinates in which the prior is (nearly) isotropic. Iterates are `δ = ζ − θ⁰`: they stay in the range
of `A⁻¹Φᵀ`, so directions that the data leave free are exact from the start, also after `A` and `θ⁰` were rescaled.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.operators import Operator

__all__ = [
    "Congruent",
    "ConvergenceWarning",
    "InGroups",
    "Minimum",
    "Objective",
    "Quadratic",
    "Solution",
    "Solver",
    "function_error",
    "largest_eigenvalue",
    "make_dense",
    "newton",
    "relative_residual",
    "row_products",
    "tiny",
    "whiten",
]


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
        linear_batch: `u` restricted to a mini-batch of the data, if the linear term is to be subsampled as well (the
            high-variance objective `L`); by default it enters in full at every step (`L'`).
    """

    operator: Operator
    precision: Float[Tensor, " P"]
    centre: Float[Tensor, "K P"]
    linear: Float[Tensor, "K P"]
    linear_batch: Callable[[Tensor], Tensor] | None = None

    def gradient(self, delta: Float[Tensor, "K P"], batch: Tensor) -> Float[Tensor, "K P"]:
        """An unbiased estimate of the gradient at `ζ = θ⁰ + δ` from a mini-batch."""
        weight = self.operator.num_data / len(batch)
        fit = weight * self.operator.matmul(self.centre + delta, batch)
        linear = self.linear if self.linear_batch is None else weight * self.linear_batch(batch)
        return fit + self.precision * delta - linear


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
            (see `function_error`); of `SVRG` and contour quadrature an estimate.
        traces: one a row, unbiased estimates of `Tr(H⁻¹M)` of less variance than the sums of `leverage`, if the solver
            has any.
    """

    value: Float[Tensor, "K P"]
    delta: Float[Tensor, "K P"]
    residual: Float[Tensor, " K"]
    leverage: Float[Tensor, "L P"]
    passes: float
    converged: bool
    exact: bool = False
    error: Float[Tensor, " K"] = field(kw_only=True)
    traces: Float[Tensor, " K"] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Minimum:
    """The minimiser of an `Objective`: `value` `[1, P]`, the norm of its gradient relative to that at zero, passes."""

    value: Float[Tensor, "1 P"]
    residual: float
    passes: float
    converged: bool


class Solver(ABC):
    """Solves both problems. `init` is a warm start: `δ` for `solve`, `θ` for `minimise`."""

    @abstractmethod
    def solve(
        self, problem: Quadratic, init: Float[Tensor, "K P"] | None = None, *, description: str | None = None
    ) -> Solution: ...

    @abstractmethod
    def minimise(
        self, objective: Objective, init: Float[Tensor, "1 P"], *, description: str | None = None
    ) -> Minimum: ...


def make_dense(operator: Operator) -> Float[Tensor, "P P"]:
    """`M` in full, in float64, from its products: for tests and small problems."""
    eye = torch.eye(operator.size, dtype=operator.dtype, device=operator.device)
    return operator.matmul(eye).double()


def largest_eigenvalue(
    operator: Operator,
    batch: Tensor | None,
    iterations: int,
    generator: torch.Generator,
    weights: Float[Tensor, " n"] | None = None,
) -> float:
    """The largest eigenvalue of `Σ_{i∈batch} w_i Mᵢ` by power iteration, a lower bound that converges fast enough.

    By default weights are `N/n`.
    """
    weight = operator.num_data / len(batch) if batch is not None and weights is None else 1.0
    extra = () if weights is None else (weights,)
    v = torch.randn(1, operator.size, generator=generator).to(operator.device, operator.dtype)
    norm = v.norm()
    for _ in range(iterations):
        v = v / norm.clamp_min(tiny(v))
        v = weight * operator.matmul(v, batch, *extra)
        norm = v.norm()
    return float(norm)


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
    return torch.where(squared > 0, (squared / energy.clamp_min(tiny(energy))).sqrt(), 0.0)


@dataclass(frozen=True)
class InGroups(Solver):
    """Another solver, on a few rows at a time: for less memory."""

    solver: Solver
    rows: int

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        parts = []
        for rows in torch.arange(len(problem.centre)).split(self.rows):
            batch, here = problem.linear_batch, slice(int(rows[0]), int(rows[-1]) + 1)
            part = replace(
                problem,
                centre=problem.centre[here],
                linear=problem.linear[here],
                linear_batch=None if batch is None else lambda b, here=here, batch=batch: batch(b)[here],
            )
            parts.append(self.solver.solve(part, None if init is None else init[here], description=description))

        def all_of(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        exact = parts[0].exact
        return Solution(
            all_of("value"),
            all_of("delta"),
            all_of("residual"),
            parts[0].leverage if exact else all_of("leverage"),
            sum(part.passes for part in parts),
            all(part.converged for part in parts),
            exact,
            error=all_of("error"),
        )

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """One row: as the other solver does."""
        return self.solver.minimise(objective, init, description=description)


@dataclass(frozen=True)
class Congruent(Operator):
    """`R M R` for a symmetric `R`."""

    operator: Operator
    root: Callable[[Tensor], Tensor]

    @property
    def like(self) -> Operator:
        return self.operator

    def matmul(self, v: Tensor, batch: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        # Operators that are used without weights need not know of them.
        extra = () if weights is None else (weights,)
        return self.root(self.operator.matmul(self.root(v), batch, *extra))

    def sizes(self) -> Tensor:
        return self.operator.sizes()

    def random_rows(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        return self.root(self.operator.random_rows(batch, generator))

    def root_rows(self) -> Iterator[Tensor]:
        for rows in self.operator.root_rows():
            yield self.root(rows)


def whiten(problem: Quadratic) -> tuple[Quadratic, float, Float[Tensor, " P"]]:
    """The same problem in coordinates `ζ/w` in which `A = αI`, with `α` and `w`; `w = 1` if it is so already."""
    precision = problem.precision
    mean = float(precision.double().log().mean().exp())
    if bool((precision == precision[0]).all()):
        return problem, float(precision[0]), torch.ones_like(precision)
    w = (mean / precision).sqrt()
    linear_batch = problem.linear_batch
    white = Quadratic(
        Congruent(problem.operator, lambda v: v * w),
        torch.full_like(precision, mean),
        problem.centre / w,
        problem.linear * w,
        None if linear_batch is None else lambda batch: linear_batch(batch) * w,
    )
    return white, mean, w


def newton(
    objective: Objective,
    init: Float[Tensor, "1 P"],
    direction: Callable[[Operator, Tensor, Tensor, float], tuple[Tensor, float]],
    *,
    tolerance: float,
    max_steps: int = 50,
    description: str | None = None,
) -> Minimum:
    r"""Newton's method, steps halved until the objective goes down.

    It ends with the step whose length in the norm of `H` (the Newton decrement) is below `tolerance` times the norm of
    the iterate in that of `A`: the error that this step leaves is smaller still.

    Args:
        objective: to minimise.
        init: where to start.
        direction: `H⁻¹g` from the Hessian of the sum over data, the diagonal of `A`, `g`, and the relative accuracy
            that it needs; with the passes that it took.
        tolerance: see above.
        max_steps: at most so many.
        description: label of a progress bar.
    """
    theta, value, passes = init, objective.value(init), 0.5
    gradient, finished = objective.gradient(theta, None), False
    zero = not bool(theta.any())
    start = float((gradient if zero else objective.gradient(torch.zeros_like(theta), None)).norm())
    passes += 1 if zero else 2
    needed = 0.2
    for _ in tqdm(range(max_steps), desc=description, disable=description is None, leave=False):
        if float(gradient.norm()) <= 1e-14 * start:
            finished = True
            break
        step, spent = direction(objective.curvature(theta), objective.precision, gradient, max(needed, tolerance))
        passes += spent + 0.5
        decrease = float((step.double() * gradient.double()).sum())  # the squared Newton decrement
        length, moved = 1.0, False
        while length > 1e-8 and not moved:
            proposal = theta - length * step
            candidate = objective.value(proposal)
            passes += 0.5
            if moved := candidate <= value - 1e-4 * length * decrease + 1e-13 * abs(value):
                theta, value = proposal, candidate
            else:
                length /= 2
        gradient = objective.gradient(theta, None)
        passes += 1
        norm = float((objective.precision * theta.double() ** 2).sum())
        relative = math.sqrt(max(decrease, 0) / max(norm, torch.finfo(torch.float64).tiny))
        # Half a unit of rounding of the objective is as far down as its values tell.
        finished = relative <= tolerance or decrease <= 1e-18 * max(1.0, abs(value))
        if finished or not moved:
            break
        needed = min(0.2, relative)
    return Minimum(theta, float(gradient.norm()) / max(start, tiny(theta)), passes, finished)


def row_products(a: Float[Tensor, "K P"], b: Float[Tensor, "K P"]) -> Float[Tensor, " K"]:
    """`⟨a_k, b_k⟩` in float64; a row at a time, so that no stack is copied."""
    if a.dtype == torch.float64:
        return torch.linalg.vecdot(a, b)
    return torch.stack([torch.dot(x.double(), y.double()) for x, y in zip(a, b, strict=True)])


def tiny(t: Tensor) -> float:
    """The smallest positive normal number: a floor against zero by zero."""
    return torch.finfo(t.dtype).tiny
