r"""A solver in observation space by preconditioned conjugate gradients, for few outputs and many weights.

It samples by `matheron`, finds modes by `dual_mode`, and solves any other system by Woodbury's identity. The conjugate
gradients are those of `linear_operator`, which is imported when they first run.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.dual_mode import DualMode, dual_mode
from laplace_sampling.gp.matheron import DualSolution, solve_matheron
from laplace_sampling.gp.whitened_gram import (
    DualSolve,
    LowRank,
    WhitenedGram,
    backward,
    forward,
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
    Minimum,
    Objective,
    Quadratic,
    Solution,
    function_error,
    relative_residual,
)

__all__ = ["DualCG"]

# A preconditioner is kept for another matrix if that maps its leading eigenvector to within this of a multiple of it.
# Tuned on a spectrum that falls as a power, at α from 0.04 to 400: half and twice the value gave the same products.
_KEPT = 0.3
# Eigenvalues of `S` below which `I + S` needs no preconditioner: they are known of an earlier matrix, whose other
# eigenvectors are dropped. Conjugate gradients gain a digit in each step where all eigenvalues are between 1 and 1.1.
_LEADING = 0.1
# How much more of the trace of `S` than before may be outside of an earlier matrix's leading eigenvectors, which bounds
# the iterations that are made for it. A regression of 400 data took 0.2 to 1.06 times the products of a cold fit after
# 1 to 600 more steps of training; with half the same, with twice up to 1.65 times, and 57 times without a bound.
_LEFT = 30.0
# Outputs up to which the exact trace, `C` VJPs a datum, is worth its products: a definition, not tuned. Half or twice
# as many makes no difference to problems of up to 32 outputs, nor to those of more than 128.
_TRACE_OUTPUTS = 64


@dataclass(frozen=True)
class DualCG(Sampler):
    r"""A `Solver` in observation space, for `fit_em` and all else that takes one.

    `H⁻¹w = A⁻¹w − A⁻¹ΦᵀL (I + S)⁻¹ LᵀΦA⁻¹w` (Woodbury). The two terms cancel where the data determine much, so that the
    solve is refined on its residual. `sample_matheron`, which knows the noise itself, has no such loss.

    Args:
        tolerance: of the error of the function, as `Solution.error`; by default what the `tolerance` of a fit needs,
            or 1e-3 where there is none.
        rank: of the preconditioner; 0 for none. By default 400, or what memory holds, in a fit; else none.
        max_iterations: of conjugate gradients, in each solve.
        max_refinements: solves with the residual of the last one, at most.
        seed: of the preconditioner.
        held: a preconditioner made before, which is rescaled for every `α` and noise precision.
    """

    tolerance: float | None = None
    rank: int | None = None
    max_iterations: int = 1000
    max_refinements: int = 4
    seed: int = 0
    held: LowRank | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.accuracy > 0 or (self.rank or 0) < 0 or self.max_iterations < 1 or self.max_refinements < 0:
            raise ValueError(
                f"tolerance and max_iterations must be positive, rank and max_refinements not negative: {self}."
            )

    @property
    def accuracy(self) -> float:
        """The tolerance, or its default."""
        return 1e-3 if self.tolerance is None else self.tolerance

    def hold(self, S: WhitenedGram, earlier: LowRank | None = None) -> "DualCG":
        """The same solver with the preconditioner of a matrix, kept for all its multiples.

        Args:
            S: the matrix, at the precisions of its solves if there is an earlier one.
            earlier: the preconditioner of a matrix that may be near: its leading eigenvectors span that of `S`.
        """
        held, trace, likelihood = None, None, S.ggn.likelihood
        common_noise = isinstance(likelihood, Gaussian) and torch.as_tensor(likelihood.noise_precision).dim() == 0
        # Only then is every later matrix a multiple of this one, so that the trace may be kept with it.
        if self.rank and common_noise and S.ggn.features.num_outputs <= _TRACE_OUTPUTS:
            trace = float((S.variance * S.ggn.diagonal()).sum())
        if self.rank and earlier is not None and (factor := _multiple(S, earlier)) is not None:
            leading = earlier.vectors[:, factor * earlier.eigenvalues > _LEADING][:, -self.rank :]
            held = randomised_svd(S, max(1, leading.shape[1]), start=leading) if leading.numel() else None
            if held is not None and trace is not None and earlier.trace is not None:
                before = factor * (earlier.trace - float(earlier.eigenvalues.sum()))
                if trace - float(held.eigenvalues.sum()) > 2 * max(before, 0.0) + _LEFT:
                    held = None
        held = replace(self, held=None).precondition(S) if held is None else held
        return replace(self, held=None if held is None else replace(held, trace=trace))

    def precondition(self, S: WhitenedGram) -> LowRank | None:
        """The preconditioner of `I + S`."""
        if not self.rank:
            return None
        if self.held is not None and (factor := _multiple(S, self.held)) is not None:
            return self.held.rescaled(factor)
        return randomised_svd(S, self.rank, seed=self.seed)

    def sample(
        self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Float[Tensor, "K P"] | None = None
    ) -> DualSolution:
        """`sample_matheron` to the tolerance of the error of the function; without a warning."""
        tolerance = 0.1 * self.accuracy
        solution = solve_matheron(ggn, prior, draws, tolerance, self.max_iterations, self.precondition, None, init)
        for _ in range(self.max_refinements):
            if bool((solution.error <= self.accuracy).all()) or not solution.converged:
                break
            # The error of the function is some multiple of the residual that conjugate gradients see, and have reached.
            reached = min(tolerance, float(solution.dual_residual.max()))
            tolerance = 0.5 * reached * float((self.accuracy / solution.error.max()).clamp_max(1.0))
            start = solution.coefficients
            more = solve_matheron(ggn, prior, draws, tolerance, self.max_iterations, self.precondition, start)
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
        operator, precision = _check_operator(problem.operator), problem.precision.double()
        S = WhitenedGram(1 / precision, operator)
        preconditioner = self.precondition(S)
        iterate = _Iterate.of(operator, problem, torch.zeros_like(problem.centre) if init is None else init)
        rows = len(iterate.delta)
        coefficients = torch.zeros(rows, len(S), dtype=torch.float64, device=iterate.delta.device)
        dual_residual, iterations, refinements, inner = coefficients.new_zeros(rows), 0, 0, 0.1 * self.accuracy
        while not bool((iterate.error <= self.accuracy).all()) and refinements < self.max_refinements:
            step, solve = self._inverse(operator, S, -iterate.gradient, precision, preconditioner, inner)
            iterations, refinements, dual_residual = iterations + solve.iterations, refinements + 1, solve.residual
            refined = _Iterate.of(operator, problem, iterate.delta + step)
            if refined.largest_error > 0.5 * iterate.largest_error:
                inner *= 1e-2  # the difference of the two terms lost what was gained
            if refined.largest_error < iterate.largest_error:
                iterate, coefficients = refined, coefficients + solve.value
        dtype = problem.centre.dtype
        return DualSolution(
            iterate.zeta.to(dtype),
            iterate.delta.to(dtype),
            relative_residual(iterate.fit, iterate.pull).to(dtype),
            (iterate.zeta * iterate.product).to(dtype),
            float(S.rows + (2 * refinements + 1) * rows),
            bool((iterate.error <= self.accuracy).all()),
            error=iterate.error,
            coefficients=coefficients,
            iterations=iterations,
            dual_residual=dual_residual,
        )

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """Newton's method, each direction by conjugate gradients in observation space; see also `mode`."""
        if isinstance(objective, ModeObjective) and isinstance(objective.model.likelihood, Gaussian):
            precision = objective.precision
            # The precisions of a `ModeObjective` are in scaled coordinates: a group for each weight, of unit scale.
            unit = torch.ones_like(precision).double().cpu()
            prior = GaussianPrior(precision.double().cpu(), torch.arange(len(precision)), unit, ())
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


