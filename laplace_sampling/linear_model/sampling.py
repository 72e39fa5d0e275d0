r"""Posterior samples by sample-then-optimise.

A zero-mean posterior sample is the minimiser of (thesis §4.2.2, eq. 4.16–4.24)

    L(ζ)  = ½ ‖E − Φζ‖²_B + ½ ‖ζ − θ⁰‖²_A,                        E ~ N(0, B⁻¹), θ⁰ ~ N(0, A⁻¹)
    L'(ζ) = ½ ‖Φζ‖²_B − ⟨u, ζ⟩ + ½ ‖ζ − θ⁰‖²_A,     u = ΦᵀB E = Φᵀ B^{1/2} z ~ N(0, M)

which have the same minimiser `ζ = H⁻¹(u + Aθ⁰) ~ N(0, H⁻¹)`; only `B E = B^{1/2} z` is needed, so `B` may be
singular. In `L'` the noise enters in full at every step, and a mini-batch adds none of its own.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.operator import row_products
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.recorded import stop_recording
from laplace_sampling.solvers.solver import Quadratic, Solution, Solver

# Samples of a closed form that are drawn together. It changes memory only.
_TOGETHER = 16


class Sampler(Solver):
    """A solver with its own way to sample: it gets the noise `z` of the data, where a `Quadratic` has only `ΦᵀL z`."""

    @abstractmethod
    def sample(
        self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Float[Tensor, "K P"] | None = None
    ) -> Solution:
        """Posterior samples as `sample_posterior` returns them."""


def sample_posterior(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    solver: Solver,
    *,
    init: Float[Tensor, "K P"] | None = None,
    description: str | None = None,
) -> Solution:
    r"""Zero-mean posterior samples `ζ ~ N(0, (M + A)⁻¹)` in the scaled coordinates `ζ/s` of the prior.

    Args:
        ggn: `M`, unscaled.
        prior: `A`.
        draws: frozen noise; the same draws give the same samples with every solver that minimises the objective.
        solver: minimises the objective; a `Sampler` samples in its own way.
        init: warm start `δ = ζ − θ⁰`, in scaled coordinates; zero by default, which is the prior sample.
        description: label of a progress bar; none by default.
    """
    if isinstance(solver, Sampler):  # closed forms, and solvers in observation space
        return solver.sample(ggn, prior, draws, init)
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    spread = prior.spread()
    centre = draws.prior(ggn.size).to(ggn.device, ggn.dtype) / spread.sqrt()
    noise = draws.noise(ggn.features.num_outputs)
    # `u = ΦᵀL z`, one VJP of all data for each sample, is computed once for all steps of the solver.
    linear = scaled.root_matmul(noise)
    return solver.solve(Quadratic(scaled, spread, centre, linear), init, description=description)


@dataclass(frozen=True)
class PosteriorSamples:
    """Posterior samples, unscaled, and numbers by which to judge them.

    Attributes:
        samples: `ζ`.
        leverage: `ζ ⊙ Mζ` summed over groups, one row for each sample; if `exact`, one row, the diagonal of `H⁻¹M`
            summed over groups.
        data_energies: `ζᵀMζ`.
        energies: `ζᵀHζ`.
        residual: as in a `Solution`, and so are `error`, `passes`, `converged` and `exact`.
        interrupted: whether Ctrl-C came before all of them were drawn.
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
    interrupted: bool = False

    def effective_dimension(self) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
        """`γ` of each group and its standard error: `E[ζᵀMζ] = Tr(H⁻¹M)`, group by group."""
        if self.exact:
            return self.leverage[0], torch.zeros_like(self.leverage[0])
        if len(self.leverage) == 1:  # one sample says nothing about the spread
            return self.leverage[0], torch.full_like(self.leverage[0], math.nan)
        return self.leverage.mean(0), self.leverage.std(0) / math.sqrt(len(self.leverage))


