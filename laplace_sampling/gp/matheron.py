r"""Posterior samples in observation space by Matheron's rule, for few outputs and many weights.

With a root `L Lᵀ = B` and `S = Lᵀ Φ A⁻¹ Φᵀ L`, `[N·C, N·C]` (thesis eq. 2.16–2.19, §7.3.3)

    ζ = θ⁰ + A⁻¹ΦᵀL (I + S)⁻¹ (z − LᵀΦθ⁰)        = θ⁰ − A⁻¹Φᵀ (K + B⁻¹)⁻¹ (ε + Φθ⁰),  ε = −L⁻ᵀ z ~ N(0, B⁻¹)

The first form holds for a singular `B` too, and its matrix has no eigenvalue below one. A product with `S` is a VJP and
a JVP over all data.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.whitened_gram import LowRank, WhitenedGram, backward, forward, solve_shifted
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.solver import ConvergenceWarning, Solution, function_error, relative_residual

__all__ = ["DualSolution", "sample_matheron", "solve_matheron", "warn_of_residual"]


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
        preconditioner: of `I + S` with `S = WhitenedGram(1/prior.diagonal(), ggn)`; see `randomised_svd`.
        init: `coefficients` of an earlier solve.
    """
    solution = solve_matheron(ggn, prior, draws, tolerance, max_iterations, lambda S: preconditioner, init)
    if not solution.converged:
        warn_of_residual("sample_matheron", solution.iterations, solution.dual_residual, tolerance)
    return solution


def solve_matheron(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    tolerance: float,
    max_iterations: int,
    precondition: Callable[[WhitenedGram], LowRank | None],
    init: Float[Tensor, "K NC"] | None,
    delta: Float[Tensor, "K P"] | None = None,
) -> DualSolution:
    """`sample_matheron` without a warning; starts are coefficients (`init`), or weights (`delta`)."""
    # The algebra is in float64, products of the network are in its own dtype: conjugate gradients need the digits.
    S = WhitenedGram(1 / prior.diagonal().double(), ggn)
    preconditioner = precondition(S)
    spread, scale = prior.spread().double(), prior.scale.double()
    centre = draws.prior(ggn.size).to(ggn.device).double() / spread.sqrt()
    white = draws.noise(ggn.features.num_outputs)(torch.arange(ggn.num_data)).to(ggn.device).double()
    # Frozen draws: solves at other precisions see the same noise, so that the fixed point of `α` has no jitter.
    rhs = white.flatten(1) - forward(ggn, centre * scale)
    if delta is not None and preconditioner is None:
        init = _coefficients(S, rhs, white.flatten(1) - forward(ggn, (centre + delta) * scale))
    before = S.rows
    solve = solve_shifted(
        S, rhs, tolerance=tolerance, max_iterations=max_iterations, preconditioner=preconditioner, init=init
    )
    # Back in weight space for `[K, N·C]` coefficients: one VJP a sample over all data.
    delta = backward(ggn, solve.value) * scale / spread
    zeta = centre + delta
    # `Mζ` once more, with the solution: residual, energies and error are then those of the sample that is returned,
    # and comparable with those of solvers in weight space.
    product = backward(ggn, forward(ggn, zeta * scale)) * scale
    fit, pull = product - backward(ggn, white.flatten(1)) * scale, spread * delta
    traces = None
    # Traces of groups of weights are not those of the whole matrix.
    if preconditioner is not None and preconditioner.trace is not None and len(prior.names) == 1:
        traces = preconditioner.traces(rhs, solve.value)
    dtype = ggn.dtype
    return DualSolution(
        zeta.to(dtype),
        delta.to(dtype),
        relative_residual(fit, pull).to(dtype),
        (zeta * product).to(dtype),
        # Half a product for the right-hand side, half for `δ`, one for `Mζ` and half for its noise term.
        float(solve.products + before + 2.5 * len(zeta)),
        solve.converged,
        error=function_error(fit + pull, zeta, product, float(spread.min())),
        coefficients=solve.value,
        iterations=solve.iterations,
        dual_residual=solve.residual,
        traces=traces,
    )


def _coefficients(S: WhitenedGram, rhs: Float[Tensor, "K NC"], near: Float[Tensor, "K NC"]) -> Float[Tensor, "K NC"]:
    """A start from weights, whose `z − LᵀΦζ` is the solution at the solution: zero where it is worse than that."""
    # Away from the solution `S` enlarges its error.
    better = (rhs - near - S.matmul(near.mT).mT).norm(dim=1) < rhs.norm(dim=1)
    return near * better[:, None]


def warn_of_residual(call: str, iterations: int, residual: Float[Tensor, " K"], tolerance: float) -> None:
    """Warn that conjugate gradients did not reach their tolerance."""
    warnings.warn(
        f"`{call}`: conjugate gradients stopped after {iterations} iterations at a relative residual "
        f"of {float(residual.max()):.2g}, above the tolerance {tolerance:.2g}. Raise `max_iterations`, or "
        "give a preconditioner of higher rank.",
        ConvergenceWarning,
        stacklevel=3,
    )
