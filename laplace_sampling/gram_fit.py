"""Exact fits of a regression in observation space, from the eigendecomposition of the Gram matrix."""

import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curves import EvidencePath
from laplace_sampling.evidence import EMStep, check_bounds
from laplace_sampling.exact import ExactPrediction, ExactRegression, overall_precisions
from laplace_sampling.exact_fit import exact_curves, fit_exact_regression
from laplace_sampling.fits import Fit, Task, Tuned, Tuning, problems_at_bounds
from laplace_sampling.leave_one_out import LeaveOneOut
from laplace_sampling.likelihoods import Gaussian
from laplace_sampling.operators import Features
from laplace_sampling.posterior import Sampled
from laplace_sampling.predictive import FunctionCovariance
from laplace_sampling.sampling import Draws
from laplace_sampling.solvers import Minimum

__all__ = ["GramFit", "fit_gram", "restore_gram", "tune_gram"]

# What the class has checked already, for all methods, by its own limit.
_UNLIMITED = float("inf")


def tune_gram(task: Task, tuning: Tuning) -> "GramFit":
    """The posterior at the prior and noise precision of largest evidence, found to rounding."""
    check_bounds(tuning.precision_bounds, tuning.noise_bounds)
    started, model, start = time.perf_counter(), task.model, float(task.prior.precision)
    assert isinstance(model.likelihood, Gaussian)
    found = fit_exact_regression(
        model,
        task.prior,
        precision_bounds=tuning.precision_bounds,
        noise_bounds=tuning.noise_bounds,
        max_memory=_UNLIMITED,
    )
    optimum, exact = found.optimum, found.posterior
    at_bounds = ["all"] if "precision" in optimum.at_bounds else []
    noise = "noise_precision" in optimum.at_bounds
    prior = task.prior.with_precision(torch.tensor([optimum.precision], dtype=torch.float64))
    problems = problems_at_bounds(at_bounds, noise, tuning)
    converged = optimum.converged or bool(optimum.at_bounds)
    if not converged:
        problems.append(
            "`fit_hyperparameters` found no maximum of the evidence to rounding: its gradient in log α and log b is "
            f"{optimum.gradient[0]:.2g}, {optimum.gradient[1]:.2g}. Check the data, or use `model.double()`."
        )
    fitted = model.with_likelihood(found.likelihood)
    precisions = (optimum.precision, optimum.noise_precision)
    step = EMStep(
        step=1,
        prior_precision=[start],
        new_prior_precision=[optimum.precision],
        noise_precision=torch.as_tensor(model.likelihood.noise_precision).reshape(-1).tolist(),
        effective_dimension=[float(exact.effective_dimension(*precisions))],
        effective_dimension_se=[0.0],
        mode_norm=[float(exact.mode_norm(*precisions))],
        loss=float(found.likelihood.loss(exact.mode_outputs(*precisions), model.targets).sum()),
        network_loss=float(found.likelihood.loss(model.network_outputs, model.targets).sum()),
        mode_residual=0.0,
        sample_residual=0.0,
        passes=float(model.features.num_outputs),
        seconds=time.perf_counter() - started,
    )
    if tuning.callback is not None:
        tuning.callback(step)
    tuned = Tuned([step], converged, (*at_bounds, *(["noise"] if noise else [])), problems)
    exact = replace(exact, model=fitted, prior=prior)
    return _finish(replace(task, model=fitted, prior=prior), tuned, exact, precisions)


def fit_gram(task: Task) -> "GramFit":
    """The posterior at the prior and noise precision that are given."""
    exact = ExactRegression.of(task.model, task.prior, max_memory=_UNLIMITED)
    return _finish(task, Tuned(), exact, overall_precisions(task.model, task.prior))


def restore_gram(task: Task, tensors: dict[str, Tensor]) -> "GramFit":
    """The posterior of `GramFit.tensors`, without its samples."""
    values, vectors = tensors["eigenvalues"], tensors["vectors"]
    noise_scale = tensors["noise_scale"]
    residual = (task.model.targets.reshape(noise_scale.shape) - task.model.offset).double() / noise_scale.sqrt()
    exact = ExactRegression(task.model, task.prior, values, vectors, vectors.T @ residual.flatten(), noise_scale)
    return _assembled(task, Tuned(), exact, tuple(tensors["precisions"].tolist()))


def _assembled(task: Task, tuned: Tuned, exact: ExactRegression, precisions: tuple[float, float]) -> "GramFit":
    mode = exact.mode(*precisions)
    minimum = Minimum((mode / task.prior.scale)[None], 0.0, 1.0, True)
    return GramFit(task, tuned, mode, exact.mode_outputs(*precisions), None, minimum, exact, precisions)


def _finish(task: Task, tuned: Tuned, exact: ExactRegression, precisions: tuple[float, float]) -> "GramFit":
    fit = _assembled(task, tuned, exact, precisions)
    fit = replace(fit, tuned=replace(tuned, path=fit.evidence(None)[0]))
    return replace(fit, sampled=fit.draw(task.draws))


@dataclass(frozen=True)
class GramFit(Fit):
    """A fit of which everything is known in closed form.

    Attributes:
        exact: the decomposition.
        precisions: `α` and `b`, as its methods take them.
    """

    exact: ExactRegression
    precisions: tuple[float, float]

    def draw(self, draws: Draws, description: str | None = None) -> Sampled:
        model, prior = self.model, self.prior
        samples = self.exact.sample(draws, *self.precisions)
        outputs = torch.cat([model.features.outputs(part.to(model.features.dtype)) for part in samples.split(16)])
        energies = model.likelihood.root_transpose(self.mode_outputs, outputs.double()).flatten(1).square().sum(1)
        of_prior = torch.stack([(prior.diagonal().double() * row**2).sum() for row in samples])
        none = torch.zeros(len(samples), dtype=torch.float64, device=samples.device)
        return Sampled(
            samples.to(self.task.dtype),
            self.exact.effective_dimension(*self.precisions).reshape(1, 1),
            energies,
            energies + of_prior,
            none,
            none,
            1.5 * len(samples),
            converged=True,
            exact=True,
        )

    def judge(self, sampled: Sampled) -> tuple[Tensor, float]:
        return sampled.residual, 1e-6

    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        return exact_curves(self.exact, *self.precisions), []

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return _GramCovariance(self, features.in_float64())

    def leave_one_out(self) -> LeaveOneOut:
        return self.exact.leave_one_out(*self.precisions)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "eigenvalues": self.exact.eigenvalues,
            "vectors": self.exact.vectors,
            "noise_scale": self.exact.noise_scale,
            "precisions": torch.tensor(self.precisions, dtype=torch.float64),
        }


@dataclass(frozen=True)
class _GramCovariance(FunctionCovariance):
    """Made when it is asked for: an input costs `C` VJPs and a product with the eigenvectors."""

    fit: GramFit
    features: Features

    @cached_property
    def _prediction(self) -> ExactPrediction:
        return self.fit.exact.at(self.features)

    def variance(self) -> Float[Tensor, "N C"]:
        return self._prediction.stddev(*self.fit.precisions) ** 2

    def blocks(self) -> Float[Tensor, "N C C"]:
        blocks = self._prediction.covariance(*self.fit.precisions)
        diagonal = blocks.diagonal(dim1=1, dim2=2)
        diagonal.clamp_(min=0)
        return blocks

    def joint(self) -> Float[Tensor, "NC NC"]:
        return self._prediction.joint_covariance(*self.fit.precisions)
