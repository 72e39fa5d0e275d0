r"""How wide the posterior should be: a factor `τ` of its covariance, from held-out data or without any.

A network may be overconfident or not, whatever its evidence says: at the prior precision of largest evidence the error
bars of a network that was stopped early make predictions worse. So probabilities are looked at before they are given.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.solvers.checks import check_positive

__all__ = [
    "LOG_SCALE",
    "NOISE_WORTH",
    "Calibration",
    "CalibrationWarning",
    "Labelled",
    "believed_variance",
    "held_out_classification",
    "held_out_regression",
    "held_out_scale",
    "label_losses",
    "labelled",
    "labels_of",
    "own_temperature",
    "parts_of",
    "plain",
    "tempered",
]

# Numbers of deviations that are worked on at once: a definition, 1 MiB.
_NUMBERS = 2**17
# "Eight digit networks" below and in `left_out.py` are an MLP of 16 units on 200 images, two seeds each: trained to
# convergence; stopped early; with 20 % noisy labels; with noisy labels that it has memorised. Numbers are test
# log-likelihoods in nats.
# Standard deviations of Gaussian priors of `log τ`, so of `log √τ` one, and of `log T`. Of error bars and a
# temperature that explain held-out data equally well, the error bars are believed: they tell data far from the
# training data. Chosen by corrupted and held-out images of 29 small networks (docs/decisions.md). With 80
# validation images half and twice the first changed the eight digit networks by at most 0.03, and one by a gain of
# 0.06 with half; without validation data by at most 0.01. Half of the second lost 0.05 and 0.1 where noise is
# memorised (T fell from 2.4 to 1.5), twice of it gained 0.05 and 0.01 there; both changed the others by at most
# 0.005.
LOG_SCALE, _LOG_TEMPERATURE = 2.0, 0.5
# Held-out targets that are worth what the training data say of the noise. The logarithm of the mean square error of
# test data, relative to the variance of predictions by the evidence, had a root mean square of 0.45 for 20 MLPs of
# 12 units on 50 and 150 data, stopped early up to memorised: a χ² distribution of 2/0.45² = 10 degrees of freedom.
NOISE_WORTH = 10.0
# The mean of an exponential prior of `−log T`, for the network's own temperature `T` where it is below one. Without a
# prior 40 validation images without an error took it towards zero; a normal one, whose slope grows with the distance,
# still holds it back with 1,000. Chosen on networks of the first half (docs/decisions.md).
_LOG_SHARPER = 0.1
# How far the logarithm of a temperature is looked for around that of a similar precision.
_NEAR = 0.3
# Bounds of the logarithms of scale and noise, and of temperatures, that held-out data choose.
_LOG_SCALES, _LOG_NOISES, _LOG_TEMPERATURES = (-9.0, 5.0), (-9.0, 9.0), (-5.0, 5.0)
# By how many nats, over all data, and by how many standard errors the network alone must be better for a warning: a
# smaller difference changes nothing, or is chance.
_NATS, _ERRORS = 1.0, 2.0
_NAMES = {"scale": "scale_", "temperature": "temperature_", "noise": "calibration_.noise"}


class CalibrationWarning(UserWarning):
    """Error bars make predictions worse than the network's alone, end at a bound, or contain too few targets.

    So they may where a network knows its training data by heart; or held-out data are predicted as badly as without
    inputs.
    """


@dataclass(frozen=True)
class Calibration:
    """Factors that change predictions, and what data say about them.

    Log-likelihoods are sums over the data that were looked at, times their weights, in nats. Of training data each one
    is left out in turn, and at most 4,096 are looked at.

    Attributes:
        scale: multiplies the covariance.
        temperature: outputs are divided by it.
        noise: multiplies the noise variance of a regression.
        log_likelihood: of these data with error bars, at these factors; `None` if no data were looked at.
        network_log_likelihood: likewise of the network alone, without error bars, temperature and factor of the noise.
        standard_error: of the difference of the two, over the data; `None` for training data of a regression, whose
            difference is no estimate of that of new data.
        num_data: how many data were looked at.
        data: `"left out"`, training data; `"held out"`, those of `val_loader`; or `""`.
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

    @classmethod
    def of_scale(cls, scale: float | str) -> "Calibration":
        """A scale that the user gives."""
        check_positive("`scale`", scale, also=' (or "auto" in `fit_hyperparameters`)')
        return cls(scale=float(scale))

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
        """What users should know of the error bars, in words."""
        problems = [
            f"`{_NAMES[name]}` ended at {getattr(self, name):.3g}, a bound of its search; a better one may lie beyond "
            "it. Try another `prior`, or give `scale=` a number."
            for name in self.at_bounds
        ]
        if self.log_likelihood is None or self.network_log_likelihood is None or self.standard_error is None:
            return problems
        if self.network_log_likelihood - self.log_likelihood > max(_NATS, _ERRORS * self.standard_error):
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


