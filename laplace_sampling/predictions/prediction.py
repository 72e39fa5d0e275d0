"""What `predict` returns: the network's output with joint samples of the function around it, by a table of kinds."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.batches import Layout, as_tensors, flattened, flaw_of
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.labels import Labels, softmax
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.predictions.conformal import SplitConformal, check_level, rounding
from laplace_sampling.predictions.function_covariance import Function, FunctionCovariance, OfOutputs


@dataclass(frozen=True)
class Prediction(ABC):
    """A prediction at some inputs. Outputs keep the shape that the network gives them, `[N, ...]`.

    Where the posterior has a closed form, covariances are those of `function`, without sampling noise; otherwise those
    of the samples. So are variances, except of outputs that are measured (`Gaussian(observe=T)`) and more than the
    samples.

    What is said of each datum by itself, as probabilities, entropies and `log_prob`, are means over draws of its
    outputs from their covariance, if that is known and cheaper than samples. `samples`, `deviations` and
    `joint_log_prob` are joint over inputs: they are computed by samples of all weights when they are asked for.

    Attributes:
        outputs: the outputs of the network.
        sampled: `φ(x) ζ_k` of each sample, `[K, N, ...]`; `None` if `function` gives them when they are asked for.
        likelihood: the likelihood of the targets.
        function: the covariance of the function, if it is known without samples.
        conformal: scores of the data of `calibrate_conformal`.
        ranks: among the training data, after `calibrate_novelty`.
    """

    outputs: Tensor
    # Of all that makes covariances, printing shows nothing.
    sampled: Tensor | None = field(repr=False)
    likelihood: Likelihood
    function: FunctionCovariance | None = field(default=None, kw_only=True, repr=False)
    conformal: SplitConformal | None = field(default=None, kw_only=True, repr=False)
    ranks: Tensor | None = field(default=None, kw_only=True, repr=False)

    @property
    def novelty(self) -> Float[Tensor, " N"]:
        """How unlike the training data a datum is, in [0, 1]; a larger number is stranger.

        `1 − novelty` is a p-value of "this datum is like the training data": of new data that are, a share `q` has a
        novelty above `1 − q`, up to what the network has learnt by heart (`LinearisedLaplace.calibrate_novelty`).

        Raises:
            ValueError: before `calibrate_novelty`.
        """
        if self.ranks is None:
            raise ValueError(
                "`novelty` ranks inputs among the training data: call `la.calibrate_novelty(train_loader)`, and "
                "`predict(x)` again. That of several heads is an attribute of the prediction of all of them."
            )
        return self.ranks

    @property
    def deviations(self) -> Float[Tensor, "K N *C"]:
        """`φ(x) ζ_k` of each sample: row `k` is of one function at all inputs (joint over inputs)."""
        return self._of_function.deviations().reshape(-1, *self.outputs.shape) if self.sampled is None else self.sampled

    @cached_property
    def _draws(self) -> Float[Tensor, "K N *C"]:
        """Deviations of the outputs of each datum by itself."""
        if self.sampled is not None:
            return self.sampled
        return self._of_function.draws().to(self.outputs).reshape(-1, *self.outputs.shape)

    @property
    def _of_function(self) -> Function:
        assert isinstance(self.function, Function)
        return self.function

    @property
    def _num_samples(self) -> int:
        """`K`, of samples and of draws."""
        return self._of_function.num_samples if self.sampled is None else len(self.sampled)

    @cached_property
    def samples(self) -> Float[Tensor, "K N *C"]:
        """Draws of the function, `f(w̄, x) + φ(x) ζ_k`: row `k` is one function at all inputs (joint over inputs)."""
        # Around the network's own output, which is a better mean than the mode of the linear model.
        return self.outputs + self.deviations

    @property
    def _mirrored(self) -> Float[Tensor, "2K N *C"]:
        """Draws and their mirror images, as likely: in means over both, odd terms of the noise cancel."""
        return self._mirrored_at(self._draws)

    def _mirrored_at(self, deviations: Tensor) -> Tensor:
        return torch.cat([self.outputs + deviations, self.outputs - deviations])

    @property
    def variance(self) -> Float[Tensor, "N *C"]:
        """Variance of the function, `φ(x) H⁻¹ φ(x)ᵀ` or `(1/K) Σ_k (φ(x) ζ_k)²`, without observation noise."""
        return self._variances

    @cached_property
    def _variances(self) -> Float[Tensor, "N *C"]:
        if self.function is not None and self.function.for_variances:
            return self.function.variance().to(self.outputs).reshape(self.outputs.shape)
        # Divided by K, not K − 1: the mean of the samples is known to be zero.
        return (self.deviations**2).mean(0)

    @property
    def stddev(self) -> Float[Tensor, "N *C"]:
        """Standard deviation of the function, without observation noise."""
        return self.variance.sqrt()

    @property
    def _total_stddev(self) -> Float[Tensor, " N"]:
        """The root of the sum of the variances of all outputs of a datum."""
        return flattened(self.variance).sum(1).sqrt()

    @property
    def _flat(self) -> Float[Tensor, "K N C"]:
        return flattened(self.deviations, 2)

    def covariance(self) -> Float[Tensor, "N C C"]:
        """Covariance of the function between the flattened outputs of each input, without observation noise."""
        if self.function is not None:
            return self._blocks
        flat = self._flat
        return torch.einsum("knc,knd->ncd", flat, flat) / len(flat)

    def joint_covariance(self) -> Float[Tensor, "NC NC"]:
        """Covariance of the function over all inputs and outputs, `[N·C, N·C]`, the outputs of an input adjacent."""
        if self.function is not None:
            return self.function.joint().to(self.outputs)
        flat = self.deviations.flatten(1)
        return flat.T @ flat / len(flat)

    # Cached: densities and links ask for it more than once, and each time it takes VJPs.
    @cached_property
    def _blocks(self) -> Float[Tensor, "N C C"]:
        assert self.function is not None
        return self.function.blocks().to(self.outputs)

    @property
    def _layout(self) -> Layout:
        return Layout.single(self.outputs.shape[1:])

    @abstractmethod
    def log_prob(self, y: Any) -> Float[Tensor, " N"]:
        """`log p(y_n)` of each datum, joint over the outputs that have a target; 0 for a datum without any.

        To take a mean over data, leave out the data without any target.
        """

    def scores_of(self, targets: Tensor, penalty: float | None = None) -> Float[Tensor, "N S"]:
        """How unlike its prediction each target of a datum is, NaN where it is not given; see `conformal`.

        Args:
            targets: as the likelihood has prepared them.
            penalty: of adaptive sets of classes.

        Raises:
            ValueError: for a likelihood whose targets have no such score.
        """
        raise ValueError(
            "`calibrate_conformal` needs a regression or a classification, but the likelihood is "
            f"{self.likelihood.name!r}."
        )

    def _conformal_at(self, call: str, level: float, num_targets: int) -> SplitConformal | None:
        """What `calibrate_conformal` left, if it is of predictions with as many samples and targets."""
        check_level(call, level)
        seen = self.conformal
        if seen is not None and (seen.num_samples, seen.num_targets) != (self._num_samples, num_targets):
            raise ValueError(
                f"`{call}`: `calibrate_conformal` saw predictions of {seen.num_samples} samples and {seen.num_targets} "
                f"targets, and this one has {self._num_samples} samples and {num_targets} targets: call "
                "`predict(x)` without `num_samples` and `accuracy`, and `calibrate_conformal` with such data."
            )
        return self.conformal

    def _prepared(self, y: Any, call: str, *, some_given: bool = True) -> tuple[Likelihood, Tensor]:
        """The likelihood of flattened outputs, and targets of the right shape.

        Args:
            y: the targets.
            call: to which they were given, for messages.
            some_given: whether there must be a target.

        Raises:
            TypeError, ValueError: for targets that are not of these predictions.
        """
        try:
            y = as_tensors(y)
            flaw, num = flaw_of(y, self.likelihood.takes_missing), len(self.outputs)
            if flaw is not None:
                raise ValueError(f"the targets contain {flaw}.")
            likelihood, targets = self.likelihood.prepare(self._layout, y, some_given=some_given and num > 0)
            if len(targets) != num:
                raise ValueError(f"there are {len(targets)} targets for predictions of {num} data.")
        except (TypeError, ValueError) as error:
            raise type(error)(f"`{call}`: {error}") from None
        return likelihood, targets


@dataclass(frozen=True)
class SampledPrediction(Prediction):
    """Predictions for any likelihood that is not Gaussian: probabilities are means over the samples `f ± φ(x) ζ_k`.

    The posterior is symmetric about the network, so each sample counts with both signs, at the cost of one product.
    """

    def log_prob(self, y: Any) -> Float[Tensor, " N"]:
        """`log p(y_n)` of each datum, where `p` is the mean density over the samples.

        It is joint over the outputs of the datum that have a target, and 0 where none has. For one soft label it is
        `Σ_c y_c log p_c` with the mean probabilities `p`, minus the cross-entropy. For several soft labels, such as
        those of pixels, it is the logarithm of the mean over samples of `exp Σ y_c log p_c`.
        """
        draws, likelihood, targets = self._drawn(y, self._mirrored)
        return likelihood.mean_log_prob(draws, targets)

    def joint_log_prob(self, y: Any) -> Tensor:
        """`log (1/2K) Σ_k Σ_± Π_n p(y_n | f(x_n) ± φ(x_n)ζ_k)`: all targets jointly, a scalar (paper G.2.1)."""
        # The sum over data is inside the mean over samples: one sample is one function at all inputs.
        draws, likelihood, targets = self._drawn(y, self._mirrored_at(self.deviations))
        return (-likelihood.loss(draws, targets)).sum(-1).logsumexp(0) - math.log(len(draws))

    def _drawn(self, y: Any, draws: Tensor) -> tuple[Float[Tensor, "2K N C"], Likelihood, Tensor]:
        """Draws of the flattened outputs, the likelihood of these, and targets."""
        likelihood, targets = self._prepared(y, "log_prob(y)", some_given=False)
        return flattened(draws, 2), likelihood, targets.to(self.outputs.device)


class _Intervals(Prediction):
    """Intervals of targets that have a mean and a variance."""

    @property
    @abstractmethod
    def mean(self) -> Tensor: ...

    @property
    @abstractmethod
    def noise_variance(self) -> Tensor: ...

    @property
    def observation_variance(self) -> Float[Tensor, "N *D"]:
        """Variance of a new observation, `variance + noise_variance`."""
        return self.variance + self.noise_variance

    @property
    def epistemic(self) -> Float[Tensor, " N"]:
        """How little the data say of a datum: `√(Σ var f)`, summed over its outputs, in the units of the targets."""
        return self._total_stddev

    def interval(self, level: float | Sequence[float] = 0.95) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """Lower and upper ends of an interval that contains each observation with this probability.

        They are `[N, *D]`; of several levels, as `interval((0.5, 0.9))`, there is an axis of these before.

        After `calibrate_conformal` that is guaranteed for data like those that it saw, on average over inputs and for
        each output by itself, and ends are infinite where these are too few for the level, fewer than `q/(1 − q)`.
        Else it is as true as the model is: `f ± z √(var f + σ²)` with the quantile `z` of a normal distribution.

        Raises:
            ValueError: for a level that is no probability; for predictions of fewer samples, or of another shape, than
                those that `calibrate_conformal` saw.
        """
        if isinstance(level, Sequence) and not isinstance(level, str) and len(level):
            lower, upper = zip(*map(self.interval, level), strict=True)
            return torch.stack(lower), torch.stack(upper)
        level = cast(float, level)  # anything else is refused by its value
        mean, variance = self.mean, self.observation_variance
        conformal = self._conformal_at("interval(level)", level, mean.shape[1:].numel())
        if conformal is None:
            half = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).to(variance) * variance.sqrt()
            return mean - half, mean + half
        half = conformal.largest(level).to(variance).reshape(mean.shape[1:]) * variance.sqrt()
        return mean - half, mean + half

    def scores_of(self, targets: Tensor, penalty: float | None = None) -> Float[Tensor, "N D"]:
        if penalty is not None:
            raise ValueError(
                "`calibrate_conformal(penalty=...)` is for sets of classes, not for intervals: leave it out."
            )
        error = (targets.to(self.mean).reshape(self.mean.shape) - self.mean).abs()
        of_outputs, of_deviations = rounding(self.mean)
        scores = (error + of_outputs).double() / self.observation_variance.sqrt().double() * (1 + of_deviations)
        return flattened(scores)


@dataclass(frozen=True)
class RegressionPrediction(_Intervals):
    """Predictions of a regression, in the units of the targets.

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
        """`R/b`, the variance of the noise: a scalar, one for each output, or one for each input and output."""
        assert isinstance(self.likelihood, Gaussian)
        if not self.has_noise:
            raise ValueError(
                "The noise is that of the measurements `y = T f(x) + noise`, not of the outputs: `predict(x, "
                "observed=True)` predicts measurements. Intervals of the outputs are `mean ± z * stddev`."
            )
        variance = 1 / self.likelihood.precision(self.outputs)
        variance = variance.reshape(self.outputs.shape[1:]) if variance.numel() > 1 else variance
        return variance if self.noise_scale is None else variance * self.noise_scale

    def distribution(self) -> LowRankMultivariateNormal | MultivariateNormal:
        """The distribution of new observations, with noise: for each input a Gaussian over its flattened outputs."""
        shape = flattened(self.outputs).shape
        mean, noise = self.outputs.reshape(shape), self.noise_variance
        noise = noise.reshape(shape) if self.noise_scale is not None else noise.flatten().expand(shape)
        if self.function is not None:
            return MultivariateNormal(mean, self._blocks + torch.diag_embed(noise))
        factor = self._flat.permute(1, 2, 0) / math.sqrt(self._num_samples)
        # Torch's checks of arguments fail for a batch of no data.
        return LowRankMultivariateNormal(mean, factor, noise, validate_args=None if len(mean) else False)

    def log_prob(self, y: Tensor) -> Float[Tensor, " N"]:
        """Log density of each observation, noise included, joint over its outputs; `y` has the shape of `mean`.

        Targets of NaN are missing: the density is that of the others, and its logarithm is 0 for a datum without any.
        To take a mean over data, leave out the data without any target.
        """
        targets = self._prepared(y, "log_prob(y)", some_given=False)[1].to(self.outputs)
        given = ~targets.isnan()
        if flattened(self.outputs).shape[-1] == 1:
            # Of one output the variance is all there is: no matrix to factorise, which fails where it is infinite.
            variance = self.observation_variance
            squares = (targets.reshape(self.outputs.shape) - self.outputs) ** 2
            return -0.5 * (squares / variance + variance.log() + math.log(2 * math.pi)).where(given, 0).flatten()
        if not len(targets):  # which torch's densities of several outputs do not take
            return targets.new_zeros(0)
        error, distribution = flattened(targets - self.outputs), self.distribution()
        if isinstance(distribution, MultivariateNormal):
            return log_density(error, distribution.covariance_matrix)
        # As `log_density`, without matrices of all outputs.
        given = given.reshape(error.shape)
        factor, noise = distribution.cov_factor * given[..., None], distribution.cov_diag.where(given, 1)
        error = error.where(given, 0)
        joint = LowRankMultivariateNormal(torch.zeros_like(error), factor, noise).log_prob(error)
        return joint + 0.5 * math.log(2 * math.pi) * (~given).sum(1).to(joint)

    def log_likelihood(
        self, truth: Tensor, patch: tuple[int, int] | None = None, pixel_noise: float = 0.0
    ) -> Float[Tensor, " N"]:
        r"""`log N(truth | mean, Σ + pixel_noise I)` of each image, without observation noise: the mean over its pixels.

        Pixels of a patch, with all its channels, are joint, and patches are independent (thesis §7.3.5). They tile the
        image, and the last ones take the rows and columns that are left: patches of (10, 10) of an image of 28 × 28
        have 10 or 18 rows, and as many columns. `Σ` is exact where `variance` is. Else it is `½(diag Ĉ + Ĉ)` with
        the covariance `Ĉ = (1/K) Σ_k (φζ_k)(φζ_k)ᵀ` of the samples, which is regular also for patches of more pixels
        than there are samples.

        Args:
            truth: images in the shape of `mean`, `[N, ..., H, W]`; pixels of NaN do not count.
            patch: rows and columns of a patch; by default each pixel is by itself.
            pixel_noise: variance of the truth's own noise, in squared units of the image.

        Returns:
            Natural logarithms in float64; NaN for an image without any pixel that counts.

        Raises:
            ValueError: if outputs are not images, if the truth or an argument does not fit, or if some pixels vary so
                little that the covariance has no density.
        """
        shape = self.outputs.shape
        if len(shape) < 3 or truth.shape != shape:
            raise ValueError(
                "`log_likelihood(truth)` needs images [N, ..., H, W] in the shape of `mean`, but `mean` is "
                f"{list(shape)} and the truth is {list(truth.shape)}."
            )
        if not 0 <= pixel_noise < math.inf:
            raise ValueError(f"`log_likelihood(pixel_noise=...)` must be a variance, but is {pixel_noise!r:.80}.")
        error = (truth.detach().to(self.outputs) - self.outputs).double()
        counted = (~error.isnan()).flatten(1).sum(1)
        if patch is None:
            variances = self.variance.double().where(~error.isnan(), 1)
            parts = [(error.reshape(-1, 1), variances.reshape(-1, 1, 1))]
        else:
            parts = self._patches(error, patch)
        total = torch.zeros_like(counted, dtype=torch.float64)
        for errors, covariance in parts:
            noise = torch.full_like(errors, pixel_noise)
            try:
                densities = log_density(errors, covariance + torch.diag_embed(noise))
            except (RuntimeError, ValueError):  # of the factorisation
                raise ValueError(
                    "`log_likelihood`: the covariance of some pixels is singular, as that of a background that never "
                    "changes: give the variance of the truth's own noise, `pixel_noise=`, 1e-6 say."
                ) from None
            total += densities.reshape(len(total), -1).sum(1)
        return total / counted

    def _patches(self, error: Tensor, patch: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Errors `[N, p]` and covariances `[N, p, p]` of each patch."""
        exact = self.function is not None and self.function.for_variances
        numbers = torch.arange(error[0].numel()).reshape(error.shape[1:])
        for rows, columns in itertools.product(*map(_tiles, error.shape[-2:], patch)):
            part = error[..., rows, columns].flatten(1)
            if exact:
                some = numbers[..., rows, columns].flatten().to(error.device)
                yield part, self._blocks[:, some][:, :, some].double()
                continue
            flat = self.deviations[..., rows, columns].flatten(2).double()
            covariance = torch.einsum("knc,knd->ncd", flat, flat) / len(flat)
            yield part, (covariance + torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))) / 2


def _tiles(length: int, size: int) -> list[slice]:
    """Parts of an axis; the last one takes what is left."""
    check_whole("`log_likelihood(patch=...)`: each length", size, 1)
    ends = [*range(0, max(1, length // size) * size, size), length]
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


@dataclass(frozen=True)
class HeteroscedasticPrediction(SampledPrediction, _Intervals):
    """Predictions of a regression whose network gives means and log variances, the two halves of axis 1 of its outputs.

    `samples`, `variance` and `stddev` are those of the mean. `covariance()` and `joint_covariance()` contain both
    halves, flattened.
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
        """The variance of the mean, without noise: the part that more data would remove."""
        return self._variances.chunk(2, 1)[0]

    @cached_property
    def noise_variance(self) -> Float[Tensor, "N *D"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Expected variance of the noise, `E[eˢ] = exp(s + ½ var s)` of a Gaussian log variance `s`."""
        return (self.outputs.chunk(2, 1)[1] + self._variances.chunk(2, 1)[1] / 2).exp()


@dataclass(frozen=True)
class ClassificationPrediction(SampledPrediction):
    """Predictions of a classification: categorical over an axis of the outputs, or Bernoulli for each output."""

    @property
    def logits(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @property
    def probs(self) -> Float[Tensor, "N *C"]:
        """Predictive probabilities with the default link, `probs_with("mc")`."""
        return self.probs_with("mc")

    def probs_with(self, link: str) -> Float[Tensor, "N *C"]:
        r"""Predictive probabilities `E[σ(f)]`, by one of three links.

        - `"mc"`: the mean of softmax (or sigmoid) over the samples `f ± φ(x) ζ_k` (thesis eq. 6.15).
        - `"probit"`: `σ(f / √(1 + (π/8) var f))`, MacKay's factor `π/8` for each logit (the paper prints `π/2`).
        - `"bridge"`: the mean of the Dirichlet of the Laplace bridge (Hobbhahn et al. 2022), after the Gaussian is
          conditioned on logits that sum to zero; categorical likelihoods only.
        """
        if link == "mc":
            probs = self._mean_probs
        elif link == "probit":
            probs = self._class_probs(self.outputs / (1 + math.pi / 8 * self.variance).sqrt())
        elif link == "bridge":
            probs = self._bridge()
        else:
            raise ValueError(f'`probs_with({link!r})` is not known; use "mc", "probit" or "bridge".')
        return self._labels.flat(probs).reshape(self.outputs.shape)

    @property
    def _labels(self) -> Labels:
        bound = self.likelihood.bind(self._layout)
        assert isinstance(bound, Labels)
        return bound

    def _classes(self, f: Tensor) -> Float[Tensor, "*K N S c"]:
        """Logits with the classes last, by positions; zero and the logit for labels of zero and one."""
        return self._labels.positions(flattened(f, f.dim() - len(self._layout.shape)))

    def _class_probs(self, logits: Tensor) -> Float[Tensor, "*K N S c"]:
        return softmax(self._classes(logits))

    @cached_property
    def _mean_probs(self) -> Float[Tensor, "N S c"]:
        return self._class_probs(self._mirrored).mean(0)

    def _by_label(self, values: Float[Tensor, "N S"]) -> Tensor:
        """Numbers of each label in the shape of the labels."""
        shape = list(self.outputs.shape)
        if isinstance(self.likelihood, Categorical):
            del shape[self.likelihood.class_dim]
        return values.reshape(shape)

    def _bridge(self) -> Float[Tensor, "N S c"]:
        if not isinstance(self.likelihood, Categorical):
            raise ValueError(
                'The Laplace bridge of a single logit has mean sigmoid(f) whatever the variance; use "mc" or "probit".'
            )
        mean, variance = self._conditioned_on_zero_sum()
        num = mean.shape[-1]
        # Parameters of the Dirichlet that matches mean and variance of the logits.
        log_terms = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(num)
        alpha = (1 - 2 / num + log_terms.exp()) / variance
        return alpha / alpha.sum(-1, keepdim=True)

    def _conditioned_on_zero_sum(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logits given that those of a position sum to zero, as a Dirichlet's do."""
        outputs, draws = self._classes(self.outputs), self._classes(self._draws)
        # From samples, cov(f, Σf) and var(Σf) need no C × C matrix.
        if self.function is not None:
            if outputs.shape[1] > 1:
                raise ValueError('The Laplace bridge of several positions is not there; use "mc" or "probit".')
            cross = self._blocks.sum(-1)[:, None]
            total_variance = cross.sum(-1, keepdim=True)
        else:
            total = draws.sum(-1, keepdim=True)
            cross, total_variance = (draws * total).mean(0), (total**2).mean(0)
        # Samples that are all zero have a sum of no variance.
        total_variance = total_variance.clamp_min(torch.finfo(cross.dtype).tiny)
        unconditional = self._classes(self.variance)
        mean = outputs - cross * outputs.sum(-1, keepdim=True) / total_variance
        variance = (unconditional - cross**2 / total_variance).clamp_min(1e-12 * unconditional + 1e-30)
        return mean, variance

    def prediction_set(self, level: float = 0.95) -> Bool[Tensor, "N *C"]:
        """The set of classes that contains the label with this probability, as truth values in the shape of `probs`.

        For labels of zero and one the set of each output is `[..., 2]`.

        Without `calibrate_conformal` the set has the most probable classes, as many as are needed for their
        probabilities to reach the level. After `calibrate_conformal` it has all classes that are at least as probable
        as a threshold, and may be empty; with its `penalty` the most probable classes, one at least, up to a threshold
        of the sum of their probabilities. Then the level is guaranteed for data of the same distribution, on average
        over inputs, for each position or output by itself. If there were fewer than `q/(1 − q)` such data, the set has
        all classes.

        Raises:
            ValueError: for a level that is no probability; for predictions of fewer samples, or of another shape, than
                those that `calibrate_conformal` saw.
        """
        log_probs = self._class_log_probs
        conformal = self._conformal_at("prediction_set(level)", level, log_probs.shape[1])
        if conformal is None:
            ordered, order = log_probs.exp().sort(-1, descending=True)
            # A class belongs to the set if those before it do not reach the level.
            belongs = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < level)
        elif conformal.penalty is None:
            belongs = -log_probs <= conformal.largest(level).to(log_probs)[:, None]
        else:
            ordered, order = log_probs.exp().sort(-1, descending=True)
            before = torch.arange(ordered.shape[-1], device=ordered.device)
            scores = ordered.cumsum(-1) + conformal.penalty * before
            inside = (scores <= conformal.largest(level).to(scores)[:, None]) | (before == 0)
            belongs = torch.zeros_like(inside).scatter(-1, order, inside)
        if isinstance(self.likelihood, Categorical):
            return self._labels.flat(belongs).reshape(self.outputs.shape)
        return belongs.reshape(*self.outputs.shape, 2)

    @cached_property
    def _class_log_probs(self) -> Float[Tensor, "N S c"]:
        """Log probabilities of each class, by positions; of both labels of zero and one."""
        logs = self._labels.log_probs(flattened(self._mirrored.double(), 2))
        return logs.logsumexp(0) - math.log(len(logs))

    def scores_of(self, targets: Tensor, penalty: float | None = None) -> Float[Tensor, "N S"]:
        if self._labels.is_soft(targets):
            raise ValueError(
                "`calibrate_conformal` needs labels, of which its guarantee is, but these targets are probabilities: "
                "draw a label of each, as by `torch.distributions.Categorical(probs).sample()`."
            )
        labels, given = self._labels.labels(targets)
        chosen = self._class_log_probs.gather(-1, labels[..., None].to(self.outputs.device))[..., 0]
        # A log probability moves by twice as much as the logits, at most.
        of_outputs, of_deviations = rounding(self.outputs)
        error = 2 * (of_outputs + of_deviations * float(self._draws.abs().max()))
        scores = error - chosen
        if penalty is not None:
            # Classes that rounding may put before the label count, too.
            before = self._class_log_probs >= chosen[..., None] - 2 * error
            sums = (self._class_log_probs.exp() * before).sum(-1)
            scores = sums * math.exp(error) + penalty * (before.sum(-1) - 1)
        return scores.where(given.to(chosen.device), torch.nan)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive probabilities of each datum, position or output, in nats: the total uncertainty."""
        return self._by_label(torch.special.entr(self._mean_probs).sum(-1))

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean entropy of the samples, in nats: the part that more data would remove."""
        of_samples = torch.special.entr(self._class_probs(self._mirrored)).sum(-1)
        return (self.entropy - self._by_label(of_samples.mean(0))).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        r"""How unlike the training data a datum is, or how likely to be wrong; a larger number is worse.

        Its shape is that of `entropy`. Let `m_c = f_t − f_c` be the log-odds between the most probable class `t` and
        each other class (for labels of zero and one `|m| = |f|`), and `H` the entropy. `epistemic` is the variance of
        the log-odds relative to their size, times the number of classes that the prediction hesitates between,

            exp(H) · Σ_c var(m_c) / Σ_c (1 + m_c²).

        It is no probability and has no unit: use it to rank inputs. The variance of logits alone grows with the size of
        the features, which is small for dark images. The mutual information vanishes where the network is certain,
        right or not. This ratio hardly changes if log-odds above one and their error bars become twice as large.
        `docs/design.md` compares them.
        """
        outputs, draws = self._classes(self.outputs), self._classes(self._draws)
        top = outputs.argmax(-1, keepdim=True)
        outputs, draws = (v - v.gather(-1, top.expand(*v.shape[:-1], 1)) for v in (outputs, draws))
        odds, variance = (outputs**2).sum(-1), (draws**2).mean(0).sum(-1)
        return self.entropy.exp() * self._by_label(variance / (outputs.shape[-1] - 1 + odds))


@dataclass(frozen=True)
class CountPrediction(SampledPrediction):
    """Predictions of counts. Outputs, and so `samples`, `variance` and `stddev`, are logarithms of rates."""

    @property
    def log_rate(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @property
    def epistemic(self) -> Float[Tensor, " N"]:
        """How uncertain the rates of a datum are: `√(Σ var f)`, summed over its outputs."""
        return self._total_stddev

    @cached_property
    def mean(self) -> Float[Tensor, "N *C"]:
        """The expected count, `E[eᶠ] = exp(f + ½ var f)` of a Gaussian `f`."""
        return (self.outputs + self.variance / 2).exp()

    @property
    def observation_variance(self) -> Float[Tensor, "N *C"]:
        """Variance of a new count, `E[eᶠ] + var eᶠ`: that of a Poisson variable plus that of its rate."""
        return self.mean + self.mean**2 * self.variance.expm1()


@dataclass(frozen=True, eq=False)
class MultiTaskPrediction(SampledPrediction, Mapping[str, Any]):
    """Predictions of a network with several heads: `pred[head]` is the prediction of a head by its likelihood.

    `log_prob(y)` and `joint_log_prob(y)` take a dictionary of targets and are joint over the heads. `outputs`,
    `samples` and `variance` contain the flattened outputs, head after head.
    """

    likelihood: MultiTask
    heads: dict[str, Any] = field(kw_only=True)

    @property
    def _layout(self) -> Layout:
        assert self.likelihood.layout is not None
        return self.likelihood.layout

    def __getitem__(self, head: str) -> Any:
        return self.heads[head]

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)


# The prediction of each likelihood. Any other likelihood, as a user's own, has a `SampledPrediction`, which needs its
# loss only: a new likelihood need not be added here.
KINDS: dict[type[Likelihood], type[Prediction]] = {
    Gaussian: RegressionPrediction,
    Categorical: ClassificationPrediction,
    Bernoulli: ClassificationPrediction,
    Poisson: CountPrediction,
    HeteroscedasticGaussian: HeteroscedasticPrediction,
    MultiTask: MultiTaskPrediction,
}


# What predictions are asked for where names are not given, if they have it.
_USUAL = ("probs", "mean", "stddev", "epistemic")


def kind_of(likelihood: Likelihood) -> type[Prediction]:
    """The class of the predictions of a likelihood."""
    return next((KINDS[family] for family in type(likelihood).__mro__ if family in KINDS), SampledPrediction)


def check_quantities(call: str, names: Sequence[str] | None, likelihood: Likelihood) -> list[str]:
    """Names of tensors that predictions of a likelihood have as attributes; by default the usual ones.

    Raises:
        ValueError: for names of anything else, and for none.
    """
    kind = kind_of(likelihood)
    computed = [n for n in dir(kind) if isinstance(getattr(kind, n), property | cached_property) and n[0] != "_"]
    # The noise of a regression is the same for all data.
    known = sorted(
        {"outputs", "deviations", *computed} - ({"noise_variance"} if kind is RegressionPrediction else set())
    )
    if names is None:
        return [name for name in _USUAL if name in known]
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"`{call}(outputs={names})`: predictions of likelihood {likelihood.name!r} have the tensors {known}"
            + (f", and not {unknown}." if unknown else "; name one of them or more.")
        )
    return names


