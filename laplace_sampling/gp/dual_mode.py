r"""The mode of the linear model in observation space, by Newton's method with conjugate gradients."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.dual_point import DualPoint
from laplace_sampling.gp.gram import transposed
from laplace_sampling.gp.matheron import warn_of_residual
from laplace_sampling.gp.whitened_gram import DualSolve, LowRank, WhitenedGram, solve_shifted
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.solver import Minimum

__all__ = ["DualMode", "dual_mode"]


@dataclass(frozen=True)
class DualMode(Minimum):
    """A `Minimum`, `value` in the scaled coordinates `θ̄/s`, with the outputs `h(θ̄, x_i)` and all iterations of CG."""

    outputs: Float[Tensor, "N C"]
    iterations: int


# Solves for the mode of a Gaussian likelihood: the first one is enough where it converges, and a few more correct it
# where it does not.
_REFINEMENTS = 5


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
    gaussian, variance = isinstance(model.likelihood, Gaussian), 1 / prior.diagonal().double()
    # Zero weights have the outputs `o`: the start costs no pass over the data.
    offset = model.offset.double()
    point = DualPoint(model, torch.zeros_like(offset), offset)
    theta = torch.zeros(1, model.features.size).to(offset)
    passes, iterations, converged = 0.0, 0, False
    for _ in range(min(max_steps, _REFINEMENTS) if gaussian else max_steps):
        solve, step = _newton_step(point, variance, preconditioner, tolerance, max_iterations)
        if warn and not solve.converged:
            warn_of_residual("dual_mode", solve.iterations, solve.residual, tolerance)
        # One VJP and one JVP give the step in weights and in outputs; halving it then costs no product.
        direction, change = _kernel_product(model, variance, step)
        passes += solve.products + 2
        iterations += solve.iterations
        # Far from the mode a full Newton step can raise the loss: the softmax is flat where labels are certain.
        lower = point.descended(step, change)
        point, length = lower or (point, 0.0)
        theta = theta + length * direction
        # A quadratic objective is done after one step.
        small = float(step.norm()) <= tolerance * float(point.coefficients.norm())
        converged = solve.converged and (gaussian or (small and length == 1))
        if converged or lower is None:
            break
    mode = theta / prior.scale.double()
    return DualMode(mode, point.relative_residual, passes, converged, point.outputs, iterations)


def _newton_step(
    point: DualPoint,
    variance: Float[Tensor, " P"],
    preconditioner: LowRank | None,
    tolerance: float,
    max_iterations: int,
) -> tuple[DualSolve, Float[Tensor, "N C"]]:
    """`b − L(I + S)⁻¹LᵀK b − a`, or with a Gaussian likelihood `L(I + S)⁻¹Lᵀ(y − o) − a`, and the solve."""
    model, h = point.model, point.outputs
    likelihood, targets = model.likelihood, model.targets
    gaussian, b = isinstance(likelihood, Gaussian), point.newton_target
    rhs = model.residuals(model.offset.double()) if gaussian else _kernel_product(model, variance, b)[1]
    rhs = likelihood.root_transpose(h, rhs[None], targets).flatten(1)
    # In whitened coordinates the matrix is `I + S`: its eigenvalues are at least one, also where `B` is singular.
    S = WhitenedGram(variance, model.ggn(h))
    solve = solve_shifted(S, rhs, tolerance=tolerance, max_iterations=max_iterations, preconditioner=preconditioner)
    solved = likelihood.root(h, solve.value.reshape(1, *h.shape), targets)[0]
    # With a Gaussian likelihood it is the solution itself; the difference would lose digits.
    return solve, (solved if gaussian else b - solved) - point.coefficients


def _kernel_product(
    model: LinearModel, variance: Float[Tensor, " P"], a: Float[Tensor, "N C"]
) -> tuple[Float[Tensor, "1 P"], Float[Tensor, "N C"]]:
    """`A⁻¹Φᵀa` and `Ka`."""
    features = model.features
    theta = transposed(features, a[None]) * variance
    return theta, features.outputs(theta.to(features.dtype))[0].double()
