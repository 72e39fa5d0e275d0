"""Whether hyperparameters that EM ended with are a fixed point of its updates for other samples, too."""

import math
from dataclasses import replace

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.methods.fit import Fit

__all__ = ["verified"]

# EM stops where a step is within its tolerance, some steps of which may be left; and a fixed point of 16 samples is as
# far from that of others as their standard errors say. Both are definitions of what is believed.
_TOLERANCES, _STANDARD_ERRORS = 3.0, 4.0


def verified(fit: Fit, tolerance: float) -> Fit:
    r"""The fit, which has not converged where the samples that it keeps contradict its hyperparameters.

    At a maximum of the evidence `γ = α‖θ̄‖²` and `N·C − γ = b Σ(y − h(θ̄))²`. Here `γ` is that of the samples that are
    kept, which EM has not seen.

    Args:
        fit: with samples, at hyperparameters that EM found.
        tolerance: of `log α` and `log b`.
    """
    assert fit.sampled is not None
    values, errors = (part.cpu() for part in fit.sampled.effective_dimension())
    gamma, error = float(values.sum()), float(errors.square().sum().sqrt().nan_to_num(math.inf))
    norms = fit.prior.grouped((fit.mode.double() / fit.prior.scale.double())[None] ** 2)[0].cpu()
    updates = [("prior precision", gamma, float((fit.prior.precision * norms).sum()))]
    likelihood = fit.model.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.learn and likelihood.noise_precisions().dim() == 0:
        outputs = fit.mode_outputs if likelihood.noise_at == "mode" else fit.model.network_outputs
        squares = (outputs - fit.model.targets.reshape(outputs.shape)).double().square().sum()
        updates.append(("noise precision", outputs.numel() - gamma, float(likelihood.noise_precision) * float(squares)))
    wrong = [name for name, wanted, found in updates if not _agree(wanted, found, error, tolerance)]
    if not wrong:
        return fit
    problem = (
        f"`fit_hyperparameters` ended at a {' and a '.join(wrong)} that the samples of the posterior contradict: their "
        f"effective dimension is {gamma:.3g} ± {error:.2g}. Raise `num_samples` and `max_steps` of "
        '`fit_hyperparameters`, or use method="exact".'
    )
    tuned = replace(fit.tuned, converged=False, problems=[*fit.tuned.problems, problem])
    return replace(fit, tuned=tuned)


def _agree(wanted: float, found: float, error: float, tolerance: float) -> bool:
    """Whether two sides of an update are equal, the first of them up to its standard error."""
    return abs(wanted - found) <= _STANDARD_ERRORS * error + _TOLERANCES * tolerance * max(abs(found), abs(wanted))
