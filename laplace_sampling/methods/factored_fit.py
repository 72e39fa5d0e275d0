"""Fits of diagonal and Kronecker-factored posteriors, of which samples, evidence and covariances are in closed form."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.expansion import evidence_path, total_loss
from laplace_sampling.likelihoods.likelihood import Gaussian
from laplace_sampling.linear_model.factored import FactoredSampler, Inverse
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.posterior_samples import Sampled
from laplace_sampling.linear_model.sampling import Draws
from laplace_sampling.methods.fits import PATH_STREAM
from laplace_sampling.methods.solver_fit import SolverFit
from laplace_sampling.predictions.dense_covariance import DenseCovariance
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.saving import CURVATURE
from laplace_sampling.solvers.operator import row_products
from laplace_sampling.solvers.preconditioners import Factored
from laplace_sampling.solvers.quadrature import Quadrature

__all__ = ["FactoredFit"]

# Relative, of the norm of the mode along a path.
_ACCURACY = 2e-3


@dataclass(frozen=True)
class FactoredFit(SolverFit):
    """A posterior of precision `M̂ + A`, and the mode of the linear model itself."""

    # `M̂` once it is known, also in copies without samples.
    _held: list[Factored] = field(default_factory=list, repr=False)

    @property
    def curvature(self) -> Factored:
        """`M̂` in the scaled coordinates of the prior."""
        if not self._held:
            assert isinstance(self.solver, FactoredSampler)
            self._held.append(self.solver.curvature(self.ggn, self.prior))
        return self._held[0]

    def marginal_variance(self) -> Float[Tensor, " P"]:
        """Of each weight, unscaled: the diagonal of `(M̂ + A)⁻¹`."""
        return self.curvature.variance(self.prior.spread()) * self.prior.scale**2

    def draw(self, draws: Draws, description: str | None = None) -> Sampled:
        spread, parts = self.prior.spread(), []
        energies, of_prior = [], []
        for group in draws.groups(16):
            white = group.prior(self.ggn.size).to(self.ggn.device, self.ggn.dtype)
            value = self.curvature.solve_root(white, spread)
            energies.append(row_products(value, self.curvature.matmul(value)))
            of_prior.append((spread * value.double() ** 2).sum(1))
            parts.append((value * self.prior.scale).to(self.task.dtype))
        data_energies = torch.cat(energies)
        return Sampled(
            torch.cat(parts),
            self.prior.grouped(self.curvature.leverage(spread))[None],
            data_energies,
            data_energies + torch.cat(of_prior),
            torch.zeros_like(data_energies),
            torch.zeros_like(data_energies),
            self.curvature.passes,
            converged=True,
            exact=True,
        )

    def judge(self, sampled: Sampled) -> tuple[Tensor, float]:
        return sampled.residual, 1e-6

    def tensors(self) -> dict[str, Tensor]:
        return {f"{CURVATURE}{name}": tensor for name, tensor in self.curvature.tensors().items()}

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return DenseCovariance(features, self.prior, Inverse(self.curvature, self.prior.spread()))

    @property
    def path(self) -> EvidencePath:
        """At the fitted `α` only."""
        return self.evidence(None)[0]

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        alpha, prior = self.alpha, self.prior
        even = (alpha / prior.spread()).sqrt()  # to coordinates in which the prior has one precision
        eigenvalues = self.curvature.congruent(even).eigenvalues().double().cpu()
        ones = torch.ones(1, len(eigenvalues), dtype=torch.float64)
        traces = Quadrature(eigenvalues, ones, ones)
        if decades is not None:
            run, _ = evidence_path(
                self.model,
                prior,
                Draws(1, self.task.seed, PATH_STREAM),
                (self.mode.to(self.model.features.dtype) / prior.scale)[None],
                hessian_at=self.task.hessian_at,
                accuracy=_ACCURACY,
                decades=decades,
            )
            return replace(run, traces=traces, exact=True, full=False), []
        energy = float((prior.diagonal().double() * self.mode.double() ** 2).sum())
        zero, weight = torch.zeros(1, dtype=torch.float64), torch.full((1, 1), alpha * energy, dtype=torch.float64)
        likelihood = self.model.likelihood
        noise = torch.as_tensor(likelihood.noise_precision) if isinstance(likelihood, Gaussian) else None
        path = EvidencePath(
            traces=traces,
            # one node at zero, that gives the norm and the loss of the mode
            fit=Quadrature(zero, weight, weight),
            loss=total_loss(self.model, self.mode_outputs) + energy,
            num_outputs=self.model.network_outputs.numel(),
            size=self.ggn.size,
            noise_precision=None if noise is None or noise.dim() else float(noise),
            at=alpha,
            exact=True,
            passes=0.0,
        )
        return path, []
