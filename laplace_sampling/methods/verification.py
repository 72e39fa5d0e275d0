r"""Whether a fit is right: its diagnosis, and whether its mode and samples agree with its hyperparameters.

At a maximum of the evidence `γ_g = α_g ‖θ̄_g‖²` and `N·C − γ = b Σ(y − f)²`. A search finds it on curves, or on
samples of earlier steps; the samples and the mode of the posterior itself are other estimates, by other solves. They
cost nothing more. An end that is an artefact of rounding, or of a search that went astray, does not agree with them.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.methods.method import Fit, balances
from laplace_sampling.predictions.diagnosis import FEW_SAMPLES, Check, Diagnosis, dimension_check, energy_checks

# The share of all directions that data may determine: above it the linear model fits any targets.
NEARLY_ALL = 0.9


def diagnosis_of(fit: Fit, weights: Float[Tensor, " P"], linear_model: str) -> Diagnosis:
    """The checks of a fit that has samples; `weights` are `w̄`, and `linear_model` is its name."""
    sampled, features = fit.sampled, fit.model.features
    assert sampled is not None
    minimum = fit.known_mode.minimum if fit.known_mode is not None else None
    by_group, errors = sampled.effective_dimension()
    gamma = float(by_group.sum()), float(errors.norm())
    num, reference, outputs = len(sampled.energies), _reference(fit), fit.model.network_outputs
    distance = features.outputs(weights[None].to(features.dtype))[0] - outputs
    checks = [
        *_of_solves(fit),
        *_of_hyperparameters(fit),
        Check(
            "number of samples",
            num,
            (FEW_SAMPLES, math.inf),
            f"An error bar of {num} samples has a relative standard error of {fit.accuracy.samples:.0%}, and these "
            "tests find gross errors only. Raise `num_samples`.",
        ),
        *energy_checks(sampled.energies, len(weights), gamma[0] if reference is None else min(gamma[0], reference[0])),
        *([] if reference is None else [dimension_check(gamma, reference)]),
        *balances(fit),
        _of_dimension(fit, gamma[0]),
        Check(
            "weights floored",
            fit.prior.num_floored,
            (0, 0.2 * len(weights)),
            "Many weights have no curvature, as dead units and inputs that are constant, so that the floor of the "
            'g-prior sets their variance. Compare with a larger `GPrior(floor=...)` or with `prior="isotropic"`.',
            serious=False,
        ),
        Check(
            "‖φw̄ − f‖ / ‖f‖",
            float(distance.double().norm() / outputs.double().norm()),
            # The affine model agrees with the network at its weights by definition.
            (0, 0.5 if linear_model == "homogeneous" else math.inf),
            "The homogeneous linear model is far from the network, so that α, and the curvature where it is taken at "
            "the mode, are those of another model. This is usual in networks without normalisation layers. Compare "
            '`log_prob` on held-out data with that of `linear_model="affine"`.',
            serious=False,
        ),
    ]
    return Diagnosis(
        checks,
        method=fit.method.name,
        reason=fit.task.reason,
        num_samples=num,
        num_parameters=len(weights),
        num_data=features.num_data,
        num_outputs=features.num_outputs,
        passes=sampled.passes + (minimum.passes if minimum else 0) + sum(s.passes for s in fit.found.history),
        epochs=fit.task.budget.spent,
        accuracy=fit.accuracy,
    )


def _reference(fit: Fit) -> tuple[float, float] | None:
    """`γ` by the eigenvalues of the curvature, and its standard error."""
    if fit.known_traces is None:
        return None
    gamma, error = fit.known_traces.effective_dimension(torch.tensor([fit.alpha], dtype=torch.float64))
    return float(gamma), float(error)


def _of_solves(fit: Fit) -> Iterator[Check]:
    assert fit.sampled is not None
    residuals, tolerance = fit.judge(fit.sampled)
    said = f"{int((~(residuals <= tolerance)).sum())} of {len(residuals)} residuals are above {tolerance:.2g}"
    matters = (
        'Error bars are too large where data determine little. Or use `method="exact"` where it fits.'
        if not fit.tolerable
        else f"Standard deviations are off by about {fit.accuracy.unfinished:.2g}, which matters little."
    )
    sentence = f"The samples have not converged: {said}. {fit.advice} {matters}"
    name = f"largest residual of the samples ({fit.method.residual_kind})"
    yield Check(name, float(residuals.max()), (-math.inf, tolerance), sentence, serious=not fit.tolerable)
    # A solver may stop at its limit of steps with residuals that happen to be small.
    converged = fit.sampled.converged or fit.tolerable
    yield Check.question("samples converged, says the solver", converged, sentence)
    if fit.known_mode is not None:
        sentence = f"The mode has not converged, but α, the noise, and maybe the curvature depend on it. {fit.advice}"
        minimum = fit.known_mode.minimum
        yield Check.question(f"mode converged (residual {minimum.residual:.2g})", minimum.converged, sentence)


def _of_hyperparameters(fit: Fit) -> Iterator[Check]:
    named = ", ".join(fit.found.at_bounds[:3]) + (", …" if len(fit.found.at_bounds) > 3 else "")
    yield Check(
        "precisions at a bound",
        len(fit.found.at_bounds),
        (0, 0),
        f"The precision is at a bound for {named}. At the upper one of a prior precision the data show no effect of "
        "these weights, at the lower one the prior fades out; at the upper one of the noise precision the linear model "
        "fits the targets exactly. Check the data and the choice of weights, use a prior with fewer groups, or give "
        "other `precision_bounds` or `noise_bounds`.",
    )
    if fit.found.converged is not None:
        yield Check.question(
            "hyperparameters converged",
            fit.found.converged or bool(fit.found.at_bounds),
            "The prior precision α, and all error bars with it, still moved when its fit stopped. Raise `max_steps` of "
            "`fit_hyperparameters`, and look at `history_`.",
        )


def _of_dimension(fit: Fit, gamma: float) -> Check:
    features, num_outputs = fit.model.features, fit.model.features.num_outputs
    # Near the rank of the data the model interpolates; near the number of weights it is a classical regression.
    rank = fit.model.num_observations * fit.model.likelihood.rank(num_outputs) // num_outputs
    most = NEARLY_ALL * rank if rank <= features.size else math.inf
    sentence = (
        "The data determine almost nothing, and the posterior is nearly the prior. Either α is far too large, or the "
        "loss has no curvature, as for a network that is certain of its labels. Pass `val_loader`, some 500 data that "
        "the network was not trained on, which choose another α."
        if gamma < 1
        else f"The data determine nearly all of the {rank:,} directions that they can, so that the linear model fits "
        "any targets, and neither the noise nor α is well determined. Give more data or fewer random weights "
        "(`parameters=`), or fix the noise (`Gaussian(b, learn=False)`)."
    )
    return Check("effective dimension γ", gamma, (1.0, most), sentence)
