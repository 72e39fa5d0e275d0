"""Predictions of regressions: noise of the same precision everywhere, or a variance that the network gives."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.predictions.conformal import rounding
from laplace_sampling.predictions.prediction import Prediction, SampledPrediction


class _Intervals(Prediction):
    """Intervals of targets that have a mean and a variance."""

    @property
    @abstractmethod
    def mean(self) -> Tensor: ...

    @property
    @abstractmethod
    def observation_variance(self) -> Tensor: ...

    @property
    @abstractmethod
    def noise_variance(self) -> Tensor: ...

    @property
    def epistemic(self) -> Float[Tensor, " N"]:
        """How little the data say of a datum: `√(Σ var f)`, summed over its outputs, in the units of the targets."""
        return self._total_stddev

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "N *D"], Float[Tensor, "N *D"]]:
        """Lower and upper ends of an interval that contains each observation with this probability.

        After `calibrate_conformal` that is guaranteed for data like those that it saw, on average over inputs and for
        each output by itself, and ends are infinite where these are too few for the level, fewer than `q/(1 − q)`.
        Else it is as true as the model is: `f ± z √(var f + σ²)` with the quantile `z` of a normal distribution.

        Raises:
            ValueError: for a level that is no probability; for predictions of fewer samples, or of another shape, than
                those that `calibrate_conformal` saw.
        """
        mean, variance = self.mean, self.observation_variance
        conformal = self._conformal_at("interval(level)", level, mean.shape[1:].numel())
        if conformal is None:
            half = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).to(variance) * variance.sqrt()
            return mean - half, mean + half
        half = conformal.largest(level).to(variance).reshape(mean.shape[1:]) * variance.sqrt()
        return mean - half, mean + half

    def scores_of(self, targets: Tensor) -> Float[Tensor, "N D"]:
        error = (targets.to(self.mean).reshape(self.mean.shape) - self.mean).abs()
        of_outputs, of_deviations = rounding(self.mean)
        scores = (error + of_outputs).double() / self.observation_variance.sqrt().double() * (1 + of_deviations)
        return flattened(scores)


@dataclass(frozen=True)
class RegressionPrediction(_Intervals):
    """Predictions of a regression; everything in the units of the targets.

    `noise_scale` is `R` of heteroscedastic noise at these inputs, in the shape of the outputs.
    """

    noise_scale: Tensor | None = field(default=None, kw_only=True)
    has_noise: bool = field(default=True, kw_only=True)

    @property
    def mean(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @property
    def noise_variance(self) -> Tensor:
        """`R/b`, the variance of the observation noise: a scalar, one an output, or one for each input and output."""
        assert isinstance(self.likelihood, Gaussian)
        if not self.has_noise:
            raise ValueError(
                "The noise is that of the measurements `y = T f(x) + noise`, not of the outputs: `predict(x, "
                "observed=True)` predicts measurements."
            )
        variance = 1 / self.likelihood.precision(self.outputs)
        variance = variance.reshape(self.outputs.shape[1:]) if variance.numel() > 1 else variance
        return variance if self.noise_scale is None else variance * self.noise_scale

    def distribution(self) -> LowRankMultivariateNormal | MultivariateNormal:
        """The distribution of new observations, with noise: for each input a Gaussian over its (flattened) outputs."""
        shape = self._flat.shape[1:]
        mean, noise = self.outputs.reshape(shape), self.noise_variance
        noise = noise.reshape(shape) if self.noise_scale is not None else noise.flatten().expand(shape)
        if self.function is not None:
            return MultivariateNormal(mean, self._blocks + torch.diag_embed(noise))
        factor = self._flat.permute(1, 2, 0) / math.sqrt(len(self.deviations))
        # Torch's checks of arguments fail for a batch of no data.
        return LowRankMultivariateNormal(mean, factor, noise, validate_args=None if len(mean) else False)

    @property
    def observation_variance(self) -> Float[Tensor, "N *C"]:
        """Variance of a new observation, `variance + noise_variance`."""
        return self.variance + self.noise_variance

    def log_prob(self, y: Tensor) -> Float[Tensor, " N"]:
        """Log density of each observation, noise included, joint over its outputs; `y` has the shape of `mean`.

        Targets of NaN are missing: the density is of the others, and its logarithm 0 for a datum without any. A mean
        over data is one over those that have a target: leave the others out of it.
        """
        targets = self._prepared(y, "log_prob(y)", some_given=False)[1].to(self.outputs)
        given = ~targets.isnan()
        if self._flat.shape[-1] == 1:
            # Of one output the variance is all there is: no matrix to factorise, which fails where it is infinite.
            variance = self.observation_variance
            squares = (targets.reshape(self.outputs.shape) - self.outputs) ** 2
            return -0.5 * (squares / variance + variance.log() + math.log(2 * math.pi)).where(given, 0).flatten()
        if not len(targets):  # which torch's densities of several outputs do not take
            return targets.new_zeros(0)
        error, distribution = flattened(targets - self.outputs), self.distribution()
        if bool(given.all()):
            return distribution.log_prob(flattened(targets))
        if isinstance(distribution, MultivariateNormal):
            return log_density(error, distribution.covariance_matrix)
        # As `log_density`, without matrices of all outputs.
        given = given.reshape(error.shape)
        factor, noise = distribution.cov_factor * given[..., None], distribution.cov_diag.where(given, 1)
        error = error.where(given, 0)
        joint = LowRankMultivariateNormal(torch.zeros_like(error), factor, noise).log_prob(error)
        return joint + 0.5 * math.log(2 * math.pi) * (~given).sum(1).to(joint)


@dataclass(frozen=True)
class HeteroscedasticPrediction(SampledPrediction, _Intervals):
    """Predictions of a regression whose network gives means and log variances, halves of axis 1 of its outputs.

    `samples`, `variance` and `stddev` are of the mean; `covariance()` and `joint_covariance()` of both, flattened.
    """

    @property
    def mean(self) -> Float[Tensor, "N *D"]:
        """The network's own means."""
        return self.outputs.chunk(2, 1)[0]

    @property
    def samples(self) -> Float[Tensor, "K N *D"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Draws of the mean."""
        return (self.outputs + self.deviations).chunk(2, 2)[0]

    @property
    def variance(self) -> Float[Tensor, "N *D"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The variance of the mean, without noise: what more data would remove."""
        return self._variances.chunk(2, 1)[0]

    @cached_property
    def noise_variance(self) -> Float[Tensor, "N *D"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Expected variance of the noise, `E[eˢ] = exp(s + ½ var s)` of a Gaussian log variance `s`."""
        return (self.outputs.chunk(2, 1)[1] + self._variances.chunk(2, 1)[1] / 2).exp()

    @property
    def observation_variance(self) -> Float[Tensor, "N *D"]:
        """Variance of a new observation, `variance + noise_variance`."""
        return self.variance + self.noise_variance