def names_at(level: float | None, likelihood: Likelihood) -> tuple[str, ...]:
    """The names of what `at_level` returns."""
    if level is None:
        return ()
    check_level("to_module(level=...)", level)
    kind = kind_of(likelihood)
    if issubclass(kind, RegressionPrediction | HeteroscedasticPrediction):
        return "lower", "upper"
    if issubclass(kind, ClassificationPrediction):
        return ("set",)
    raise ValueError(
        "`to_module(level=...)` is for the intervals of a regression and the sets of a classification, but the "
        f"likelihood is {likelihood.name!r}."
    )


def at_level(prediction: Prediction, level: float | None) -> dict[str, Tensor]:
    """The ends of intervals of a regression, or the sets of a classification, by their names in an exported module."""
    if level is None:
        return {}
    if isinstance(prediction, RegressionPrediction | HeteroscedasticPrediction):
        return dict(zip(("lower", "upper"), prediction.interval(level), strict=True))
    assert isinstance(prediction, ClassificationPrediction)
    return {"set": prediction.prediction_set(level)}


def make_prediction(
    outputs: Float[Tensor, "N *C"],
    sampled: Float[Tensor, "K N *C"] | None,
    likelihood: Likelihood,
    *,
    function: FunctionCovariance | None = None,
    conformal: SplitConformal | None = None,
    ranks: Tensor | None = None,
    **noise: Any,
) -> Prediction:
    """The prediction of the kind that a likelihood has.

    Args:
        outputs: the outputs of the network.
        sampled: deviations of samples from them; `None` if `function` gives them.
        likelihood: the likelihood of targets.
        function: the covariance of the function, if it is known without samples.
        conformal: scores of data.
        ranks: of inputs among the training data.
        noise: `noise_scale` and `has_noise` of a `RegressionPrediction`.
    """
    kind = kind_of(likelihood)
    options: dict[str, Any] = {}
    if kind is RegressionPrediction:
        options = noise
    if isinstance(likelihood, MultiTask):
        options = {"heads": _heads(outputs, sampled, likelihood, function)}
    return kind(outputs, sampled, likelihood, function=function, conformal=conformal, ranks=ranks, **options)


def _heads(
    outputs: Float[Tensor, "N C"],
    sampled: Float[Tensor, "K N C"] | None,
    likelihood: MultiTask,
    function: FunctionCovariance | None,
) -> dict[str, Any]:
    """The prediction of each head, from its columns of the flattened outputs."""
    layout = likelihood.layout
    assert layout is not None
    parts, sampled_parts = layout.split(outputs), {} if sampled is None else layout.split(sampled)
    ends = [0, *itertools.accumulate(layout.sizes)]
    heads = {}
    for number, (name, family) in enumerate(likelihood.heads.items()):
        columns = slice(ends[number], ends[number + 1])
        part = OfOutputs(function, columns, layout.size) if isinstance(function, Function) else None
        heads[name] = make_prediction(parts[name], sampled_parts.get(name), family, function=part)
    return heads
