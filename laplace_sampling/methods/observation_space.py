"""Hyperparameters by one decomposition of the Gram matrix, for the exact method and the dual one."""

import time
from dataclasses import replace

import torch

from laplace_sampling.evidence.bounds import AtBounds, check_bounds
from laplace_sampling.evidence.expansion import total_loss
from laplace_sampling.evidence.step import Step
from laplace_sampling.gp.gram_posterior import gram_posterior_of
from laplace_sampling.gp.regression_evidence import HyperparameterBounds
from laplace_sampling.methods.fit import Task, Tuned
from laplace_sampling.methods.method import Tuning

__all__ = ["tune_in_observation_space"]


def tune_in_observation_space(task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
    """Hyperparameters of largest evidence (a regression), or at MacKay's fixed point, to rounding, in one step."""
    check_bounds(tuning.precision_bounds, tuning.noise_bounds)
    started, model = time.perf_counter(), task.model
    optimum = gram_posterior_of(model.likelihood).tuned(
        model,
        task.prior,
        task.hessian_at,
        HyperparameterBounds(tuning.precision_bounds, tuning.noise_bounds),
    )
    posterior, fitted = optimum.posterior, model.with_likelihood(optimum.likelihood)
    alpha, noise = posterior.precisions[0], model.likelihood.noise_precisions()
    step = Step(
        step=1,
        prior_precision=task.prior.precision.tolist(),
        new_prior_precision=[alpha],
        noise_precision=None if noise is None else noise.reshape(-1).tolist(),
        effective_dimension=[posterior.effective_dimension],
        mode_norm=[posterior.mode_norm],
        loss=total_loss(fitted, posterior.mode_outputs),
        network_loss=total_loss(fitted, model.network_outputs),
        mode_residual=posterior.mode_residual,
        passes=float(model.features.num_outputs),
        seconds=time.perf_counter() - started,
    )
    if tuning.callback is not None:
        tuning.callback(step)
    prior = task.prior.with_precision(torch.tensor([alpha], dtype=torch.float64))
    at_bounds = AtBounds.of(prior, fitted.likelihood, tuning.precision_bounds, tuning.noise_bounds)
    tuned = Tuned(
        history=[step],
        converged=optimum.converged and not at_bounds.names,
        at_bounds=at_bounds.names,
        problems=[*at_bounds.problems, *([optimum.problem] if optimum.problem else [])],
        work=posterior,
    )
    return replace(task, model=fitted, prior=prior), tuned
