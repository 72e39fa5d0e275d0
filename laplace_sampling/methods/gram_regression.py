"""Exact fits of a regression in observation space."""

import time
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.bounds import check_bounds
from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.step import Step
from laplace_sampling.gp.exact_evidence import exact_curves, fit_exact_regression
from laplace_sampling.gp.exact_regression import ExactPrediction, ExactRegression, overall_precisions
from laplace_sampling.likelihoods.likelihood import Gaussian
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.sampling import Draws
from laplace_sampling.methods.fits import Task, Tuned, Tuning, problems_at_bounds
from laplace_sampling.methods.gram_fit import UNLIMITED, GramFit
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.solver import Minimum

__all__ = ["GramRegression"]


@dataclass(frozen=True)
class GramRegression(GramFit):
    """A regression in observation space.

    Attributes:
        exact: the decomposition.
        at: `α` and `b`, as its methods take them.
    """

    exact: ExactRegression
    at: tuple[float, float]

    @classmethod
    def tune(cls, task: Task, tuning: Tuning) -> "GramRegression":
        """At the prior and noise precision of largest evidence."""
        check_bounds(tuning.precision_bounds, tuning.noise_bounds)
        started, model, start = time.perf_counter(), task.model, float(task.prior.precision)
        assert isinstance(model.likelihood, Gaussian)
        found = fit_exact_regression(
            model,
            task.prior,
            precision_bounds=tuning.precision_bounds,
            noise_bounds=tuning.noise_bounds,
            max_memory=UNLIMITED,
        )
        optimum, exact = found.optimum, found.posterior
        at_bounds = ["all"] if "precision" in optimum.at_bounds else []
        noise = "noise_precision" in optimum.at_bounds
        prior = task.prior.with_precision(torch.tensor([optimum.precision], dtype=torch.float64))
        problems = problems_at_bounds(at_bounds, noise, tuning)
        converged = optimum.converged or bool(optimum.at_bounds)
        if not converged:
            problems.append(
                "`fit_hyperparameters` found no maximum of the evidence to rounding: its gradient in log α and log b "
                f"is {optimum.gradient[0]:.2g}, {optimum.gradient[1]:.2g}. Check the data, or use `model.double()`."
            )
        fitted = model.with_likelihood(found.likelihood)
        precisions = (optimum.precision, optimum.noise_precision)
        step = Step(
            step=1,
            prior_precision=[start],
            new_prior_precision=[optimum.precision],
            noise_precision=torch.as_tensor(model.likelihood.noise_precision).reshape(-1).tolist(),
            effective_dimension=[float(exact.effective_dimension(*precisions))],
            mode_norm=[float(exact.mode_norm(*precisions))],
            loss=float(found.likelihood.loss(exact.mode_outputs(*precisions), model.targets).sum()),
            network_loss=float(found.likelihood.loss(model.network_outputs, model.targets).sum()),
            passes=float(model.features.num_outputs),
            seconds=time.perf_counter() - started,
        )
        if tuning.callback is not None:
            tuning.callback(step)
        tuned = Tuned([step], converged, (*at_bounds, *(["noise"] if noise else [])), problems)
        exact = replace(exact, model=fitted, prior=prior)
        return cls._assembled(replace(task, model=fitted, prior=prior), tuned, exact, precisions).with_samples()

    @classmethod
    def of(cls, task: Task) -> "GramRegression":
        exact = ExactRegression.of(task.model, task.prior, max_memory=UNLIMITED)
        return cls._assembled(task, Tuned(), exact, overall_precisions(task.model, task.prior)).with_samples()

    @classmethod
    def restore(cls, task: Task, tensors: dict[str, Tensor]) -> "GramRegression":
        values, vectors = tensors["eigenvalues"], tensors["vectors"]
        noise_scale = tensors["noise_scale"]
        residual = (task.model.targets.reshape(noise_scale.shape) - task.model.offset).double() / noise_scale.sqrt()
        exact = ExactRegression(task.model, task.prior, values, vectors, vectors.T @ residual.flatten(), noise_scale)
        return cls._assembled(task, Tuned(), exact, tuple(tensors["precisions"].tolist()))

    @classmethod
    def _assembled(cls, task: Task, tuned: Tuned, exact: ExactRegression, at: tuple[float, float]) -> "GramRegression":
        mode = exact.mode(*at)
        minimum = Minimum((mode / task.prior.scale)[None], 0.0, 1.0, True)
        return cls(task, tuned, mode, exact.mode_outputs(*at), None, minimum, exact, at)

    @property
    def effective_dimension(self) -> float:
        return float(self.exact.effective_dimension(*self.at))

    @property
    def precisions(self) -> tuple[float, float]:
        return self.at

    def samples(self, draws: Draws) -> Float[Tensor, "K P"]:
        return self.exact.sample(draws, *self.at)

    def predict(self, features: Features) -> ExactPrediction:
        return self.exact.at(features)

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        return exact_curves(self.exact, *self.at), []

    def leave_one_out(self) -> LeaveOneOut:
        return self.exact.leave_one_out(*self.at)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "eigenvalues": self.exact.eigenvalues,
            "vectors": self.exact.vectors,
            "noise_scale": self.exact.noise_scale,
            "precisions": torch.tensor(self.at, dtype=torch.float64),
        }
