r"""Solvers for the two convex problems of the library; they see products and mini-batches, never a network.

- `Quadratic`: `½ζᵀMζ − ⟨u, ζ⟩ + ½‖ζ − θ⁰‖²_A` for `K` rows at once, with minimiser `ζ = H⁻¹(u + Aθ⁰)`, `H = M + A`.
- `Objective`: a smooth convex sum over data plus `½‖θ‖²_A`, for one row.

Both run in coordinates in which the prior is (nearly) isotropic. Iterates are `δ = ζ − θ⁰`: they stay in the range
of `A⁻¹Φᵀ`, so directions that the data leave free are exact from the start, also after `A` and `θ⁰` were rescaled.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.operators import Operator

__all__ = [
    "SGD",
    "Congruent",
    "ConvergenceWarning",
    "Dense",
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


@dataclass(frozen=True)
class SGD(Solver):
    """Mini-batch gradient descent with Nesterov momentum, for `K` rows in parallel; no step size to give.

    The step size is `step / λ`, with `λ` the largest eigenvalue found by power iteration among the mini-batch
    estimates of the Hessian: what keeps every single step stable, not only the mean one. Each row's gradient is
    clipped by itself. A diverging run is restarted with a third of the step.

    Args:
        epochs: passes over the data.
        min_steps: at least so many steps, where an epoch has few.
        batch_size: data a step.
        momentum: Nesterov's (thesis §4.2.4).
        step: the step size in units of `1/λ`.
        clip: a row's gradient is clipped to `clip` times its norm at `δ = 0`.
        averaging: `"decay"`, the step size goes down linearly to 1/330 of its start and the last iterate is
            returned; or `"geometric"`, constant step and `ᾱ ← χα + (1 − χ)ᾱ` with `χ = 100 / steps`.
        mode_epochs: passes for `minimise`, which has one row only and needs more accuracy in weight space.
        tolerance: residual under which a row counts as converged. Steep directions dominate it, so that it looks
            large: on digits 0.5 goes with an error of one to two percent in function space.
        max_doublings: while a row has not converged, go on with twice the steps, at most so many times.
        seed: of the order of mini-batches.
    """

    epochs: float = 10.0
    min_steps: int = 100
    batch_size: int = 100
    momentum: float = 0.9
    step: float = 1.0
    clip: float = 1.0
    averaging: str = "decay"
    mode_epochs: float = 40.0
    tolerance: float = 0.5
    max_doublings: int = 3
    seed: int = 0
    max_restarts: int = field(default=5, repr=False)

    def __post_init__(self) -> None:
        if self.averaging not in ("decay", "geometric"):
            raise ValueError(f'`averaging` must be "decay" or "geometric", but is {self.averaging!r}.')
        positive = (self.epochs, self.mode_epochs, self.batch_size, self.step, self.clip)
        if min(positive) <= 0 or self.max_doublings < 0:
            raise ValueError(
                f"epochs, mode_epochs, batch_size, step and clip must be positive, max_doublings not negative: {self}."
            )

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        operator = problem.operator
        delta = torch.zeros_like(problem.centre) if init is None else init
        curvature, passes = self._stable_curvature(operator)
        curvature += float(problem.precision.max())
        steps = self._num_steps(self.epochs, operator.num_data)
        for doubling in range(self.max_doublings + 1):
            delta, spent = self._descend(
                problem.gradient, delta, operator.num_data, curvature, steps * 2**doubling, True, description
            )
            zeta = problem.centre + delta
            product = operator.matmul(zeta)
            passes += spent + len(zeta)
            fit, pull = product - problem.linear, problem.precision * delta
            residual = relative_residual(fit, pull)
            converged = bool((residual < self.tolerance).all())
            if converged or doubling == self.max_doublings:
                error = function_error(fit + pull, zeta, product, float(problem.precision.min()))
                return Solution(zeta, delta, residual, zeta * product, passes, converged, error=error)
        raise AssertionError("unreachable")

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        theta, passes, value = init, 0.0, objective.value(init)
        steps = self._num_steps(self.mode_epochs, objective.num_data)
        # The curvature moves with the iterate, most at the start: measure it again after a quarter of the way, take
        # smaller steps than for a quadratic, and smaller ones still if the objective went up.
        for share, decay in ((0.25, False), (0.75, True)):
            curvature, spent = self._stable_curvature(objective.curvature(theta))
            curvature = 3 * (curvature + float(objective.precision.max()))
            passes += spent
            part = max(1, round(share * steps))
            for _ in range(self.max_restarts + 1):
                proposal, spent = self._descend(
                    objective.gradient, theta, objective.num_data, curvature, part, decay, description
                )
                reached = objective.value(proposal)
                passes += spent + 0.5  # a value is half a product: a JVP
                if reached <= value + 1e-6 * abs(value):
                    theta, value = proposal, reached
                    break
                curvature *= 3
        start = objective.gradient(torch.zeros_like(theta), None).norm()
        residual = float(objective.gradient(theta, None).norm() / start.clamp_min(_tiny(start)))
        return Minimum(theta, residual, passes + 2, residual < self.tolerance)

    def _num_steps(self, epochs: float, num_data: int) -> int:
        return max(self.min_steps, math.ceil(epochs * math.ceil(num_data / self.batch_size)))

    def _batches(self, num_data: int, generator: torch.Generator):
        while True:
            yield from torch.randperm(num_data, generator=generator).split(self.batch_size)

    def _stable_curvature(self, operator: Operator, num_batches: int = 8, iterations: int = 8) -> tuple[float, float]:
        """The largest eigenvalue among some mini-batch estimates of `M`, and the passes that it took."""
        generator = torch.Generator().manual_seed(self.seed)
        batches = torch.randperm(operator.num_data, generator=generator).split(self.batch_size)
        batches = [b for b in batches if len(b) == len(batches[0])][:num_batches]  # a short last batch is all noise
        largest = max(largest_eigenvalue(operator, b, iterations, generator) for b in batches)
        return largest, len(batches) * iterations * len(batches[0]) / operator.num_data

    def _descend(
        self,
        gradient: Callable[[Tensor, Tensor], Tensor],
        start: Tensor,
        num_data: int,
        curvature: float,
        steps: int,
        decay: bool,
        description: str | None,
    ) -> tuple[Tensor, float]:
        if not (math.isfinite(curvature) and curvature > 0):
            raise FloatingPointError(
                f"The largest curvature of the problem was estimated as {curvature}: the Jacobian products of the "
                "model contain NaN or infinity, or the outputs do not depend on the weights."
            )
        step = self.step / curvature
        spent = 0
        for _ in range(self.max_restarts + 1):
            result, gradients = self._run(gradient, start, num_data, step, steps, decay, description)
            spent += gradients
            if result is not None:
                return result, len(start) * spent * min(self.batch_size, num_data) / num_data
            step /= 3
        raise FloatingPointError(
            f"SGD diverged {self.max_restarts + 1} times, last with step size {3 * step:.1e}; the Jacobian products "
            "of the model may be inaccurate in its precision. Try float64 or a larger `SGD(batch_size=...)`."
        )

    def _run(
        self,
        gradient: Callable[[Tensor, Tensor], Tensor],
        start: Tensor,
        num_data: int,
        step: float,
        steps: int,
        decay: bool,
        description: str | None,
    ) -> tuple[Tensor | None, int]:
        """One descent, `None` if it diverged, and the number of gradients that it took."""
        generator = torch.Generator().manual_seed(self.seed)
        batches = self._batches(num_data, generator)
        zero = torch.zeros_like(start)
        probes = [next(batches) for _ in range(3)]
        scale, warm = (
            torch.stack([gradient(v, b) for b in probes]).norm(dim=2).mean(0)[:, None] for v in (zero, start)
        )
        scale = scale.clamp_min(_tiny(scale))
        x, velocity = torch.where(warm > scale, zero, start), zero  # a warm start that is worse than none is none
        geometric = self.averaging == "geometric" and decay
        average, share = start.clone(), min(1.0, 100 / steps)
        for t in tqdm(range(steps), desc=description, disable=description is None, leave=False):
            g = gradient(x + self.momentum * velocity, next(batches))
            size = g.norm(dim=1, keepdim=True) / scale
            if not bool((size < 1e3).all()):  # also when it is NaN
                return None, t + 7
            g = g * (self.clip / size).clamp_max(1)
            now = step * (1 - (1 - 1 / 330) * t / steps) if decay and not geometric else step
            velocity = self.momentum * velocity - now * g
            x = x + velocity
            if geometric:
                average = share * x + (1 - share) * average
        return average if geometric else x, steps + 6


@dataclass(frozen=True)
class Dense(Solver):
    """Dense algebra in float64: a Cholesky factor of `H` (`P` small) or of `I + R A⁻¹ Rᵀ` (few outputs)."""

    tolerance: float = 1e-10
    max_steps: int = 100

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        factor = _Factor(problem.operator, problem.precision)
        centre, linear = problem.centre.double(), problem.linear.double()
        delta = factor.solve(linear - factor.matmul(centre))
        zeta = centre + delta
        residual = relative_residual(factor.matmul(zeta) - linear, factor.precision * delta)
        error = torch.zeros_like(residual)
        return Solution(zeta, delta, residual, factor.leverage()[None], 0.0, converged=True, exact=True, error=error)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method, steps halved until the objective goes down."""

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, _: float) -> tuple[Tensor, float]:
            return _Factor(operator, precision).solve(gradient), 0.0

        return newton(objective, init.double(), direction, tolerance=self.tolerance, max_steps=self.max_steps)