Labelled = Bernoulli | Categorical


def labelled(likelihood: Likelihood) -> Labelled | None:
    """The likelihood of labels, one or several a datum, whatever the weights of data; None for any other."""
    return likelihood.unweighted if isinstance(likelihood.unweighted, Labelled) else None


def labels_of(likelihood: Likelihood) -> Labelled:
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
    return data.split(max(1, _NUMBERS // max(1, deviations[:, :1].numel())))


def held_out_classification(
    likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"], deviations: Float[Tensor, "K N C"]
) -> Calibration:
    r"""Scale and temperature under which held-out data are likeliest, `p = (1/2K) Σ_k Σ_± σ((f ± √τ φζ_k)/T)`.

    `log τ` and `log T` have normal priors of standard deviations 2 and ½, which matter where data are few. `T` is at
    least one, or where the network is not sure enough its `own_temperature`. Below, it would take back what the error
    bars widen: no loss among data like the held-out ones, but others would be predicted more surely than by it.

    Args:
        likelihood: categorical or Bernoulli.
        targets: of the held-out data.
        outputs: of the network.
        deviations: `φ(x) ζ_k`.
    """
    outputs, parts = outputs.double(), parts_of(deviations)

    def losses(deviations: Tensor, log_scale: Tensor, log_temperature: Tensor) -> Iterator[Float[Tensor, " n"]]:
        for n in parts:  # a graph for each, which is freed
            scale, T = log_scale.exp(), log_temperature.exp()
            yield label_losses(likelihood, targets[n], outputs[n] / T, deviations[:, n] / T, scale).sum(1)

    # The temperature of the network alone is the lower bound: below it, `T` only takes back what the scale widens.
    no_deviations, log_one = torch.zeros_like(deviations[:1]), torch.zeros((), dtype=torch.float64)
    network_temperature = own_temperature(likelihood, targets, outputs)
    scale, temperature = _likeliest(
        lambda logs: losses(deviations, logs[0], logs[1]),
        len(outputs),
        [_LOG_SCALES, (math.log(network_temperature), _LOG_TEMPERATURES[1])],
        lambda logs: 0.5 * ((logs[0] / LOG_SCALE) ** 2 + (logs[1] / _LOG_TEMPERATURE) ** 2),
    )
    at_bounds = _at_bounds(scale=(scale, _LOG_SCALES), temperature=(temperature, _LOG_TEMPERATURES))
    found = Calibration(scale=scale, temperature=temperature, at_bounds=at_bounds)
    logs = torch.tensor([scale, temperature], dtype=torch.float64).log()
    with_error_bars = -torch.cat(list(losses(deviations, logs[0], logs[1])))
    return found.scored("held out", with_error_bars, -torch.cat(list(losses(no_deviations, log_one, log_one))))


def held_out_scale(
    likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"], deviations: Float[Tensor, "K N C"]
) -> Calibration:
    """As `held_out_classification` the scale alone: other likelihoods have no temperature."""
    outputs, parts = outputs.double(), parts_of(deviations)

    def losses(scale: Tensor) -> Iterator[Float[Tensor, " n"]]:
        for n in parts:
            yield mean_losses(likelihood, targets[n], outputs[n], deviations[:, n], scale)

    (scale,) = _likeliest(
        lambda logs: losses(logs[0].exp()), len(outputs), [_LOG_SCALES], lambda logs: 0.5 * (logs[0] / LOG_SCALE) ** 2
    )
    found = Calibration(scale=scale, at_bounds=_at_bounds(scale=(scale, _LOG_SCALES)))
    with_error_bars, alone = (
        -torch.cat(list(losses(torch.tensor(value, dtype=torch.float64)))) for value in (scale, 0.0)
    )
    return found.scored("held out", with_error_bars, alone)


def plain(
    likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"], deviations: Float[Tensor, "K N C"]
) -> Calibration:
    """What held-out data say of error bars as they are, with any likelihood."""
    outputs, parts = outputs.double(), parts_of(deviations)
    with_error_bars, alone = (
        -torch.cat([mean_losses(likelihood, targets[n], outputs[n], deviations[:, n], scale) for n in parts])
        for scale in (1.0, 0.0)
    )
    return Calibration().scored("held out", with_error_bars, alone)


def mean_losses(
    likelihood: Likelihood, targets: Tensor, outputs: Tensor, deviations: Tensor, scale: Tensor | float
) -> Float[Tensor, " N"]:
    """Negative log-likelihood of each datum under the mean of its likelihoods at samples `f ± √scale φζ`."""
    scaled = torch.as_tensor(scale, dtype=torch.float64, device=outputs.device).sqrt() * deviations.double()
    logs = -likelihood.loss(torch.cat([outputs + scaled, outputs - scaled]), targets)
    return math.log(len(logs)) - logs.logsumexp(0)


def own_temperature(likelihood: Likelihood, targets: Tensor, outputs: Float[Tensor, "N C"]) -> float:
    """The likeliest temperature of the network without error bars, at most one: below it one takes error bars back.

    `−log T` has an exponential prior of mean 0.1.
    """
    nothing, bounds = torch.zeros_like(outputs)[None], (_LOG_TEMPERATURES[0], 0.0)
    return _likeliest_temperature(
        likelihood, targets, outputs, nothing, bounds, lambda log_T: -log_T / _LOG_SHARPER, 1e-3
    )


def tempered(
    likelihood: Likelihood,
    targets: Tensor,
    outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
    lowest: float,
    near: float | None = None,
) -> Calibration:
    """As `held_out_classification` with a scale of one: the likeliest temperature above a lowest, to one per cent.

    It is looked for near another one first, if that is given.
    """
    bounds, temperature = (math.log(lowest), _LOG_TEMPERATURES[1]), None

    def likeliest(low: float, high: float) -> float:
        return _likeliest_temperature(
            likelihood, targets, outputs, deviations, (low, high), lambda log_T: 0.5 * (log_T / _LOG_TEMPERATURE) ** 2
        )

    if near is not None:
        low, high = (min(max(math.log(near) + step, bounds[0]), bounds[1]) for step in (-_NEAR, _NEAR))
        found = likeliest(low, high)
        inside = all(abs(math.log(found) - end) > 0.01 or end in bounds for end in (low, high))
        temperature = found if inside else None
    if temperature is None:
        temperature = likeliest(*bounds)
    found = Calibration(temperature=temperature, at_bounds=_at_bounds(temperature=(temperature, _LOG_TEMPERATURES)))
    with_error_bars = _tempered_log_probs(likelihood, targets, outputs, deviations, temperature)
    alone = _tempered_log_probs(likelihood, targets, outputs, torch.zeros_like(deviations[:1]), 1.0)
    return found.scored("held out", with_error_bars, alone)


def _likeliest_temperature(
    likelihood: Likelihood,
    targets: Tensor,
    outputs: Tensor,
    deviations: Tensor,
    bounds: tuple[float, float],
    prior: Callable[[float], float],
    tolerance: float = 0.01,
) -> float:
    """At the least sum of losses and of the prior's, a function of `log T`, which is found to a tolerance."""
    from scipy.optimize import minimize_scalar  # slow to import

    def negative(log_temperature: float) -> float:
        log_probs = _tempered_log_probs(likelihood, targets, outputs, deviations, math.exp(log_temperature))
        return prior(log_temperature) - float(log_probs.sum())

    found = minimize_scalar(negative, bounds=bounds, method="bounded", options={"xatol": tolerance})
    # A bounded search never tries its ends.
    return math.exp(min((*bounds, float(found.x)), key=negative))  # pyright: ignore[reportAttributeAccessIssue]


def _tempered_log_probs(
    likelihood: Likelihood, targets: Tensor, outputs: Tensor, deviations: Tensor, T: float
) -> Float[Tensor, " N"]:
    f = outputs.double() / T
    parts = parts_of(deviations)
    return -torch.cat([label_losses(likelihood, targets[n], f[n], deviations[:, n] / T, 1.0) for n in parts]).sum(1)


def held_out_regression(
    targets: Float[Tensor, "N C"],
    outputs: Float[Tensor, "N C"],
    covariance: Float[Tensor, "N C C"],
    noise_variance: Float[Tensor, "N C"],
) -> Calibration:
    r"""The scale of the covariance, and a factor of the noise variance, under which held-out data are likeliest.

    The logarithm of the scale has a normal prior of standard deviation 2; that of the noise is of `believed_variance`.

    Args:
        targets: of the held-out data, NaN where they are missing.
        outputs: of the network.
        covariance: of the function, of each datum.
        noise_variance: of each output.
    """
    error, S, noise = (v.double() for v in (targets - outputs, covariance, noise_variance))

    def log_probs(scale: Tensor | float, factor: Tensor | float) -> Float[Tensor, " N"]:
        total = scale * S + torch.diag_embed(factor * noise)
        return log_density(error, total)

    def losses(logs: Tensor) -> Iterator[Float[Tensor, " N"]]:
        yield -log_probs(logs[0].exp(), logs[1].exp())

    def prior(logs: Tensor) -> Tensor:
        return 0.5 * (logs[0] / LOG_SCALE) ** 2 + 0.5 * NOISE_WORTH * (logs[1] + (-logs[1]).exp())

    scale, factor = _likeliest(losses, len(error), [_LOG_SCALES, _LOG_NOISES], prior)
    at_bounds = _at_bounds(scale=(scale, _LOG_SCALES), noise=(factor, _LOG_NOISES))
    found = Calibration(scale=scale, noise=factor, at_bounds=at_bounds)
    return found.scored("held out", log_probs(scale, factor), log_probs(0.0, 1.0))


def believed_variance(training: float, squares: float, num: int) -> float:
    r"""The likeliest noise variance `s²` by held-out errors, and by what training data say.

    `s² = (ν s₀² + Σe²)/(ν + n)`, of the scaled inverse χ² prior of mode `s₀²` of `log s²` and `ν` degrees of freedom.

    Args:
        training: `s₀²`.
        squares: `Σe²`, whitened.
        num: `n`, how many.
    """
    return (NOISE_WORTH * training + squares) / (NOISE_WORTH + num)


def _at_bounds(**found: tuple[float, tuple[float, float]]) -> tuple[str, ...]:
    """Names of the factors whose logarithms are at a bound."""
    return tuple(
        name for name, (factor, ends) in found.items() if min(abs(math.log(factor) - end) for end in ends) < 0.01
    )


def _likeliest(
    losses: Callable[[Tensor], Iterator[Tensor]],
    num_data: int,
    bounds: list[tuple[float, float]],
    prior: Callable[[Tensor], Tensor],
) -> tuple[float, ...]:
    """Exponentials of the likeliest logarithms, from three starts: all factors one; a small first; large others."""
    from scipy.optimize import minimize  # slow to import

    def value_and_gradient(logs: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, point = 0.0, np.zeros_like(logs), torch.from_numpy(logs).requires_grad_()
        with torch.enable_grad():
            # A part at a time, so that memory holds the graph.
            for loss in chain([prior(point)], (part.sum() for part in losses(point))):
                value += float(loss.detach())
                gradient += torch.autograd.grad(loss, point)[0].numpy()
        # Per datum, since the tolerances of L-BFGS are absolute in the gradient.
        return value / num_data, gradient / num_data

    # The objective may have several minima: a small scale and a high temperature explain the same labels.
    zeros = [0.0] * (len(bounds) - 1)
    starts = ([0.0, *zeros], [max(-4.0, bounds[0][0]), *zeros], [0.0, *(2.0 for _ in zeros)])
    results = [minimize(value_and_gradient, start, jac=True, bounds=bounds, method="L-BFGS-B") for start in starts]
    return tuple(float(v) for v in np.exp(min(results, key=lambda result: result.fun).x))
