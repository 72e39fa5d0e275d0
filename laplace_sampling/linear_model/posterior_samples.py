"""Samples of the posterior, in groups of as many as memory holds, and what is known of them."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import GGN, ScaledFeatures
from laplace_sampling.linear_model.priors import GaussianPrior
from laplace_sampling.linear_model.sampling import Draws, sample_posterior
from laplace_sampling.methods.contour import sample_contour
from laplace_sampling.solvers.operator import row_products
from laplace_sampling.solvers.solver import Solution, Solver

__all__ = ["Sampled", "draw"]


@dataclass(frozen=True)
class Sampled:
    """Posterior samples, unscaled, and numbers by which to judge them.

    Attributes:
        samples: `ζ`.
        leverage: `ζ ⊙ Mζ` summed over groups, one row a sample; or the diagonal of `H⁻¹M` so, if `exact`.
        data_energies: `ζᵀMζ`; `energies` `ζᵀHζ`.
        residual: as of a `Solution`, and so `error`, `passes`, `converged`, `exact`.
    """

    samples: Float[Tensor, "K P"]
    leverage: Float[Tensor, "L G"]
    data_energies: Float[Tensor, " K"]
    energies: Float[Tensor, " K"]
    residual: Float[Tensor, " K"]
    error: Float[Tensor, " K"]
    passes: float
    converged: bool
    exact: bool

    def effective_dimension(self) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
        """`γ` of each group and its standard error, as `evidence.effective_dimension`."""
        if self.exact:
            return self.leverage[0], torch.zeros_like(self.leverage[0])
        if len(self.leverage) == 1:
            return self.leverage[0], torch.full_like(self.leverage[0], math.nan)
        return self.leverage.mean(0), self.leverage.std(0) / math.sqrt(len(self.leverage))


def draw(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    solver: Solver | None,
    *,
    rows: int,
    dtype: torch.dtype,
    description: str | None = None,
) -> Sampled:
    """Zero-mean posterior samples `ζ ~ N(0, H⁻¹)`.

    Args:
        ggn: `M`, unscaled.
        prior: `A`.
        draws: the frozen noise.
        solver: for `sample_posterior`; `None` for `sample_contour`.
        rows: samples in memory together. A sample does not depend on it, but for the rounding and the tolerance of
            the solver.
        dtype: of the samples.
        description: label of progress bars; none by default.
    """
    samples: Tensor | None = None
    parts: list[Sampled] = []
    for group in draws.groups(rows):
        if solver is None:
            solution = sample_contour(ggn, prior, group)
        else:
            solution = sample_posterior(ggn, prior, group, solver, description=description)
        if samples is None:
            samples = torch.empty(draws.num_samples, ggn.size, dtype=dtype, device=ggn.device)
        start = group.first - draws.first
        samples[start : start + group.num_samples] = (solution.value * prior.scale).to(dtype)
        parts.append(_judged(solution, ggn, prior))
        del solution  # before the next group
    assert samples is not None

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Sampled(
        samples,
        parts[0].leverage if parts[0].exact else all_of("leverage"),
        all_of("data_energies"),
        all_of("energies"),
        all_of("residual"),
        all_of("error"),
        sum(part.passes for part in parts),
        all(part.converged for part in parts),
        parts[0].exact,
    )


def _judged(solution: Solution, ggn: GGN, prior: GaussianPrior) -> Sampled:
    value = solution.value
    if solution.exact:
        scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
        data_energies = row_products(value, scaled.matmul(value))
    else:
        data_energies = torch.stack([row.double().sum() for row in solution.leverage])
    spread = prior.spread()
    of_prior = torch.stack([(spread * row.double() ** 2).sum() for row in value])
    leverage = torch.cat([prior.grouped(row[None]) for row in solution.leverage])
    return Sampled(
        value[:0].clone(),
        leverage,
        data_energies,
        data_energies + of_prior,
        solution.residual,
        solution.error,
        solution.passes,
        solution.converged,
        solution.exact,
    )