class _Factor:
    """`M` and `H⁻¹` by dense algebra, whichever of `P` and the number of rows is smaller."""

    def __init__(self, operator: Operator, precision: Tensor) -> None:
        self.precision = precision.double()
        blocks = [block.double() for block in operator.root_rows()]
        self.primal = operator.size <= sum(len(block) for block in blocks)
        if self.primal:
            self.matrix = blocks[0].T @ blocks[0]
            for block in blocks[1:]:
                self.matrix.addmm_(block.T, block)
            self.factor = torch.linalg.cholesky(self.matrix + torch.diag(self.precision))
        else:
            self.root = torch.cat(blocks)
            inner = (self.root / self.precision) @ self.root.T
            self.factor = torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))

    def matmul(self, v: Tensor) -> Tensor:
        return v @ self.matrix if self.primal else (v @ self.root.T) @ self.root

    def solve(self, rhs: Tensor) -> Tensor:
        if self.primal:
            return torch.cholesky_solve(rhs.T, self.factor).T
        scaled = rhs / self.precision
        correction = torch.cholesky_solve(self.root @ scaled.T, self.factor)
        return scaled - (self.root.T @ correction).T / self.precision

    def leverage(self) -> Tensor:
        """The diagonal of `H⁻¹M`."""
        if self.primal:
            return 1 - self.precision * torch.cholesky_inverse(self.factor).diagonal()
        half = torch.linalg.solve_triangular(self.factor, self.root, upper=False)
        return (half**2).sum(0) / self.precision


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
        v = v / norm.clamp_min(_tiny(v))
        v = weight * operator.matmul(v, batch, *extra)
        norm = v.norm()
    return float(norm)


