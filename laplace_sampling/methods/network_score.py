"""The evidence of a fitted network at its own weights, from the spectrum that its method has, or finds."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.network_evidence import NetworkEvidence
from laplace_sampling.linear_model.priors.prior import overall_precision
from laplace_sampling.methods.fit import Fit, Task
from laplace_sampling.solvers.quadrature import Quadrature

if TYPE_CHECKING:
    from laplace_sampling.evidence.curves import MarginalLikelihood

__all__ = ["best_network_evidence", "network_evidence", "path_of"]

# How far from the precision of a fit curves are asked for, and how often a run is made nearer to the best one.
_DECADES, _RUNS = 1.0, 4


def path_of(task: Task, eigenvalues: Float[Tensor, " m"]) -> EvidencePath:
    """Curves of the traces from all eigenvalues of `M`, in coordinates in which the prior has one precision."""
    nothing = Quadrature.of_eigenvalues(torch.zeros(0))
    noise = task.model.likelihood.noise_precisions()
    return EvidencePath(
        traces=Quadrature.of_eigenvalues(eigenvalues.clamp_min(0)),
        fit=nothing,
        loss=0.0,
        num_outputs=task.model.num_observations,
        size=len(task.trained_weights),
        noise_precision=None if noise is None or noise.dim() else float(noise),
        at=overall_precision(task.prior),
        exact=True,
        passes=0.0,
    )


def network_evidence(fit: Fit, decades: float = 0.0) -> NetworkEvidence:
    """The evidence of the network of a fit, accurate so far to both sides of its prior precision."""
    model, weights = fit.model, fit.task.trained_weights.double()
    norm = float((fit.prior.diagonal().to(weights) * weights**2).sum()) / fit.alpha
    loss = model.total_loss(model.network_outputs.double())
    return NetworkEvidence(fit.method.network_traces(fit, decades), loss, norm)


def best_network_evidence(fit: Fit, runs: int = _RUNS) -> "tuple[float, MarginalLikelihood]":
    """The largest evidence over the precisions of prior and noise, and the prior precision there.

    Several precisions of a prior keep their ratios; several of the noise keep their values.
    """
    noise = fit.model.likelihood.noise_precisions()
    learn_noise = fit.model.likelihood.learns_noise and noise is not None and noise.dim() == 0
    evidence = network_evidence(fit, _DECADES)
    ratio, alpha, best = evidence.best(learn_noise)
    factor = ratio / evidence.path.at
    if evidence.path.exact or runs <= 1 or abs(math.log10(factor)) <= _DECADES:
        return alpha, best.at(alpha)
    nearer = fit.prior.with_precision(fit.prior.precision * factor)
    return best_network_evidence(replace(fit, task=replace(fit.task, prior=nearer)), runs - 1)
