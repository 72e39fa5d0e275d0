r"""How wide the posterior should be: a factor `τ` of its covariance, from held-out data or without any.

A network may be overconfident or not, whatever its evidence says: at the prior precision of largest evidence the error
bars of a network that was stopped early make predictions worse. So probabilities are looked at before they are given.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.likelihoods.labels import Labels
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

# Standard deviation of the normal prior of `log τ`, which matters where data are few (docs/design.md).
LOG_SCALE = 2.0
# Held-out targets that are worth what the training data say of the noise.
NOISE_WORTH = 10.0
# Bounds of the logarithms of the factors that held-out data choose.
_LOGS = {"scale": (-9.0, 5.0), "temperature": (-5.0, 5.0), "noise": (-9.0, 9.0)}
# Negative logarithms of their priors. Where error bars and a temperature explain held-out data equally well, the error
# bars are believed: they tell data far from the training data. That of the noise is of `believed_variance`.
_PRIORS: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda scale: 0.5 * (scale.log() / LOG_SCALE) ** 2,
    "temperature": lambda T: 0.5 * (T.log() / 0.5) ** 2,
    "noise": lambda noise: 0.5 * NOISE_WORTH * (noise.log() + 1 / noise),
}
_NAMES = {"scale": "scale_", "temperature": "temperature_", "noise": "calibration_.noise"}


Factors: TypeAlias = Mapping[str, Tensor] | Mapping[str, float]


class CalibrationWarning(UserWarning):
    """Error bars are too wide or too narrow, or validation data seem to belong to another task.

    The message says which: predictions with error bars are worse than those of the network alone; a factor ended at a
    bound; the network knows its training data by heart, so that intervals contain too few targets; or held-out data are
    predicted no better than without inputs.
    """


@dataclass(frozen=True)
class Calibration:
    """Factors that change predictions, and log-likelihoods of the data that they were chosen by.

    Log-likelihoods are sums over these data, times their weights, in nats. Each datum of the training data is predicted
    from the others.

    Attributes:
        scale: multiplies the covariance.
        temperature: divides the outputs.
        noise: multiplies the noise variance of a regression.
        log_likelihood: the log-likelihood with error bars and these factors; `None` without data.
        network_log_likelihood: the log-likelihood by the network alone, without error bars and factors.
        standard_error: the standard error of the difference of the two; `None` for training data of a regression, where
            the difference does not estimate that of new data.
        num_data: the number of data.
        data: `"left out"` for training data; `"held out"` for those of `val_loader`; or `""`.
        at_bounds: factors that ended at a bound of their search.
    """

    scale: float = 1.0
    temperature: float = 1.0
    noise: float = 1.0
    log_likelihood: float | None = None
    network_log_likelihood: float | None = None
    standard_error: float | None = None
    num_data: int = 0
    data: str = ""
    at_bounds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_bounds", tuple(self.at_bounds))  # a file has lists

    @property
    def factors(self) -> tuple[float, float, float]:
        """Scale, temperature and noise."""
        return self.scale, self.temperature, self.noise

    def scored(
        self, data: str, log_probs: Float[Tensor, " N"], network_log_probs: Float[Tensor, " N"]
    ) -> "Calibration":
        """With the log-likelihoods of each datum."""
        difference = network_log_probs - log_probs
        return replace(
            self,
            log_likelihood=float(log_probs.sum()),
            network_log_likelihood=float(network_log_probs.sum()),
            standard_error=math.sqrt(len(difference)) * float(difference.std(correction=0)),
            num_data=len(difference),
            data=data,
        )

    @property
    def problems(self) -> list[str]:
        """What users should know of the error bars, in words.

        Data must be less likely with them by more than a nat of all, and by more than two standard errors: a smaller
        difference changes nothing, or is chance.
        """
        problems = [
            f"`{_NAMES[name]}` ended at {getattr(self, name):.3g}, a bound of its search; a better one may lie beyond "
            "it. Try another `prior`."
            for name in self.at_bounds
        ]
        if self.log_likelihood is None or self.network_log_likelihood is None or self.standard_error is None:
            return problems
        if self.network_log_likelihood - self.log_likelihood > max(1.0, 2 * self.standard_error):
            which, advice = {
                "left out": (
                    "training data, each predicted from the others,",
                    "Pass `val_loader`, which chooses a scale.",
                ),
                "held out": ("data of `val_loader`", "Try another `prior`."),
            }[self.data]
            problems.append(
                f"Error bars make predictions worse: {self.num_data} {which} have a log-likelihood of "
                f"{self.log_likelihood:.5g} with them (at a scale of {self.scale:.3g}), and "
                f"{self.network_log_likelihood:.5g} by the network alone. {advice}"
            )
        return problems

    def likelihood(self, fitted: Likelihood) -> Likelihood:
        """The likelihood of predictions."""
        if self.noise == 1.0 or not isinstance(fitted, Gaussian):
            return fitted
        return fitted.with_precision(torch.as_tensor(fitted.noise_precision) / self.noise)


def labelled(likelihood: Likelihood) -> Labels | None:
    """The likelihood of labels, one or several a datum, whatever the weights of data; None for any other."""
    return likelihood.unweighted if isinstance(likelihood.unweighted, Labels) else None


def labels_of(likelihood: Likelihood) -> Labels:
    labels = labelled(likelihood)
    assert labels is not None
    return labels


def label_losses(
    likelihood: Likelihood, targets: Tensor, outputs: Tensor, deviations: Tensor, scale: Tensor | float
) -> Float[Tensor, "N S"]:
    """Negative log-likelihood of each label under the mean of its probabilities at samples `f ± φζ`, times weights.

    A soft label is the mean over its classes.
    """
    labels, y = labels_of(likelihood), likelihood.unweighted_targets(targets)
    scaled = torch.as_tensor(scale, dtype=torch.float64, device=outputs.device).sqrt() * deviations.double()
    losses = labels.mean_losses(torch.cat([outputs + scaled, outputs - scaled]), y)
    return likelihood.weights(targets)[:, None] * losses


def parts_of(deviations: Float[Tensor, "K N C"]) -> tuple[Tensor, ...]:
    """Split the indices of the data so that a part of the deviations fits in memory."""
    data = torch.arange(deviations.shape[1], device=deviations.device)
    return data.split(max(1, NUMBERS_TOGETHER // max(1, deviations[:, :1].numel())))


def calibrate(
    likelihood: Likelihood,
    targets: Tensor,
    outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K n C"],
    free: Collection[str] = ("scale", "temperature"),
    lowest: float | None = None,
) -> Calibration:
    r"""The scale and the temperature under which held-out data are likeliest.

    They maximise `Σ_i log (1/2K) Σ_k Σ_± p(y_i | (f_i ± √τ φ_i ζ_k)/T)` plus normal log priors of `log τ` and `log T`,
    with standard deviations 2 and ½. Only labels have a temperature. It is at least one, or `own_temperature` where the
    network is not sure enough: a lower one would undo the error bars. Held-out data would not notice, but other data
    would be predicted too surely.

    Where deviations of the first `n` of `N` data are known only, these data say what error bars change, and all data
    what the network alone is worth (a control variate): the sum is `Σ_{i≤N} l_i(T) + N/n Σ_{i≤n} (l_i(τ, T) − l_i(T))`.

    Args:
        likelihood: the likelihood of the targets.
        targets: `y`.
        outputs: `f`, the outputs of the network.
        deviations: `φ(x_i) ζ_k`, of all data or of the first ones.
        free: the factors to be found; the others are one.
        lowest: the smallest temperature; by default it is found.
    """
    outputs, parts, num = outputs.double(), parts_of(deviations), deviations.shape[1]
    weight, nothing = len(outputs) / num, torch.zeros_like(outputs)[None]

    def alone(n: Tensor | slice, T: Tensor | float) -> Float[Tensor, " n"]:
        return _losses(likelihood, targets[n], outputs[n] / T, nothing[:, n], 1.0)

    def losses(found: Factors) -> Iterator[Float[Tensor, " n"]]:
        scale, T = found.get("scale", 1.0), found.get("temperature", 1.0)
        for n in parts:  # a graph for each, which is freed
            with_error_bars = _losses(likelihood, targets[n], outputs[n] / T, deviations[:, n] / T, scale)
            yield with_error_bars if weight == 1 else weight * with_error_bars + (1 - weight) * alone(n, T)
        if weight > 1:
            yield alone(slice(num, None), T)

    bounds = {name: _LOGS[name] for name in free if name != "temperature" or labelled(likelihood) is not None}
    if "temperature" in bounds:
        lowest = own_temperature(likelihood, targets, outputs) if lowest is None else lowest
        bounds["temperature"] = (math.log(lowest), _LOGS["temperature"][1])
    return _calibrated(losses, len(outputs), bounds)


def own_temperature(likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"]) -> float:
    """The likeliest temperature of the network without error bars, at most one; a lower one undoes error bars.

    `−log T` has an exponential prior of mean 0.1. Without it a few data without an error would take `T` towards zero.
    """
    nothing = torch.zeros_like(outputs)[None]

    def losses(found: Factors) -> Iterator[Tensor]:
        for n in parts_of(nothing):
            yield _losses(likelihood, targets[n], outputs[n].double() / found["temperature"], nothing[:, n], 1.0)

    bounds = {"temperature": (_LOGS["temperature"][0], 0.0)}
    return _likeliest(losses, len(outputs), bounds, {"temperature": lambda T: -T.log() / 0.1})["temperature"]


def calibrate_regression(
    targets: Float[Tensor, "N C"],
    outputs: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C C"],
    noise_variance: Float[Tensor, "N C"],
) -> Calibration:
    r"""Finds the scale of the covariance, and a factor of the noise variance, under which held-out data are likeliest.

    The logarithm of the scale has a normal prior of standard deviation 2; that of the noise is of `believed_variance`.

    Args:
        targets: `y`, NaN where they are missing.
        outputs: of the network.
        covariance: of the function, for each datum.
        noise_variance: of each output.
    """
    error, S, noise = (v.double() for v in (targets - outputs, covariance, noise_variance))

    def losses(found: Factors) -> Iterator[Float[Tensor, " N"]]:
        yield -log_density(error, found["scale"] * S + torch.diag_embed(found.get("noise", 1.0) * noise))

    return _calibrated(losses, len(error), {name: _LOGS[name] for name in ("scale", "noise")})


def believed_variance(training: float, squares: float, num: int) -> float:
    r"""The likeliest noise variance `s²` by held-out errors, and by what training data say.

    `s² = (ν s₀² + Σe²)/(ν + n)`, of the scaled inverse χ² prior of mode `s₀²` of `log s²` and `ν` degrees of freedom.

    Args:
        training: `s₀²`.
        squares: `Σe²`, whitened.
        num: `n`, how many.
    """
    return (NOISE_WORTH * training + squares) / (NOISE_WORTH + num)


def _losses(
    likelihood: Likelihood, targets: Tensor, outputs: Tensor, deviations: Tensor, scale: Tensor | float
) -> Float[Tensor, " N"]:
    """Negative log-likelihood of each datum under the mean of its likelihoods at samples `f ± √scale φζ`.

    Labels of a datum are scored one by one, and others together.
    """
    if labelled(likelihood) is not None:
        return label_losses(likelihood, targets, outputs, deviations, scale).sum(1)
    scaled = torch.as_tensor(scale, dtype=torch.float64, device=outputs.device).sqrt() * deviations.double()
    logs = -likelihood.loss(torch.cat([outputs + scaled, outputs - scaled]), targets)
    return math.log(len(logs)) - logs.logsumexp(0)


def _calibrated(
    losses: Callable[[Factors], Iterator[Tensor]], num_data: int, bounds: Mapping[str, tuple[float, float]]
) -> Calibration:
    """The likeliest factors, and what the data say of them and of the network alone, at a scale of zero."""
    found = _likeliest(losses, num_data, bounds, _PRIORS)
    at_bounds = tuple(n for n, factor in found.items() if min(abs(math.log(factor) - end) for end in _LOGS[n]) < 0.01)
    with_error_bars, alone = (-torch.cat(list(losses(factors))) for factors in (found, {"scale": 0.0}))
    return replace(Calibration(at_bounds=at_bounds), **found).scored("held out", with_error_bars, alone)


def _likeliest(
    losses: Callable[[Factors], Iterator[Tensor]],
    num_data: int,
    bounds: Mapping[str, tuple[float, float]],
    priors: Mapping[str, Callable[[Tensor], Tensor]],
) -> dict[str, float]:
    """The likeliest factors with logarithms within bounds, by a bounded search of one, by L-BFGS of several."""
    from scipy.optimize import minimize, minimize_scalar  # slow to import

    def value(logs: Tensor) -> Iterator[Tensor]:
        # A part at a time, so that memory holds the graph.
        found = dict(zip(bounds, logs.exp(), strict=True))
        return chain((priors[name](factor) for name, factor in found.items()), (part.sum() for part in losses(found)))

    if len(bounds) == 1:
        (ends,) = bounds.values()

        def of_one(log: float) -> float:
            return sum(map(float, value(torch.tensor([log], dtype=torch.float64))))

        found: Any = minimize_scalar(of_one, bounds=ends, method="bounded", options={"xatol": 1e-3})
        # A bounded search never tries its ends.
        return dict.fromkeys(bounds, math.exp(min((*ends, float(found.x)), key=of_one)))

    def value_and_gradient(logs: np.ndarray) -> tuple[float, np.ndarray]:
        total, gradient, point = 0.0, np.zeros_like(logs), torch.from_numpy(logs).requires_grad_()
        with torch.enable_grad():
            for part in value(point):
                total += float(part.detach())
                gradient += torch.autograd.grad(part, point, retain_graph=True)[0].numpy()
        # Per datum, since the tolerances of L-BFGS are absolute in the gradient.
        return total / num_data, gradient / num_data

    if not bounds:
        return {}
    # There may be several minima: a small scale and a high temperature explain the same labels.
    starts = ([0.0, 0.0], [-4.0, 0.0], [0.0, 2.0])
    how = {"jac": True, "bounds": list(bounds.values()), "method": "L-BFGS-B"}
    results = [minimize(value_and_gradient, start, **how) for start in starts]
    return dict(zip(bounds, np.exp(min(results, key=lambda result: result.fun).x).tolist(), strict=True))