def draw_closed_form(
    curvature: Curvature, prior: GaussianPrior, draws: Draws, device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "K P"], Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Samples `ζ ~ N(0, (M̂ + A)⁻¹)`, unscaled, with their energies `ζᵀM̂ζ` and `ζᵀ(M̂ + A)ζ`.

    Args:
        curvature: `M̂` in the scaled coordinates of the prior.
        prior: `A`.
        draws: frozen noise.
        device: of the samples.
        dtype: of the samples.
    """
    size, spread = len(prior.scale), prior.spread()
    samples = torch.empty(draws.num_samples, size, dtype=dtype, device=device)
    of_data, of_prior = [], []
    for group in draws.groups(_TOGETHER):
        value = curvature.solve_root(group.prior(size).to(device, dtype), spread)
        of_data.append(row_products(value, curvature.matmul(value)))
        of_prior.append((spread * value.double() ** 2).sum(1))
        samples[group.first - draws.first :][: group.num_samples].copy_(value * prior.scale)
    data_energies = torch.cat(of_data)
    return samples, data_energies, data_energies + torch.cat(of_prior)


def draw(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    solver: Solver,
    *,
    rows: int,
    dtype: torch.dtype,
    init: Callable[[Draws], Float[Tensor, "K P"] | None] | None = None,
    description: str | None = None,
    keep: bool = False,
) -> PosteriorSamples:
    """Zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, in groups of as many as memory holds.

    Args:
        ggn: `M`, unscaled.
        prior: `A`.
        draws: frozen noise.
        solver: for `sample_posterior`.
        rows: number of samples that are solved for together. A sample depends on it only by rounding and within
            the tolerance of the solver.
        dtype: dtype of the samples.
        init: gives the warm start `δ` of some of the draws, as in `sample_posterior`.
        description: label of progress bars; none by default.
        keep: whether Ctrl-C ends it with the groups that are there, if these are two samples at least.
    """
    samples: Tensor | None = None
    parts: list[PosteriorSamples] = []
    for group in draws.groups(rows):
        try:
            start = None if init is None else init(group)
            solution = sample_posterior(ggn, prior, group, solver, init=start, description=description)
            if samples is None:  # after the first solve, so that they do not add to its peak of memory
                samples = torch.empty(draws.num_samples, ggn.size, dtype=dtype, device=ggn.device)
            in_group = samples[group.first - draws.first :][: group.num_samples]
            in_group.copy_((solution.value * prior.scale).to(dtype))
            parts.append(_judged(solution, in_group, ggn, prior))
            del solution  # its vectors are freed before the next group needs their memory
        except KeyboardInterrupt:
            num = sum(len(part.samples) for part in parts)
            # Each of several processes would be interrupted after another sample.
            if not keep or samples is None or num < 2 or ggn.features.processes.size > 1:
                raise
            stop_recording()
            return replace(_joined(samples[:num].clone(), parts), converged=False, interrupted=True)
    assert samples is not None
    return _joined(samples, parts)


def _joined(samples: Float[Tensor, "K P"], parts: list[PosteriorSamples]) -> PosteriorSamples:
    """The samples, and what is known of each, from all groups."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return PosteriorSamples(
        samples,
        parts[0].leverage if parts[0].exact else joined("leverage"),
        joined("data_energies"),
        joined("energies"),
        joined("residual"),
        joined("error"),
        sum(part.passes for part in parts),
        all(part.converged for part in parts),
        parts[0].exact,
    )


def _judged(solution: Solution, samples: Tensor, ggn: GGN, prior: GaussianPrior) -> PosteriorSamples:
    """The samples of one group, and what is known of them."""
    zeta = solution.value
    if solution.exact:
        # The leverage of an exact solution is a diagonal, not that of its samples: their energies take a product.
        scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
        held = scaled.dense()
        data_energies = row_products(zeta, (scaled if held is None else held).matmul(zeta))
    else:
        data_energies = torch.stack([row.double().sum() for row in solution.leverage])
    spread = prior.spread()
    # Row by row: in float64 all samples together would take twice the memory of the solution.
    prior_energies = torch.stack([(spread * row.double() ** 2).sum() for row in zeta])
    leverage = torch.cat([prior.grouped(row[None]) for row in solution.leverage])
    return PosteriorSamples(
        samples,
        leverage,
        data_energies,
        data_energies + prior_energies,
        solution.residual,
        solution.error,
        solution.passes,
        solution.converged,
        solution.exact,
    )
