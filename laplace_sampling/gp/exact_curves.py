"""Evidence, `γ` and norm of the mode for every `α`, from the eigenvalues of an exact posterior."""

import torch
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.gp.exact_classification import ExactPosterior
from laplace_sampling.gp.exact_regression import ExactRegression
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.solvers.lapack import symmetric_eigen
from laplace_sampling.solvers.quadrature import Quadrature

__all__ = ["classification_curves", "regression_curves"]

# Eigenvalues of `S` below this, relative to the largest, are zero but for rounding.
_ZERO = 1e-14


def regression_curves(exact: ExactRegression, precision: float, noise_precision: float) -> EvidencePath:
    r"""The curves of a regression, at a noise precision.

    In coordinates where `A = α`, `M` has the eigenvalues `bλ`, and `Φᵀ(b/R)(y − o)` is `b√λ c` along its eigenvectors.

    Args:
        exact: the decomposition; its model has the likelihood at these precisions.
        precision: `α`.
        noise_precision: `b`.
    """
    model = exact.model
    assert isinstance(model.likelihood, Gaussian)
    noise = torch.as_tensor(model.likelihood.noise_precision)
    eigenvalues = (noise_precision * exact.eigenvalues).cpu()
    weights = (noise_precision**2 * exact.eigenvalues * exact.rotated**2).cpu()[None]
    return _curves(
        eigenvalues,
        Quadrature(eigenvalues, weights, weights),
        loss=float(model.likelihood.loss(model.offset.double(), model.targets).sum()),
        num_outputs=exact.size,
        size=model.features.size,
        noise_precision=float(noise) if noise.dim() == 0 else None,
        at=precision,
    )


def classification_curves(exact: ExactPosterior) -> EvidencePath:
    r"""The curves of any other likelihood, of the loss to second order around the mode.

    In coordinates where `A = α`, `M` has the eigenvalues `λ` of `S = LᵀKL = UΛUᵀ`. At the mode the right-hand side of
    the expansion is `b = Mθ̄ − ∇ℓ = (M + α)θ̄`, and `θ̄` along the eigenvectors of `M` is `UᵀLᵀ(h − o)/√λ`. The expansion
    has `B` at the mode; where the traces have it at the network's outputs, that takes a second decomposition.
    """
    problem, mode, alpha = exact.problem, exact.mode, exact.precision
    likelihood, targets, offset = problem.model.likelihood, problem.model.targets, problem.model.offset.double()
    change = mode.outputs - offset
    values, vectors = exact.eigenvalues, exact.vectors
    if not torch.equal(exact.curvature_outputs, mode.outputs):
        values, vectors = symmetric_eigen(problem.whitened(mode.outputs, keep=False))
    along = vectors.T @ likelihood.root_transpose(mode.outputs, change[None], targets).flatten()
    # Along eigenvalues that are zero the mode is zero, too: 0/0 there is rounding over rounding.
    positive = values > _ZERO * values[-1]
    weights = torch.where(positive, ((values + alpha) * along) ** 2 / values, 0.0)[None].cpu()
    # The constant of the expansion, which is that of zero weights: the mode is `change` away.
    slope = 0.5 * likelihood.curvature(mode.outputs, change, targets) - likelihood.gradient(mode.outputs, targets)
    return _curves(
        exact.eigenvalues.cpu(),
        Quadrature(values.cpu(), weights, weights),
        loss=mode.loss + float((slope * change).sum()),
        num_outputs=problem.model.num_observations,
        size=problem.model.features.size,
        noise_precision=None,
        at=alpha,
    )


def _curves(
    eigenvalues: Tensor,
    fit: Quadrature,
    *,
    loss: float,
    num_outputs: int,
    size: int,
    noise_precision: float | None,
    at: float,
) -> EvidencePath:
    """Curves without any error of quadrature: every eigenvalue is a node, of weight one in the traces."""
    ones = torch.ones(1, len(eigenvalues), dtype=eigenvalues.dtype)
    return EvidencePath(
        traces=Quadrature(eigenvalues, ones, ones),
        fit=fit,
        loss=loss,
        num_outputs=num_outputs,
        size=size,
        noise_precision=noise_precision,
        at=at,
        exact=True,
        passes=0.0,
    )
