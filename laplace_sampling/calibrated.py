"""What data say of predictions: the scale of a posterior, and scores for conformal prediction.

`OnTrainingData` is what the training data say: whether error bars are too wide to be of use.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.labels import Labels
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.held_out import HeldOut, check_finite
from laplace_sampling.linear_model.linear_model import TangentModel
from laplace_sampling.methods.method import Fit
from laplace_sampling.methods.verification import NEARLY_ALL
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import covariance_of, draws_are_cheap, predict
from laplace_sampling.predictions.calibration import (
    NOISE_WORTH,
    Calibration,
    calibrate,
    calibrate_regression,
    label_losses,
    labelled,
    labels_of,
    parts_of,
)
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.function_covariance import draws_of, white_noise
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, left_out_regression, regression_log_probs
from laplace_sampling.solvers.recorded import recorded

# Training data that are looked at for a score or a scale, at most, and numbers of their deviations in memory.
_ENOUGH, _NUMBERS = 4096, 2**24


@dataclass(frozen=True)
class OnTrainingData:
    """Says whether the error bars of a fit are of use, from what it predicts for its training data.

    `problems` returns sentences on error bars that are too wide to be of use, and on a regression of learnt noise that
    knows its training data by heart. The list is empty if neither is so, and for likelihoods other than Gaussians and
    those of labels. `calibration` changes no prediction: for a Gaussian likelihood it scores all training targets, each
    by its prediction from the other data, if this is known in closed form; else it has no scores.

    Attributes:
        fit: the fit whose error bars are checked; posterior samples are drawn if they are needed and there are none.
        some: the indices of the data that are looked at; they have targets.
        weights: `R^{-1/2}` of all training data, where `R` are noise variances that were given; else `None`.
    """

    # Training data that are enough to tell whether error bars are useless: a round number.
    FEW: ClassVar[int] = 256
    # Of what the network's log-likelihood of them gains over that without inputs, the part that must be left.
    _LEFT = 0.1
    # A network knows its data by heart if they determine more directions than this part of their number, and less than
    # the rest of that gain is left where each is predicted from the others. Of 44 small networks of noisy data (12 to
    # 300 data) these are eight of the nine whose intervals of 90 % contained less than 83 % of new data, and six of the
    # 35 others. With a half the ninth as well, and five more of the others; with nine tenths six of the nine, and four
    # others.
    _BY_HEART = 0.75
    # A network without any training has a mean squared error of one or two variances of standardised targets.
    _OTHER_UNITS = 4.0
    # Fewer targets of an output say little of their own variance: with ten it is known to a half.
    _ENOUGH_OF_UNITS = 10

    fit: Fit
    some: Tensor
    weights: Float[Tensor, "N C"] | None

    @classmethod
    def of(cls, fit: Fit, tangent: TangentModel, most: int) -> "OnTrainingData":
        """On some of the data, as many as memory holds; the first ones of data that are read in order."""
        some = some_of(tangent, fit.task.num_samples * fit.model.features.num_outputs, most)
        some = fit.model.with_targets(some)
        return cls(fit, some, tangent.weights)

    @cached_property
    def deviations(self) -> Float[Tensor, "K n C"]:
        """`φ(x_i) ζ_k`."""
        sampled = self.fit.sampled
        if sampled is None or not len(sampled.samples):
            sampled = self.fit.draw(self.fit.task.draws)
        return deviations_of(self.fit.model.features, sampled.samples, self.some)

    @cached_property
    def _left_out(self) -> LeaveOneOut | None:
        return self.fit.known_leave_one_out()

    @cached_property
    def _targets(self) -> Tensor:
        return self.fit.model.targets[self.some]

    @cached_property
    def _outputs(self) -> Float[Tensor, "n C"]:
        return self.fit.model.network_outputs[self.some].double()

    def calibration(self) -> Calibration:
        """No change of predictions, with the log-likelihood of targets left out where that costs next to nothing."""
        fit, likelihood = self.fit, self.fit.model.likelihood
        if isinstance(likelihood, Gaussian) and (left_out := self._left_out) is not None:
            y = fit.model.targets.reshape(left_out.mean.shape)
            noise = 1 / likelihood.precision(left_out.mean)
            unit = torch.ones_like(left_out.mean) if self.weights is None else 1 / self.weights.to(left_out.mean)
            return left_out_regression(left_out.scaled(unit, ~y.isnan()), y.to(unit) * unit, noise * unit**2)
        return Calibration()

    def problems(self, held_out: bool) -> list[str]:
        """Whether next to nothing is left of what the network knows of these data, if it knows anything.

        Nothing with its error bars; or, unless held-out data have a say, of data that are predicted from the others.
        """
        likelihood, y, f = self.fit.model.likelihood, self._targets, self._outputs
        if isinstance(likelihood, Gaussian):
            y, noise = y.reshape(f.shape).double(), 1 / likelihood.precision(f)
            # Exact variances of training data are at most those of their noise.
            spread = 0.0 * f if self._left_out is not None else self.deviations.double().square().mean(0)
            given, centre = ~y.isnan(), y.nanmean(0).nan_to_num()
            variance = (y - centre).square().nanmean(0).nan_to_num()

            def mean_log_prob(mean: Tensor, variance: Tensor) -> float:
                normal = Normal(mean, variance.clamp_min(1e-300).sqrt())
                return float(normal.log_prob(y.where(given, mean)).where(given, 0).sum(1).mean())

            ours, own = mean_log_prob(f, spread + noise), mean_log_prob(f, noise + 0 * f)
            constant = mean_log_prob(centre.expand_as(f), variance.expand_as(f))
            if not held_out and (said := self._other_units(y, f)) is not None:
                return [said]
        elif (labels := labelled(likelihood)) is not None:
            counts = likelihood.weights(y)[:, None] * labels.given(likelihood.unweighted_targets(y))
            if not bool((counts > 0).any()):
                return []

            def mean(scale: float) -> float:
                parts = (
                    label_losses(likelihood, y[n], f[n], self.deviations[:, n], scale)
                    for n in parts_of(self.deviations)
                )
                return -sum(float(part.sum()) for part in parts) / float(counts.sum())

            ours, own = mean(1.0), mean(0.0)
            constant = _without_inputs(labels, likelihood.unweighted_targets(y), counts)
        else:
            return []
        least = constant + self._LEFT * (own - constant)
        if own <= constant:
            return []
        if ours < least:
            return [
                f"With its error bars the posterior predicts the training data hardly better, with a mean "
                f"log-likelihood of {ours:.3g}, than one would without inputs ({constant:.3g}; the network alone has "
                f"{own:.3g}): they are too wide to be of use. Train the network to its end, try another `prior`, or "
                "pass `val_loader`."
            ]
        known = None if held_out else self._known_by_heart(constant, own)
        if known is None:
            return []
        return [
            f"The network knows its training data by heart, or they are too few: {known}. Their mean log-likelihood "
            f"is {own:.3g} by the network, and {constant:.3g} without inputs. Intervals may contain "
            "fewer targets than their level says. Train with weight decay, stop early, give more data, or pass "
            "`val_loader`, data that the network was not trained on, which choose the noise."
        ]

    def _other_units(self, y: Float[Tensor, "n C"], f: Float[Tensor, "n C"]) -> str | None:
        """A sentence if targets of a regression are not those that the network was trained on; else `None`."""
        unit = 1.0 if self.weights is None else self.weights[self.some].to(y)
        y, f = y / unit, f / unit
        centre, enough_of_them = y.nanmean(0), (~y.isnan()).sum(0) >= self._ENOUGH_OF_UNITS
        error, variance = (y - f).square().nanmean(0), (y - centre).square().nanmean(0)
        # Targets that are constant up to rounding have no unit.
        seen = enough_of_them & (variance > 1e-6 * centre.square()) & (variance > 0)
        ratio = (error / variance).where(seen, 0.0)
        if not float(ratio.max()) > self._OTHER_UNITS:
            return None
        worst = int(ratio.argmax())
        which = f" of output {worst}" if y.shape[1] > 1 else ""
        off, spread = math.sqrt(float(error[worst])), math.sqrt(float(variance[worst]))
        return (
            f"The network is off its training targets{which} by {off:.3g} (root mean square), where these have a "
            f"standard deviation of {spread:.3g}, which a network that was trained on them is not. If it was trained "
            "on standardised targets, give these, or put its outputs into the units of the targets."
        )

    def _known_by_heart(self, constant: float, own: float) -> str | None:
        """What says that the noise of a regression is not that of new data, in words.

        The data determine nearly as many directions as there are targets, and little of what the network's
        log-likelihood of them, `own`, gains over that without inputs, `constant`, is left where each is predicted from
        the others. Where these predictions are not known, the directions say so alone.
        """
        fit, likelihood = self.fit, self.fit.model.likelihood
        if not (isinstance(likelihood, Gaussian) and likelihood.learn):
            return None
        assert fit.sampled is not None
        gamma, numbers = float(fit.sampled.effective_dimension()[0].sum()), fit.model.num_observations
        known = f"they determine {gamma:.4g} directions of weight space, of {numbers:,} targets"
        if (left_out := self._left_out) is None:
            return known if gamma > NEARLY_ALL * numbers else None
        y = fit.model.targets.reshape(left_out.mean.shape).to(left_out.mean)
        noise = (1 / likelihood.precision(left_out.mean)).expand(left_out.mean.shape)
        found = float(regression_log_probs(left_out, y, noise, 1.0)[self.some].mean())
        if gamma <= self._BY_HEART * numbers or found >= constant + (1 - self._BY_HEART) * (own - constant):
            return None
        return f"{known}, and predicted from the others each has a log-likelihood of {found:.3g} on average"


def held_out_problems(
    held_out: HeldOut | None, tangent: TangentModel | None, likelihood: Likelihood, calibration: Calibration
) -> list[str]:
    """Whether held-out data are predicted no better than without inputs, by what training targets are on average.

    So they are where their noise in a regression is larger than the variance of the training targets; or where their
    log-likelihood is not above that by mean and variance, or frequencies, of these.

    Args:
        held_out: the data, if there are any.
        tangent: the linear model on the training data, if it is known.
        likelihood: fitted.
        calibration: by the held-out data.
    """
    found, num = calibration.log_likelihood, calibration.num_data
    if held_out is None or tangent is None or tangent.weights is not None or found is None:
        return []
    if num < NOISE_WORTH:  # so few say less than what the training data do
        return []
    model, y = tangent.model, held_out.targets
    trained = model.targets
    some = held_out.with_targets(torch.arange(len(y)))
    constant = float(_log_probs_without_inputs(model.likelihood, trained, held_out.likelihood, y)[some].mean())
    if isinstance(likelihood, Gaussian):
        deviations = flattened(trained).double() - flattened(trained).double().nanmean(0)
        variance, noise = float(deviations.square().nanmean()), calibration.noise / likelihood.noise_precisions()
        # Three standard errors of a mean of so many squares.
        if float(noise.mean()) > (1 + 3 * math.sqrt(2 / num)) * variance:
            said = (
                f"with a noise of standard deviation {math.sqrt(float(noise.mean())):.3g}, where training targets have "
            )
            return [_NO_BETTER.format(num, f"{said}one of {math.sqrt(variance):.3g}")]
    if not found / num < constant + 1 / num:  # a nat of all of them is nothing
        return []
    said = (
        f"with a mean log-likelihood of {found / num:.3g}, where the targets of the training data give {constant:.3g}"
    )
    return [_NO_BETTER.format(num, said)]


_NO_BETTER = (
    "{:,} data of `val_loader` are predicted no better than without inputs: {}. Check that they belong to the task "
    "that the network was trained for, in the same units, and are prepared like its training data. Else the network "
    "has learnt nothing that holds for new data, or they are so by chance: pass more."
)


def _log_probs_without_inputs(
    trained_by: Likelihood, trained: Tensor, likelihood: Likelihood, y: Tensor
) -> Float[Tensor, " n"]:
    """Log-likelihoods of targets by mean and variance of the training targets, or by the frequencies of these labels.

    Missing targets count nowhere. NaN where training targets are constant.
    """
    if (labels := labelled(likelihood)) is None:
        trained, y = flattened(trained).double(), flattened(y).double()
        mean, given = trained.nanmean(0).nan_to_num(), ~y.isnan()
        variance = (trained - mean).square().nanmean(0)
        normal = Normal(mean, torch.where(variance > 0, variance.sqrt(), math.nan), validate_args=False)
        return normal.log_prob(y.where(given, mean)).where(given, 0).sum(1)
    own, unweighted = labels_of(trained_by), trained_by.unweighted_targets(trained)
    counts = trained_by.weights(trained)[:, None] * own.given(unweighted)
    return _log_frequencies(own, unweighted, counts, labels, likelihood.unweighted_targets(y)).sum(1)


def _log_frequencies(
    trained_by: Labels, trained: Tensor, counts: Float[Tensor, "N S"], labels: Labels, y: Tensor
) -> Float[Tensor, "n S"]:
    """Logarithms of the frequencies that labels have among others, which count so much; zero where they are missing.

    Frequencies are those of classes at all positions together, or of ones at each output by itself.
    """
    given = labels.given(y)
    if not isinstance(labels, Categorical):
        totals = counts.sum(0).clamp_min(1e-300)
        ones = ((counts * trained.reshape(counts.shape).double().nan_to_num()).sum(0) / totals).clamp_max(1)
        frequencies = torch.stack([1 - ones, ones], -1)
        return torch.xlogy(labels.weights_of_classes(y), frequencies).sum(-1).where(given, 0)
    if trained_by.is_soft(trained):
        of_classes = (trained_by.weights_of_classes(trained).double() * counts[..., None]).sum((0, 1))
    else:
        there = counts > 0
        of_classes = trained.reshape(counts.shape)[there].long().bincount(counts[there].double())
    if labels.is_soft(y):
        weights = labels.weights_of_classes(y).double()
        of_classes = F.pad(of_classes, (0, max(0, weights.shape[-1] - len(of_classes))))
        return torch.xlogy(weights, of_classes / counts.sum()).sum(-1).where(given, 0)
    classes = y.reshape(given.shape).where(given, 0).long()
    of_classes = F.pad(of_classes, (0, max(0, int(classes.max()) + 1 - len(of_classes))))
    return (of_classes / counts.sum()).log()[classes].where(given, 0)


@recorded
def deviations_of(features: Features, samples: Float[Tensor, "K P"], some: Tensor) -> Float[Tensor, "K n C"]:
    """`φ(x_i) ζ_k` of some data."""
    samples = samples.to(features.dtype)
    return torch.cat([features.jvp(samples, some[rows]) for rows in features.chunks(torch.arange(len(some)))], 1)


def _without_inputs(labels: Labels, y: Tensor, counts: Float[Tensor, "n S"]) -> float:
    """Mean log-likelihood of labels by their own frequencies."""
    found = _log_frequencies(labels, y, counts, labels, y).where(counts > 0, 0)
    return float((counts * found).sum() / counts.sum())


def some_of(tangent: TangentModel, numbers: int, most: int | None = None) -> Tensor:
    """Indices of some training data, of so many numbers each; the first ones of data that are read in order."""
    num, total = enough(numbers, most), tangent.data.num_data
    step = 1 if tangent.in_order else math.ceil(total / num)
    return torch.arange(0, total, step)[:num]


def enough(numbers: int, most: int | None = None) -> int:
    """How many data, of so many numbers each."""
    return max(1, min(_ENOUGH if most is None else most, _NUMBERS // numbers))


def _are_probabilities(likelihood: Likelihood, outputs: Float[Tensor, "N C"]) -> bool:
    """Whether outputs that should be logits have been through a softmax."""
    if not isinstance(likelihood, Categorical) or len(likelihood.shape or (1,)) > 1 or len(outputs) < 2:
        return False
    return bool((outputs >= 0).all()) and bool(((outputs.sum(1) - 1).abs() < 1e-3).all())


def calibration_of(fit: Fit, tangent: TangentModel, held_out: bool) -> tuple[Calibration, list[str]]:
    """The calibration of a fit before held-out data change it, and what is wrong with the error bars.

    A criterion may have chosen it together with the prior precision.
    """
    together, likelihood = fit.found.calibration, fit.model.likelihood
    if _are_probabilities(likelihood, fit.model.network_outputs):
        return together or Calibration(), [
            "The outputs of the network are probabilities, of which those of each datum sum to one, but the likelihood "
            "takes logits: leave out the softmax at the end of the network."
        ]
    if together is not None:
        return together, []
    if not isinstance(likelihood, Gaussian) and labelled(likelihood) is None:
        return Calibration(), []
    trained = OnTrainingData.of(fit, tangent, OnTrainingData.FEW)
    return Calibration() if held_out else trained.calibration(), trained.problems(held_out)


def calibrated(
    held_out: HeldOut,
    network: Linearisation,
    posterior: Posterior,
    fit: Fit | None,
    num_samples: int,
    seed: int,
    samples: Callable[[], Float[Tensor, "K P"]],
) -> Posterior:
    """The posterior with the scale, and the temperature or noise, under which some of these data are likeliest.

    Its arguments are those of `predict`.

    Raises:
        ValueError: if what is predicted is not finite.
    """
    posterior = replace(posterior, calibration=Calibration(), conformal=None)
    num, total = enough(num_samples * held_out.layout.size), held_out.data.num_data
    some = torch.arange(0, total, 1 if held_out.data.in_order else math.ceil(total / num))[:num]
    model = held_out.model(network, held_out.with_targets(some))
    likelihood, y, f = model.likelihood, model.targets, model.network_outputs
    function, regression = covariance_of(posterior, fit, model.features), isinstance(posterior.likelihood, Gaussian)
    if function is not None and (regression or draws_are_cheap(network, f.shape[1], num_samples)):
        blocks = function.blocks()
        deviations = draws_of(blocks, white_noise(num_samples, f.shape[1], seed)).to(f)
    else:
        deviations = deviations_of(model.features, samples(), torch.arange(len(f)))
        blocks = torch.einsum("knc,knd->ncd", deviations, deviations) / len(deviations)
    check_finite(deviations)
    if not isinstance(posterior.likelihood, Gaussian):
        return replace(posterior, calibration=calibrate(likelihood, y, f, deviations))
    noise = (1 / posterior.likelihood.precision(f.double())).expand(f.shape)
    return replace(posterior, calibration=calibrate_regression(y.reshape(f.shape), f, blocks, noise))


def split_conformal(
    held_out: HeldOut,
    network: Linearisation,
    posterior: Posterior,
    fit: Fit | None,
    num_samples: int,
    seed: int,
    samples: Callable[[], Float[Tensor, "K P"]],
    penalty: float | None = None,
) -> SplitConformal:
    """Scores of these data; its arguments are those of `predict`, and the penalty of adaptive sets.

    Raises:
        ValueError: where outputs have several shapes; if what is predicted is not finite.
    """
    if held_out.data.ragged:
        raise ValueError(
            "`calibrate_conformal(val_loader)` needs outputs of one shape, but those of these data are of several."
        )
    scores, options = [], {"num_samples": num_samples, "seed": seed, "samples": samples}
    for batch in torch.arange(held_out.data.num_data).split(posterior.rows):
        prediction = predict(network, posterior, fit, held_out.data.inputs(batch), **options)
        check_finite(prediction.outputs, prediction.variance)
        scores.append(prediction.scores_of(held_out.targets[batch], penalty).cpu())
    return SplitConformal.of(torch.cat(scores), num_samples, penalty)


def calibrated_by(
    held_out: HeldOut | None, fit: Fit, tangent: TangentModel, network: Linearisation, unequal_noise: bool
) -> tuple[Posterior, list[str]]:
    """The posterior of a fit, calibrated by held-out data if there are any, and what is wrong with its error bars."""
    calibration, problems = calibration_of(fit, tangent, held_out is not None)
    posterior = Posterior.of(fit, tangent, network, calibration, unequal_noise)
    if held_out is not None and fit.found.calibration is None:
        num_samples, seed = fit.task.num_samples, fit.task.seed
        known = posterior.samples if len(posterior.samples) else None
        samples = lambda: posterior.drawn(fit.with_samples()).samples if known is None else known  # noqa: E731
        posterior = calibrated(held_out, network, posterior, fit, num_samples, seed, samples)
    others = held_out_problems(held_out, tangent, posterior.likelihood, posterior.calibration)
    return posterior, [*problems, *others, *posterior.calibration.problems]
