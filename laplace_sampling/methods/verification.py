r"""Whether fitted hyperparameters are where the mode and the samples at them say that they should be.

At the fixed point of MacKay's update, `α_g = γ_g/‖θ̄_g‖²` and `b = (N·C − γ)/Σ‖y − f‖²`. A search finds it on curves,
or on samples of earlier steps; the samples and the mode of the posterior itself are other estimates, by other solves.
They cost nothing more, and an end that is an artefact of rounding, or of a search that went astray, does not agree with
them.
"""

import math
from collections.abc import Iterator

import torch

from laplace_sampling.evidence.em import noise_update
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.methods.fit import Fit

__all__ = ["disagreements"]

# Differences of logarithms that say nothing: a search ends within its tolerance. The noise is known better, from all
# observations.
_OF_PRECISION, _OF_NOISE = 0.3, 0.1
# Standard errors of `γ` that say nothing.
_ERRORS = 4.0


def disagreements(fit: Fit) -> list[str]:
    """What the mode and the samples of a fit say against its hyperparameters, if these were found and are no bounds."""
    sampled, tuned = fit.sampled, fit.tuned
    if sampled is None or not (sampled.converged and fit.minimum.converged and tuned.converged) or tuned.at_bounds:
        return []
    return [
        f"`fit_hyperparameters` ended at {what} {value:.3g}, but the samples and the mode there ask for {update:.3g}. "
        f'Float64 weights may help, or another method, as method="exact".'
        for what, value, update, allowed in _updates(fit)
        if not abs(math.log(update / value)) <= allowed
    ]


def _updates(fit: Fit) -> Iterator[tuple[str, float, float, float]]:
    """Each hyperparameter: what it is, its value, that of the update, and what their logarithms may differ by."""
    assert fit.sampled is not None
    prior, before = fit.prior, fit.tuned.history[-1].effective_dimension_se
    gamma, error = (t.cpu() for t in fit.sampled.effective_dimension())
    # The search has an error of its own.
    error = error.nan_to_num(math.inf) + torch.tensor([e or 0.0 for e in before or [0.0] * len(gamma)]).nan_to_num(0)
    norm = prior.grouped((fit.mode.to(prior.scale) / prior.scale).double() ** 2).cpu()
    relative = _ERRORS * error / gamma.clamp_min(1e-300)
    updated = gamma.clamp_min(1e-300) / norm.clamp_min(1e-300)
    for name, alpha, update, e in zip(prior.names, prior.precision.tolist(), updated.tolist(), relative, strict=True):
        yield f"the prior precision ({name})", alpha, update, _OF_PRECISION + float(e)
    likelihood = fit.model.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.learn and torch.as_tensor(likelihood.noise_precision).dim() == 0:
        noise = float(likelihood.noise_precision)
        update = float(noise_update(fit.model, fit.ggn, fit.sampled.samples, gamma, fit.mode_outputs))
        free = max(fit.mode_outputs.numel() - float(gamma.sum()), 1.0)
        yield "the noise precision", noise, update, _OF_NOISE + _ERRORS * float(error.sum()) / free