def relative_residual(fit: Float[Tensor, "K P"], pull: Float[Tensor, "K P"]) -> Float[Tensor, " K"]:
    """The gradient of each row relative to the two terms that cancel in it at the solution."""
    return (fit + pull).norm(dim=1) / (fit.norm(dim=1) + pull.norm(dim=1)).clamp_min(_tiny(fit))


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
    squared = residual.double().square().sum(1) / (4 * precision)
    energy = (zeta.double() * product.double()).sum(1)
    return torch.where(squared > 0, (squared / energy.clamp_min(_tiny(energy))).sqrt(), 0.0)


@dataclass(frozen=True)
class Congruent(Operator):
    """`R M R` for a symmetric `R`."""

    operator: Operator
    root: Callable[[Tensor], Tensor]

    @property
    def num_data(self) -> int:
        return self.operator.num_data

    @property
    def size(self) -> int:
        return self.operator.size

    @property
    def device(self) -> torch.device:
        return self.operator.device

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

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
        finished = (length == 1.0 and relative <= tolerance) or decrease <= 1e-18 * max(1.0, abs(value))
        if finished or not moved:
            break
        needed = min(0.2, relative)
    return Minimum(theta, float(gradient.norm()) / max(start, _tiny(theta)), passes, finished)


def _tiny(t: Tensor) -> float:
    """The smallest positive normal number: a floor against zero by zero."""
    return torch.finfo(t.dtype).tiny
