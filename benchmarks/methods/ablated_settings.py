"""Ablations of the posterior: its prior, its linear model, the outputs of its curvature, and the norm that tunes `α`.

All fits are exact and their covariance is not scaled. Test log-likelihoods are those of the exact Gaussian of the
function.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison.fidelity import log_probs
from benchmarks.comparison.report import table
from benchmarks.methods.tangents import Spectrum, Trained, root, trained
from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.solvers.solver import ConvergenceWarning

__all__ = ["ABLATIONS", "Outcome", "alone", "fit", "precision_of_weights", "spread"]

SEEDS = (0, 1, 2)
CLASSES = ("wine, MLP", "digits, tiny LeNet", "digits, tiny LeNet with batch norm")
NUMBERS = ("diabetes, tanh MLP", "gap, tanh MLP")
MOST_STEPS = 20  # of EM, where a fit takes it


@dataclass(frozen=True)
class Outcome:
    """`α` by group, mean test log-likelihood, log evidence per datum, whether EM converged; NaN without a fit."""

    precision: tuple[float, ...]
    log_likelihood: float
    evidence: float
    converged: bool


def log_likelihood(problem: Trained, la: LinearisedLaplace) -> float:
    """Mean log-likelihood of the exact Gaussian of the function; for classes by many draws."""
    test, prediction = problem.data.test, _predicted(problem, la)
    if problem.likelihood == "regression":
        return regressed(prediction.mean, prediction.variance + prediction.noise_variance, test.y)
    return classified(log_probs(prediction.logits.double(), prediction.covariance()), test.y)


def _predicted(problem: Trained, la: LinearisedLaplace) -> Any:
    return la.predict(problem.data.test.x)


def regressed(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    return float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean())


def classified(log_probs: Tensor, y: Tensor) -> float:
    return float(log_probs.gather(-1, y.long()[:, None]).mean())


def alone(problem: Trained) -> float:
    """Mean test log-likelihood of the network itself, for a regression with the noise of its training residuals."""
    train, test = problem.data.train, problem.data.test
    with torch.no_grad():
        f, f_test = problem.network(train.x), problem.network(test.x)
    if problem.likelihood == "regression":
        return regressed(f_test, (f - train.y).square().mean().expand_as(f_test), test.y)
    return classified(f_test.double().log_softmax(-1), test.y)


@cache
def fit(name: str, seed: int, prior: str | None = None, linear_model: str | None = None) -> Outcome:
    """A fit with `α` by evidence, and the library's defaults for settings that are not given."""
    problem = trained(name, seed)
    given = {"prior": prior, "linear_model": linear_model}
    la = problem.laplace(**{k: v for k, v in given.items() if v is not None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is in the outcome
        try:
            la.fit_hyperparameters(problem.data.train.loader(200), max_steps=MOST_STEPS, scale=1.0, progress=False)
        except ValueError:  # the mode has run away
            return Outcome((math.nan,), math.nan, math.nan, False)
        evidence = float(la.log_marginal_likelihood()) / len(problem.data.train.y)
    precision = tuple(float(v) for v in la.prior_precision_)
    return Outcome(precision, log_likelihood(problem, la), evidence, la.converged_)


# Tables --------------------------------------------------------------------------------------------------------------


def compared(cases: Sequence[str], setting: str, choices: Sequence[str], **fixed: str) -> Iterator[str]:
    """Table: one row for each case and choice of a setting; means ± standard deviations over seeds."""
    rows = []
    for name in cases:
        plain = [alone(trained(name, seed)) for seed in SEEDS]
        rows.append([name, "the network alone", "", "", spread(plain), ""])
        by_choice = {choice: [fit(name, seed, **{setting: choice}, **fixed) for seed in SEEDS] for choice in choices}
        for choice, outcomes in by_choice.items():
            gains = [o.log_likelihood - p for o, p in zip(outcomes, plain, strict=True)]
            failed = sum(not o.converged for o in outcomes)
            note = f" ({failed} of {len(SEEDS)} not converged)" if failed else ""
            rows.append([
                "", choice + note, ", ".join(precisions(o) for o in outcomes), spread([o.evidence for o in outcomes]),
                spread([o.log_likelihood for o in outcomes]), spread(gains, "{:+.3f}"),
            ])  # fmt: skip
    yield table(["problem", setting.replace("_", " "), "`α`", "evidence", "test log-likelihood", "gain"], rows)


def precisions(outcome: Outcome) -> str:
    low, high = min(outcome.precision), max(outcome.precision)
    return f"{low:.3g}" if low == high else f"{low:.1g} … {high:.1g}"


def _stdev(values: Sequence[float]) -> float:
    """The standard deviation, or NaN where a run ended at infinity."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """Mean ± standard deviation over seeds."""
    return f"{form.format(statistics.mean(values))} ± {form.replace('+', '').format(_stdev(values))}"


def priors() -> Iterator[str]:
    yield from compared((*CLASSES, *NUMBERS), "prior", ("g-prior", "isotropic", "layerwise"))


def linear_models() -> Iterator[str]:
    yield from compared((*CLASSES, *NUMBERS), "linear_model", ("affine", "homogeneous"))


# Whose norm ----------------------------------------------------------------------------------------------------------


def precision_of_weights(problem: Trained) -> float:
    """The solution of `α = γ(α)/‖w̄‖²`, `B` at the network: the evidence expanded at the trained weights."""
    model = problem.default
    s, norm = Spectrum.of(model, problem.prior(model)), float(problem.weights.square().sum())
    return math.exp(root(lambda u: u + math.log(norm) - math.log(s.gamma(math.exp(u))), -25, 25))


def norms() -> Iterator[str]:
    """Table: the evidence at the weights of the network and at the mode of the linear model."""
    rows = []
    for name in (*CLASSES, *NUMBERS):
        problems = [trained(name, seed) for seed in SEEDS]
        plain = [alone(p) for p in problems]
        weights = []
        for p in problems:
            alpha = precision_of_weights(p)
            la = p.laplace(
                likelihood=Gaussian(p.noise_precision) if p.likelihood == "regression" else p.likelihood,
                prior=IsotropicPrior(precision=alpha),
            ).fit(p.data.train.loader(200), progress=False)
            weights.append(Outcome((alpha,), log_likelihood(p, la), math.nan, True))
        modes = {
            f"`θ̄`, {kind}": [fit(name, s, "isotropic", "network", kind) for s in SEEDS]
            for kind in ("affine", "homogeneous")
        }
        rows.append([name, "the network alone", "", spread(plain), ""])
        for norm, outcomes in {"`w̄`": weights, **modes}.items():
            gains = [o.log_likelihood - p for o, p in zip(outcomes, plain, strict=True)]
            precision = ", ".join(precisions(o) for o in outcomes)
            rows.append(["", norm, precision, spread([o.log_likelihood for o in outcomes]), spread(gains, "{:+.3f}")])
    yield table(["problem", "evidence at", "`α`", "test log-likelihood", "gain"], rows)


ABLATIONS: dict[str, Callable[[], Iterator[str]]] = {
    "priors": priors,
    "norms": norms,
    "linear-models": linear_models,
    "curvatures": curvatures,
}
