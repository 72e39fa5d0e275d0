r"""Whether fitted hyperparameters are where the mode and the samples at them say that they should be.

At a maximum of the evidence `γ_g = α_g ‖θ̄_g‖²` and `N·C − γ = b Σ(y − f)²`. A search finds it on curves, or on
samples of earlier steps; the samples and the mode of the posterior itself are other estimates, by other solves. They
cost nothing more. An end that is an artefact of rounding, or of a search that went astray, does not agree with them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.methods.fit import Fit

__all__ = ["disagreements"]

# Relative differences of the two sides that say nothing: a search ends within its tolerance. The noise is known better,
# from all observations. Standard errors of `γ` that say nothing.
_OF_PRECISION, _OF_NOISE, _ERRORS = 0.25, 0.1, 4.0


@dataclass(frozen=True)
class _Balance:
    """Two sides of an equation that holds at the best value of a hyperparameter, to which the second is proportional.

    Attributes:
        what: the hyperparameter.
        value: of it.
        wanted: the side of `γ`.
        found: the other side.
        error: standard error of `wanted`.
        tolerance: relative.
    """

    what: str
    value: float
    wanted: float
    found: float
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        allowed = _ERRORS * self.error + self.tolerance * max(abs(self.wanted), abs(self.found))
        return abs(self.wanted - self.found) <= allowed


def disagreements(fit: Fit) -> list[str]:
    """What the mode and the samples of a fit say against its hyperparameters, if these were found and are no bounds."""
    by_evidence = fit.tuned.criterion == "evidence"
    if fit.sampled is None or not (by_evidence and fit.solved and fit.tuned.converged) or fit.tuned.at_bounds:
        return []
    advice = (
        "Bring inputs and targets to a common scale."
        if fit.method.name == "exact"
        else 'Raise `num_samples` and `max_steps` of `fit_hyperparameters`, or use method="exact".'
    )
    return [
        f"`fit_hyperparameters` ended at {balance.what} {balance.value:.3g}, but the samples and the mode there ask "
        f"for {balance.value * max(balance.wanted, 0.0) / max(balance.found, 1e-300):.3g}. {advice}"
        for balance in _balances(fit)
        if not balance.holds
    ]


def _balances(fit: Fit) -> Iterator[_Balance]:
    assert fit.sampled is not None
    gamma, error = (t.cpu() for t in fit.sampled.effective_dimension())
    # The search has an error of its own.
    of_search = torch.tensor(fit.tuned.history[-1].effective_dimension_se or [0.0] * len(gamma), dtype=torch.float64)
    error = (error.nan_to_num(math.inf) ** 2 + of_search.nan_to_num(0) ** 2).sqrt()
    prior, scale = fit.prior, fit.prior.scale.double()
    found = prior.precision * prior.grouped((fit.mode.weights.to(scale) / scale) ** 2).cpu()
    for group, name in enumerate(prior.names):
        sides = float(gamma[group]), float(found[group]), float(error[group])
        yield _Balance(f"the prior precision ({name})", float(prior.precision[group]), *sides, _OF_PRECISION)
    likelihood = fit.model.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.learn and torch.as_tensor(likelihood.noise_precision).dim() == 0:
        outputs = fit.mode.outputs if likelihood.noise_at == "mode" else fit.model.network_outputs
        squares = float(fit.model.squared_errors(outputs).sum())
        noise, free = float(likelihood.noise_precision), fit.model.num_observations - float(gamma.sum())
        yield _Balance("the noise precision", noise, free, noise * squares, float(error.norm()), _OF_NOISE)
