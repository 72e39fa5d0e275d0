"""What `predict` returns: the network's output with joint samples of the function around it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

from laplace_sampling.likelihoods import Categorical, Gaussian, Likelihood

__all__ = ["ClassificationPrediction", "FunctionCovariance", "Guarded", "RegressionPrediction"]


class FunctionCovariance(ABC):
    """Covariance of the function at the inputs of a prediction without samples, as the exact method knows it."""

    @abstractmethod
    def variance(self) -> Float[Tensor, "N C"]:
        """Of each output."""

    @abstractmethod
    def blocks(self) -> Float[Tensor, "N C C"]:
        """Between the (flattened) outputs of each input."""

    @abstractmethod
    def joint(self) -> Float[Tensor, "NC NC"]:
        """Over all inputs and outputs, the outputs of an input adjacent."""


@dataclass(frozen=True)
class Guarded(FunctionCovariance):
    """A covariance that is computed when it is asked for, after a check that it still can be.

    Args:
        function: the covariance.
        check: raises if not.
    """

    function: FunctionCovariance
    check: Callable[[], None]

    def _checked(self, name: str) -> Tensor:
        with torch.inference_mode(False):
            self.check()
            return getattr(self.function, name)()

    def variance(self) -> Tensor:
        return self._checked("variance")

    def blocks(self) -> Tensor:
        return self._checked("blocks")

    def joint(self) -> Tensor:
        return self._checked("joint")


@dataclass(frozen=True)
class _Prediction:
    """Shared by both predictions: outputs keep the shape that the network gives them, `[N, ...]`.

    Covariances are those of `function` where it is given (after a fit by the exact method), without the noise of the
    samples; else those of the samples.
    """

    outputs: Tensor
    deviations: Tensor
    likelihood: Likelihood
    function: FunctionCovariance | None = field(default=None, kw_only=True)

    @cached_property
    def samples(self) -> Float[Tensor, "K N *C"]:
        """Draws of the function, `f(w̄, x) + φ(x) ζ_k`: row `k` is one function at all inputs (joint over inputs)."""
        return self.outputs + self.deviations

    @cached_property
    def variance(self) -> Float[Tensor, "N *C"]:
        """Variance of the function, `φ(x) H⁻¹ φ(x)ᵀ` or `(1/K) Σ_k (φ(x) ζ_k)²`, without observation noise."""
        if self.function is not None:
            return self.function.variance().to(self.outputs).reshape(self.outputs.shape)
        return (self.deviations**2).mean(0)

    @property
    def stddev(self) -> Float[Tensor, "N *C"]:
        """Standard deviation of the function, without observation noise."""
        return self.variance.sqrt()

    @property
    def _flat(self) -> Float[Tensor, "K N C"]:
        return self.deviations.reshape(*self.deviations.shape[:2], -1)

    def covariance(self) -> Float[Tensor, "N C C"]:
        """Covariance of the function between the (flattened) outputs of each input, without observation noise."""
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

    @cached_property
    def _blocks(self) -> Float[Tensor, "N C C"]:
        assert self.function is not None
        return self.function.blocks().to(self.outputs)

    def _check_targets(self, y: Tensor) -> None:
        self.likelihood.check_targets(self.outputs.shape, y)


@dataclass(frozen=True)
class RegressionPrediction(_Prediction):
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
        """Of new observations, noise included: for each input a Gaussian over its (flattened) outputs."""
        shape = self._flat.shape[1:]
        mean, noise = self.outputs.reshape(shape), self.noise_variance
        noise = noise.reshape(shape) if self.noise_scale is not None else noise.flatten().expand(shape)
        if self.function is not None:
            return MultivariateNormal(mean, self._blocks + torch.diag_embed(noise))
        return LowRankMultivariateNormal(mean, self._flat.permute(1, 2, 0) / math.sqrt(len(self.deviations)), noise)

    def log_prob(self, y: Tensor) -> Float[Tensor, " N"]:
        """Log density of each observation, noise included, joint over its outputs. `y` has the shape of `mean`."""
        self._check_targets(y)
        return self.distribution().log_prob(y.reshape(len(y), -1).to(self.outputs))


@dataclass(frozen=True)
class ClassificationPrediction(_Prediction):
    """Predictions of a classification: categorical over the last axis, or Bernoulli for each output."""

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

        - `"mc"`: the mean of softmax (or sigmoid) over the samples (thesis eq. 6.15).
        - `"probit"`: `σ(f / √(1 + (π/8) var f))`, MacKay's factor `π/8` for each logit (the paper prints `π/2`).
        - `"bridge"`: the mean of the Dirichlet of the Laplace bridge (Hobbhahn et al. 2022), after the Gaussian is
          conditioned on logits that sum to zero; categorical likelihoods only.
        """
        if link == "mc":
            return self._link(self.samples).mean(0)
        if link == "probit":
            return self._link(self.outputs / (1 + math.pi / 8 * self.variance).sqrt())
        if link == "bridge":
            return self._bridge()
        raise ValueError(f'`probs_with({link!r})` is not known; use "mc", "probit" or "bridge".')

    def _link(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if isinstance(self.likelihood, Categorical) else logits.sigmoid()

    def _bridge(self) -> Tensor:
        if not isinstance(self.likelihood, Categorical):
            raise ValueError(
                'The Laplace bridge of a single logit has mean sigmoid(f) whatever the variance; use "mc" or "probit".'
            )
        num = self.outputs.shape[-1]
        # Condition on Σ_c f_c = 0: from samples, cov(f, Σf) and var(Σf) need no C × C matrix.
        if self.function is not None:
            cross = self._blocks.sum(-1)
            spread = cross.sum(-1, keepdim=True)
        else:
            total = self.deviations.sum(-1, keepdim=True)
            cross, spread = (self.deviations * total).mean(0), (total**2).mean(0)
        spread = spread.clamp_min(torch.finfo(cross.dtype).tiny)
        mean = self.outputs - cross * self.outputs.sum(-1, keepdim=True) / spread
        variance = (self.variance - cross**2 / spread).clamp_min(1e-12 * self.variance + 1e-30)
        log_terms = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(num)
        alpha = (1 - 2 / num + log_terms.exp()) / variance
        return alpha / alpha.sum(-1, keepdim=True)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive probabilities, in nats: total uncertainty; of each datum, or Bernoulli output."""
        return self._entropy(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean of the entropies over samples, in nats: what more data would remove."""
        return (self.entropy - self._entropy(self._link(self.samples)).mean(0)).clamp_min(0)

    def _entropy(self, p: Tensor) -> Tensor:
        if isinstance(self.likelihood, Categorical):
            return torch.special.entr(p).sum(-1)
        return torch.special.entr(p) + torch.special.entr(1 - p)

    def log_prob(self, y: Tensor) -> Float[Tensor, " N"]:
        """`log p(y_n)` of each datum under the default link; jointly for several Bernoulli outputs of a datum."""
        return self._log_likelihoods(y).logsumexp(0) - math.log(len(self.deviations))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """`log (1/K) Σ_k Π_n p(y_n | f_k(x_n))`: all labels jointly, a scalar (paper G.2.1)."""
        return self._log_likelihoods(y).sum(-1).logsumexp(0) - math.log(len(self.deviations))

    def _log_likelihoods(self, y: Tensor) -> Float[Tensor, "K N"]:
        self._check_targets(y)
        return -self.likelihood.loss(self.samples.reshape(self._flat.shape), y.to(self.outputs.device))