@dataclass(frozen=True)
class _Iterate:
    """Weights of a solve, with the gradient of its objective and the error of the function.

    Attributes:
        delta: `δ = ζ − θ⁰`.
        zeta: `ζ`.
        product: `Mζ`.
        fit: the gradient of the data, `Mζ − u`.
        pull: that of the prior, `Aδ`.
        error: of the function, one a row.
    """

    delta: Float[Tensor, "K P"]
    zeta: Float[Tensor, "K P"]
    product: Float[Tensor, "K P"]
    fit: Float[Tensor, "K P"]
    pull: Float[Tensor, "K P"]
    error: Float[Tensor, " K"]

    @classmethod
    def of(cls, ggn: GGN, problem: Quadratic, delta: Float[Tensor, "K P"]) -> "_Iterate":
        delta, precision = delta.double(), problem.precision.double()
        zeta = problem.centre.double() + delta
        product = backward(ggn, forward(ggn, zeta))
        fit, pull = product - problem.linear.double(), precision * delta
        error = function_error(fit + pull, zeta, product, float(precision.min()))
        return cls(delta, zeta, product, fit, pull, error)

    @property
    def gradient(self) -> Float[Tensor, "K P"]:
        return self.fit + self.pull

    @property
    def largest_error(self) -> float:
        return float(self.error.max())


def _multiple(S: WhitenedGram, held: LowRank) -> float | None:
    """`c` of `S ≈ c·UΛUᵀ`, from the leading eigenvector; `None` where `S` is no multiple, or of another problem."""
    leading, value = held.vectors[:, -1:], float(held.eigenvalues[-1])
    if len(leading) != len(S) or not value > 0:
        return None
    image = S.matmul(leading)
    along = float(leading[:, 0] @ image[:, 0])
    return along / value if float((image - along * leading).norm()) <= _KEPT * along else None


def _check_operator(operator: Operator) -> GGN:
    if not isinstance(operator, GGN):
        raise TypeError(f"`DualCG` needs a GGN with its features, but got a {type(operator).__name__}.")
    return operator
