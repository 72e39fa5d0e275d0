"""Exact fits of any other likelihood in observation space."""

import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.em import EMStep, check_bounds
from laplace_sampling.gp.exact_classification import ExactClassification, ExactPosterior
from laplace_sampling.gp.exact_curves import classification_curves
from laplace_sampling.gp.exact_prediction import ExactPrediction
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.priors import overall_precision
from laplace_sampling.linear_model.sampling import Draws
from laplace_sampling.methods.fits import Task, Tuned, Tuning, problems_at_bounds
from laplace_sampling.methods.gram_fit import UNLIMITED, GramFit
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.solver import Minimum

__all__ = ["GramClassification"]


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
        step = EMStep(
            step=1,
            prior_precision=task.prior.precision.tolist(),
            new_prior_precision=[found.precision],
            noise_precision=[],
            effective_dimension=[found.effective_dimension],
            effective_dimension_se=[0.0],
            mode_norm=[found.mode.norm],
            loss=found.mode.loss,
            network_loss=float(model.likelihood.loss(model.network_outputs, model.targets).sum()),
            mode_residual=found.mode.residual,
            sample_residual=0.0,
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
