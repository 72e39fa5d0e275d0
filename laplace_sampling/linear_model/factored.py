r"""Diagonal and Kronecker-factored posteriors, `N(0, (M̂ + A)⁻¹)`: baselines, of which everything is known.

The mode is that of the linear model itself, whatever `M̂` leaves out: where weights are pulled to is not approximated.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import GGN
from laplace_sampling.linear_model.kronecker import Kronecker, kronecker, kronecker_prior
from laplace_sampling.linear_model.priors import GaussianPrior, GPrior, Prior
from laplace_sampling.linear_model.sampling import Draws, Sampler
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.preconditioners import Factored, Jacobi
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution

__all__ = ["FACTORED", "FactoredSampler", "Inverse", "factored_curvature", "prior_of_factored", "restored_curvature"]

FACTORED = ("diagonal", "kfac")
# Probes in place of outputs, where these are more, and their stream.
_PROBES, _STREAM = 64, 3


def factored_curvature(kind: str, ggn: GGN, seed: int) -> Factored:
    """`M̂`, in the coordinates of `M`.

    Args:
        kind: `"diagonal"` or `"kfac"`.
        ggn: `M`.
        seed: of probes: for more than 64 outputs, and the diagonal also where it would take more than `10⁹` numbers.
    """
    noise = Draws(_PROBES, seed, _STREAM).noise(ggn.features.num_outputs)
    if kind == "kfac":
        return kronecker(ggn, noise)
    return Jacobi(GPrior(num_probes=_PROBES).diagonal(ggn, noise).double())


def prior_of_factored(
    prior: Prior, ggn: GGN, layers: tuple[list[str], Tensor], precision: float, seed: int
) -> GaussianPrior:
    """The prior of Kronecker-factored curvature; a g-prior is that of its own diagonal."""
    if isinstance(prior, GPrior):
        curvature = factored_curvature("kfac", ggn, seed)
        assert isinstance(curvature, Kronecker)
        return kronecker_prior(prior, curvature, layers, precision, ggn.dtype)
    return prior.build(ggn, layers, precision, Draws(1, seed, _STREAM).noise(ggn.features.num_outputs))


def restored_curvature(tensors: dict[str, Tensor]) -> Factored:
    """`M̂` from its `tensors`."""
    return Kronecker.of(tensors) if "rest" in tensors else Jacobi(tensors["diagonal"])


@dataclass(frozen=True)
class Inverse:
    """`(M̂ + A)⁻¹` of rows, in scaled coordinates."""

    curvature: Factored
    spread: Float[Tensor, " P"]

    def solve(self, rhs: Tensor) -> Tensor:
        """`(M̂ + A)⁻¹ v`."""
        return self.curvature.solve(rhs, self.spread)


@dataclass(frozen=True)
class FactoredSampler(Sampler):
    """Samples of a factored posterior, in closed form; the mode by conjugate gradients on `M` itself.

    Args:
        kind: `"diagonal"` or `"kfac"`.
        mode: finds the mode.
        seed: of probes.
    """

    kind: str
    mode: CG
    seed: int = 0

    def curvature(self, ggn: GGN, prior: GaussianPrior) -> Factored:
        """`M̂` in the scaled coordinates of a prior."""
        return factored_curvature(self.kind, ggn, self.seed).congruent(prior.scale)

    def sample(self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Tensor | None = None) -> Solution:
        """Exact samples of the factored posterior, and the diagonal of `(M̂ + A)⁻¹M̂`."""
        curvature, spread = self.curvature(ggn, prior), prior.spread()
        value = curvature.solve_root(draws.prior(ggn.size).to(ggn.device, ggn.dtype), spread)
        none = torch.zeros(len(value), dtype=torch.float64, device=ggn.device)
        leverage = curvature.leverage(spread)[None]
        return Solution(value, value, none, leverage, curvature.passes, converged=True, exact=True, error=none)

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        """Of `M` itself, which a quadratic is of."""
        return self.mode.solve(problem, init, description=description)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        """By Newton's method, each step by conjugate gradients."""
        return self.mode.minimise(objective, init, description=description)
