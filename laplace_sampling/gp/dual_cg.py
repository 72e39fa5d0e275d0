r"""Samples and mode in observation space by preconditioned conjugate gradients, for few outputs and many weights.

With a root `L Lᵀ = B` and `S = Lᵀ Φ A⁻¹ Φᵀ L`, `[N·C, N·C]` (Matheron's rule; thesis eq. 2.16–2.19, §7.3.3)

    ζ = θ⁰ + A⁻¹ΦᵀL (I + S)⁻¹ (z − LᵀΦθ⁰)        = θ⁰ − A⁻¹Φᵀ (K + B⁻¹)⁻¹ (ε + Φθ⁰),  ε = −L⁻ᵀ z ~ N(0, B⁻¹)

which holds for a singular `B` too, and whose matrix has no eigenvalue below one. A product with `S` is a VJP and a JVP
over all data. The solver is that of `linear_operator`, with every tolerance explicit.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.whitened_gram import (
    DualSolve,
    LowRank,
    WhitenedGram,
    backward,
    forward,
    pivoted_cholesky,
    randomised_svd,
    solve_shifted,
)
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import ModeObjective
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import Sampler
from laplace_sampling.solvers.newton import newton
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.solver import (
    ConvergenceWarning,
    Minimum,
    Objective,
    Quadratic,
    Solution,
    function_error,
    relative_residual,
)

__all__ = ["DualCG", "DualMode", "DualSolution", "dual_mode", "sample_matheron"]

# A preconditioner is kept for another matrix if that maps its leading eigenvector to within this of a multiple of it.
_KEPT = 0.3
# Outputs up to which the exact trace, `C` VJPs a datum, is worth its products.
_TRACE_OUTPUTS = 64


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
    solution = _matheron(ggn, prior, draws, tolerance, max_iterations, lambda S: preconditioner, init)
    _warn(solution, "sample_matheron", tolerance)
    return solution


def _matheron(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    tolerance: float,
    max_iterations: int,
    precondition: Callable[[WhitenedGram], LowRank | None],
    init: Float[Tensor, "K NC"] | None,
    delta: Float[Tensor, "K P"] | None = None,
) -> DualSolution:
    S = WhitenedGram(1 / prior.diagonal().double(), ggn)
    preconditioner = precondition(S)
    spread, scale = prior.spread().double(), prior.scale.double()
    centre = draws.prior(ggn.size).to(ggn.device).double() / spread.sqrt()
    white = draws.noise(ggn.features.num_outputs)(torch.arange(ggn.num_data)).to(ggn.device).double()
    rhs = white.flatten(1) - forward(ggn, centre * scale)
    if delta is not None and preconditioner is None:
        # At the solution `x = z − LᵀΦζ`. Elsewhere `S` enlarges its error, at times beyond that of zero.
        near = white.flatten(1) - forward(ggn, (centre + delta) * scale)
        better = (rhs - near - S._matmul(near.mT).mT).norm(dim=1) < rhs.norm(dim=1)
        init = near * better[:, None]
    before = S.rows
    solve = solve_shifted(
        S, rhs, tolerance=tolerance, max_iterations=max_iterations, preconditioner=preconditioner, init=init
    )
    delta = backward(ggn, solve.value) * scale / spread
    zeta = centre + delta
    product = backward(ggn, forward(ggn, zeta * scale)) * scale
    fit, pull = product - backward(ggn, white.flatten(1)) * scale, spread * delta
    error = function_error(fit + pull, zeta, product, float(spread.min()))
    traces = None
    if preconditioner is not None and preconditioner.trace is not None and len(prior.names) == 1:
        traces = preconditioner.traces(rhs, solve.value)
    dtype = ggn.dtype
    return DualSolution(
        zeta.to(dtype),
        delta.to(dtype),
        relative_residual(fit, pull).to(dtype),
        (zeta * product).to(dtype),
        float(solve.products + before + 2.5 * len(zeta)),
        solve.converged,
        error=error,
        coefficients=solve.value,
        iterations=solve.iterations,
        dual_residual=solve.residual,
        traces=traces,
    )


def _warn(solve: DualSolve | DualSolution, call: str, tolerance: float) -> None:
    if not solve.converged:
        residual = solve.residual if isinstance(solve, DualSolve) else solve.dual_residual
        warnings.warn(
            f"`{call}`: conjugate gradients stopped after {solve.iterations} iterations at a relative residual "
            f"of {float(residual.max()):.2g}, above the tolerance {tolerance:.2g}. Raise `max_iterations`, or "
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
    warn: bool = True,
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
        warn: whether a solve that does not converge gives a warning; the result says so in any case.
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
        b = likelihood.curvature(h, h - offset, targets) - slope
        S = WhitenedGram(variance, model.ggn(h))
        gaussian = isinstance(likelihood, Gaussian)
        rhs = targets.reshape(offset.shape) - offset if gaussian else kernel(b)[1]
        rhs = likelihood.root_transpose(h, rhs[None], targets).flatten(1)
        solve = solve_shifted(S, rhs, tolerance=tolerance, max_iterations=max_iterations, preconditioner=preconditioner)
        if warn:
            _warn(solve, "dual_mode", tolerance)
        solved = likelihood.root(h, solve.value.reshape(1, *h.shape), targets)[0]
        # With a Gaussian likelihood it is the solution itself; the difference would lose digits.
        step = (solved if gaussian else b - solved) - a
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
        converged = solve.converged and (isinstance(likelihood, Gaussian) or (small and length == 1))
        if not moved:
            break
    residual = float((a + likelihood.gradient(h, targets)).norm()) / max(start, 1e-300)
    return DualMode(theta / prior.scale.double(), residual, passes, converged, h, iterations)


@dataclass(frozen=True)
class DualCG(Sampler):
    r"""A `Solver` in observation space, for `fit_em` and all else that takes one.

    `H⁻¹w = A⁻¹w − A⁻¹ΦᵀL (I + S)⁻¹ LᵀΦA⁻¹w` (Woodbury). The two terms cancel where the data determine much, so that the
    solve is refined on its residual. `sample_matheron`, which knows the noise itself, has no such loss.

    Args:
        tolerance: of the error of the function, as `Solution.error`; by default what the `tolerance` of a fit needs,
            or 1e-3 where there is none.
        rank: of the preconditioner; 0 for none. By default 400, or what memory holds, in a fit; else none.
        preconditioner: `"svd"` or `"cholesky"`.
        max_iterations: of conjugate gradients, in each solve.
        max_refinements: solves with the residual of the last one, at most.
        seed: of the preconditioner.
        held: a preconditioner made before, which is rescaled for every `α` and noise precision.
    """

    tolerance: float | None = None
    rank: int | None = None
    preconditioner: str = "svd"
    max_iterations: int = 1000
    max_refinements: int = 4
    seed: int = 0
    held: LowRank | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.preconditioner not in ("svd", "cholesky"):
            raise ValueError(f'`preconditioner={self.preconditioner!r}` is not known; use "svd" or "cholesky".')
        if not self.accuracy > 0 or (self.rank or 0) < 0 or self.max_iterations < 1 or self.max_refinements < 0:
            raise ValueError(
                f"tolerance and max_iterations must be positive, rank and max_refinements not negative: {self}."
            )

    @property
    def accuracy(self) -> float:
        """The tolerance, or its default."""
        return 1e-3 if self.tolerance is None else self.tolerance

    def hold(self, S: WhitenedGram) -> "DualCG":
        """The same solver with the preconditioner of a matrix, kept for all its multiples."""
        held = replace(self, held=None).precondition(S)
        ggn = S.ggn
        likelihood = ggn.likelihood
        one_noise = isinstance(likelihood, Gaussian) and torch.as_tensor(likelihood.noise_precision).dim() == 0
        if (
            held is not None
            and one_noise
            and self.preconditioner == "svd"
            and ggn.features.num_outputs <= _TRACE_OUTPUTS
        ):
            held = replace(held, trace=float((S.variance * ggn.diagonal()).sum()))
        return replace(self, held=held)

    def precondition(self, S: WhitenedGram) -> LowRank | None:
        """The preconditioner of `I + S`."""
        if not self.rank:
            return None
        if self.held is not None and (factor := _multiple(S, self.held)) is not None:
            return self.held.rescaled(factor)
        return (
            randomised_svd(S, self.rank, seed=self.seed)
            if self.preconditioner == "svd"
            else pivoted_cholesky(S, self.rank)
        )

    def sample(
        self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Float[Tensor, "K P"] | None = None
    ) -> DualSolution:
        """`sample_matheron` to the tolerance of the error of the function; without a warning."""
        tolerance = 0.1 * self.accuracy
        precondition: Callable[[WhitenedGram], LowRank | None] = self.precondition
        solution = _matheron(ggn, prior, draws, tolerance, self.max_iterations, precondition, None, init)
        for _ in range(self.max_refinements):
            if bool((solution.error <= self.accuracy).all()) or not solution.converged:
                break
            tolerance *= 0.5 * float((self.accuracy / solution.error.max()).clamp_max(1.0))
            more = _matheron(ggn, prior, draws, tolerance, self.max_iterations, precondition, solution.coefficients)
            solution = replace(more, passes=solution.passes + more.passes)
        return replace(solution, converged=bool((solution.error <= self.accuracy).all()))

    def mode(self, model: LinearModel, prior: GaussianPrior) -> DualMode:
        """`dual_mode`, without a warning."""
        S = WhitenedGram(1 / prior.diagonal().double(), model.ggn(model.offset))
        # As for solves of samples, but one row: accuracy is cheap.
        tolerance = min(1e-4, 0.01 * self.accuracy)
        settings = {"tolerance": tolerance, "max_iterations": self.max_iterations, "warn": False}
        return dual_mode(model, prior, preconditioner=self.precondition(S), **settings)

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        operator = _check_operator(problem.operator)
        precision, centre = problem.precision.double(), problem.centre.double()
        delta = torch.zeros_like(centre) if init is None else init.double()
        S = WhitenedGram(1 / precision, operator)
        preconditioner = self.precondition(S)
        iterations, small = 0, float(precision.min())
        dual_residual = torch.zeros(len(centre), dtype=torch.float64, device=centre.device)
        coefficients = torch.zeros(len(centre), len(S), dtype=torch.float64, device=centre.device)

        def judged(delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            zeta = centre + delta
            product = backward(operator, forward(operator, zeta))
            fit, pull = product - problem.linear.double(), precision * delta
            return zeta, product, fit, pull, function_error(fit + pull, zeta, product, small)

        zeta, product, fit, pull, error = judged(delta)
        refinements, inner = 0, 0.1 * self.accuracy
        while not bool((error <= self.accuracy).all()) and refinements < self.max_refinements:
            step, solve = self._inverse(operator, S, -(fit + pull), precision, preconditioner, inner)
            iterations, refinements, dual_residual = iterations + solve.iterations, refinements + 1, solve.residual
            found = judged(delta + step)
            if float(found[-1].max()) > 0.5 * float(error.max()):
                inner *= 1e-2  # the difference of the two terms lost what was gained
            if float(found[-1].max()) < float(error.max()):
                delta, coefficients = delta + step, coefficients + solve.value
                zeta, product, fit, pull, error = found
        converged = bool((error <= self.accuracy).all())
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
        """Newton's method, each direction by conjugate gradients in observation space; see also `mode`."""
        if isinstance(objective, ModeObjective) and isinstance(objective.model.likelihood, Gaussian):
            precision = objective.precision
            every = torch.arange(len(precision), device=precision.device)
            prior = GaussianPrior(precision.double().cpu(), every.cpu(), torch.ones_like(precision).double().cpu(), ())
            return self.mode(objective.model, prior.to(precision.device, torch.float64))

        def direction(operator: Operator, precision: Tensor, gradient: Tensor, accuracy: float) -> tuple[Tensor, float]:
            ggn = _check_operator(operator)
            S = WhitenedGram(1 / precision.double(), ggn)
            step, _ = self._inverse(
                ggn, S, gradient.double(), precision.double(), self.precondition(S), 0.01 * accuracy
            )
            return step.to(gradient.dtype), float(S.rows + 2)

        return newton(objective, init, direction, tolerance=self.accuracy, description=description)

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


def _multiple(S: WhitenedGram, held: LowRank) -> float | None:
    """`c` of `S ≈ c·UΛUᵀ`, from the leading eigenvector; `None` where `S` is no multiple, or of another problem."""
    leading, value = held.vectors[:, -1:], float(held.eigenvalues[-1])
    if len(leading) != len(S) or not value > 0:
        return None
    image = S._matmul(leading)
    along = float(leading[:, 0] @ image[:, 0])
    return along / value if float((image - along * leading).norm()) <= _KEPT * along else None


def _check_operator(operator: Operator) -> GGN:
    if not isinstance(operator, GGN):
        raise TypeError(f"`DualCG` needs a GGN with its features, but got a {type(operator).__name__}.")
    return operator
