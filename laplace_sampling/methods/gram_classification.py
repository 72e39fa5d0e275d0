"""Exact fits of any other likelihood in observation space."""

import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.bounds import check_bounds
from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.step import Step
from laplace_sampling.gp.exact_classification import ExactClassification, ExactPosterior
from laplace_sampling.gp.exact_regression import ExactPrediction
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.priors import overall_precision
from laplace_sampling.linear_model.sampling import Draws
from laplace_sampling.methods.fits import Task, Tuned, Tuning, problems_at_bounds
from laplace_sampling.methods.gram_fit import UNLIMITED, GramFit
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.lapack import symmetric_eigen
from laplace_sampling.solvers.quadrature import Quadrature
from laplace_sampling.solvers.solver import Minimum

__all__ = ["GramClassification", "classification_curves"]

# Eigenvalues of `S` below this, relative to the largest, are zero but for rounding.
_ZERO = 1e-14


@dataclass(frozen=True)
class GramClassification(GramFit):
    """A fit with a likelihood that is not Gaussian, in observation space.

    Attributes:
        exact: the posterior, with its decomposition.
    """

    exact: ExactPosterior

    @classmethod
    def tune(cls, task: Task, tuning: Tuning) -> "GramClassification":
        """At MacKay's fixed point."""
        check_bounds(tuning.precision_bounds, tuning.noise_bounds)
        started, model = time.perf_counter(), task.model
        problem = ExactClassification.of(model, task.prior, max_memory=UNLIMITED)
        found = problem.fit(hessian_at=task.hessian_at, precision_bounds=tuning.precision_bounds)
        step = Step(
            step=1,
            prior_precision=task.prior.precision.tolist(),
            new_prior_precision=[found.precision],
            effective_dimension=[found.effective_dimension],
            mode_norm=[found.mode.norm],
            loss=found.mode.loss,
            network_loss=float(model.likelihood.loss(model.network_outputs, model.targets).sum()),
            mode_residual=found.mode.residual,
            passes=float(model.features.num_outputs),
            seconds=time.perf_counter() - started,
        )
        if tuning.callback is not None:
            tuning.callback(step)
        at_bounds = ["all"] if found.at_bounds else []
        tuned = Tuned([step], True, tuple(at_bounds), problems_at_bounds(at_bounds, False, tuning))
        prior = task.prior.with_precision(torch.tensor([found.precision], dtype=torch.float64))
        return cls._assembled(replace(task, prior=prior), tuned, found).with_samples()

    @classmethod
    def of(cls, task: Task) -> "GramClassification":
        problem = ExactClassification.of(task.model, task.prior, max_memory=UNLIMITED)
        exact = problem.posterior(overall_precision(task.prior), hessian_at=task.hessian_at)
        return cls._assembled(task, Tuned(), exact).with_samples()

    @classmethod
    def restore(cls, task: Task, tensors: dict[str, Tensor]) -> "GramClassification":
        problem, alpha = ExactClassification(task.model, task.prior), overall_precision(task.prior)
        mode = problem.mode_of(alpha, tensors["coefficients"], tensors["mode_outputs"])
        values, vectors, at = (tensors[name] for name in ("eigenvalues", "vectors", "curvature_outputs"))
        return cls._assembled(task, Tuned(), ExactPosterior(problem, alpha, mode, at, values, vectors, mode.converged))

    @classmethod
    def _assembled(cls, task: Task, tuned: Tuned, exact: ExactPosterior) -> "GramClassification":
        weights, mode = exact.mode_weights(), exact.mode
        minimum = Minimum((weights / task.prior.scale)[None], mode.residual, 1.0, mode.converged)
        return cls(task, tuned, weights, mode.outputs, None, minimum, exact)

    @property
    def effective_dimension(self) -> float:
        return self.exact.effective_dimension

    @property
    def precisions(self) -> tuple[float, float]:
        return self.exact.precision, 1.0

    def samples(self, draws: Draws) -> Float[Tensor, "K P"]:
        return self.exact.sample(draws)

    def predict(self, features: Features) -> ExactPrediction:
        return self.exact.at(features).prediction

    @cached_property
    def _curves(self) -> EvidencePath:
        return classification_curves(self.exact)

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        mode = self.exact.mode
        wrong = [] if mode.converged else [f"the mode, whose residual is {mode.residual:.2g}, has not converged"]
        return self._curves, wrong

    def leave_one_out(self) -> LeaveOneOut:
        return self.exact.leave_one_out()

    def tensors(self) -> dict[str, Tensor]:
        return {
            "eigenvalues": self.exact.eigenvalues,
            "vectors": self.exact.vectors,
            "curvature_outputs": self.exact.curvature_outputs,
            "coefficients": self.exact.mode.coefficients,
            "mode_outputs": self.exact.mode.outputs,
        }


def classification_curves(exact: ExactPosterior) -> EvidencePath:
    r"""Evidence, `γ` and norm of the mode for every `α`, of the loss to second order around the mode.

    In coordinates where `A = α`, `M` has the eigenvalues `λ` of `S = LᵀKL = UΛUᵀ`. At the mode the right-hand side of
    the expansion is `b = Mθ̄ − ∇ℓ = (M + α)θ̄`, and `θ̄` along the eigenvectors of `M` is `UᵀLᵀ(h − o)/√λ`. The expansion
    has `B` at the mode; where the traces have it at the network's outputs, that takes a second decomposition.
    """
    problem, mode, alpha = exact.owner, exact.mode, exact.precision
    likelihood, targets, offset = problem.model.likelihood, problem.model.targets, problem.model.offset.double()
    change = mode.outputs - offset
    values, vectors = exact.eigenvalues, exact.vectors
    if not torch.equal(exact.curvature_outputs, mode.outputs):
        values, vectors = symmetric_eigen(problem.whitened(mode.outputs, keep=False))
    along = vectors.T @ likelihood.root_transpose(mode.outputs, change[None], targets).flatten()
    seen = values > _ZERO * values[-1]
    weights = torch.where(seen, ((values + alpha) * along) ** 2 / values, 0.0)[None].cpu()
    nodes, ones = exact.eigenvalues.cpu(), torch.ones_like(weights)
    # From the mode to zero weights.
    rest = 0.5 * likelihood.curvature(mode.outputs, change, targets) - likelihood.gradient(mode.outputs, targets)
    return EvidencePath(
        traces=Quadrature(nodes, ones, ones),
        fit=Quadrature(values.cpu(), weights, weights),
        loss=mode.loss + float((rest * change).sum()),
        num_outputs=change.numel(),
        size=problem.model.features.size,
        noise_precision=None,
        at=alpha,
        exact=True,
        passes=0.0,
    )
