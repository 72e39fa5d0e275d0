"""What `predict` returns: the network's output with joint samples of the function around it."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson

__all__ = [
    "ClassificationPrediction",
    "CountPrediction",
    "FunctionCovariance",
    "Guarded",
    "HeteroscedasticPrediction",
    "MultiTaskPrediction",
    "OfOutputs",
    "Prediction",
    "RegressionPrediction",
    "Scaled",
    "prediction",
]


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
class Scaled(FunctionCovariance):
    """A multiple of a covariance."""

    function: FunctionCovariance
    factor: float

    def variance(self) -> Tensor:
        return self.factor * self.function.variance()

    def blocks(self) -> Tensor:
        return self.factor * self.function.blocks()

    def joint(self) -> Tensor:
        return self.factor * self.function.joint()


@dataclass(frozen=True)
class OfOutputs(FunctionCovariance):
    """That of some of the (flattened) outputs.

    Args:
        function: of all outputs.
        columns: which.
        num_outputs: `C`, of all.
    """

    function: FunctionCovariance
    columns: slice
    num_outputs: int

    def variance(self) -> Tensor:
        variance = self.function.variance()
        return variance.reshape(len(variance), -1)[:, self.columns]

    def blocks(self) -> Tensor:
        return self.function.blocks()[:, self.columns, self.columns]

    def joint(self) -> Tensor:
        joint = self.function.joint()
        part = joint.reshape(-1, self.num_outputs, len(joint))[:, self.columns].flatten(0, 1)
        return part.reshape(len(part), -1, self.num_outputs)[..., self.columns].flatten(1)


@dataclass(frozen=True)
class _Prediction:
    """Shared by all predictions: outputs keep the shape that the network gives them, `[N, ...]`.

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

    @property
    def _mirrored(self) -> Float[Tensor, "2K N *C"]:
        """Samples and their mirror images `f − φζ_k`, as likely: in means over both, odd terms of the noise cancel."""
        return torch.cat([self.outputs + self.deviations, self.outputs - self.deviations])

    @property
    def variance(self) -> Float[Tensor, "N *C"]:
        """Variance of the function, `φ(x) H⁻¹ φ(x)ᵀ` or `(1/K) Σ_k (φ(x) ζ_k)²`, without observation noise."""
        return self._variances

    @cached_property
    def _variances(self) -> Float[Tensor, "N *C"]:
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

    @property
    def _layout(self) -> Layout:
        return Layout.single(self.outputs.shape[1:])

    def _prepared(self, y: Any) -> tuple[Likelihood, Tensor]:
        """The likelihood of flattened outputs, and targets of the right shape."""
        return self.likelihood.prepare(self._layout, y)


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

    @property
    def observation_variance(self) -> Float[Tensor, "N *C"]:
        """Variance of a new observation, `variance + noise_variance`."""
        return self.variance + self.noise_variance

    def log_prob(self, y: Tensor) -> Float[Tensor, " N"]:
        """Log density of each observation, noise included, joint over its outputs. `y` has the shape of `mean`."""
        self._prepared(y)
        return self.distribution().log_prob(y.reshape(len(y), -1).to(self.outputs))


@dataclass(frozen=True)
class Prediction(_Prediction):
    """Predictions for any likelihood but the Gaussian: of targets by the mean over samples `f ± φ(x) ζ_k`.

    The posterior is symmetric about the network, so that each sample stands for two, and costs one product.
    """

    def log_prob(self, y: Any) -> Float[Tensor, " N"]:
        """`log p(y_n)` of each datum, the mean over the samples; joint over the outputs of a datum."""
        return self._log_likelihoods(y).logsumexp(0) - math.log(2 * len(self.deviations))

    def joint_log_prob(self, y: Any) -> Tensor:
        """`log (1/2K) Σ_k Σ_± Π_n p(y_n | f(x_n) ± φ(x_n)ζ_k)`: all targets jointly, a scalar (paper G.2.1)."""
        return self._log_likelihoods(y).sum(-1).logsumexp(0) - math.log(2 * len(self.deviations))

    def _log_likelihoods(self, y: Any) -> Float[Tensor, "2K N"]:
        likelihood, targets = self._prepared(y)
        draws = self._mirrored
        return -likelihood.loss(draws.reshape(*draws.shape[:2], -1), targets.to(self.outputs.device))


@dataclass(frozen=True)
class ClassificationPrediction(Prediction):
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
            return self._link(self._mirrored).mean(0)
        if link == "probit":
            return self._link(self.outputs / (1 + math.pi / 8 * self.variance).sqrt())
        if link == "bridge":
            return self._bridge()
        raise ValueError(f'`probs_with({link!r})` is not known; use "mc", "probit" or "bridge".')

    @property
    def _bound(self) -> Categorical | Bernoulli:
        bound = self.likelihood.bind(self._layout)
        assert isinstance(bound, Categorical | Bernoulli)
        return bound

    def _link(self, logits: Tensor) -> Tensor:
        flat = logits.reshape(*logits.shape[: logits.dim() - len(self._layout.shape)], -1)
        return self._bound.link(flat).reshape(logits.shape)

    def _bridge(self) -> Tensor:
        if not isinstance(self.likelihood, Categorical):
            raise ValueError(
                'The Laplace bridge of a single logit has mean sigmoid(f) whatever the variance; use "mc" or "probit".'
            )
        outputs, draws, likelihood = self._classes(self.outputs), self._classes(self.deviations), self._bound
        assert isinstance(likelihood, Categorical)
        num = outputs.shape[-1]
        # Condition on Σ_c f_c = 0: from samples, cov(f, Σf) and var(Σf) need no C × C matrix.
        if self.function is not None:
            if outputs.shape[1] > 1:
                raise ValueError('The Laplace bridge of several positions is not there; use "mc" or "probit".')
            cross = self._blocks.sum(-1)[:, None]
            spread = cross.sum(-1, keepdim=True)
        else:
            total = draws.sum(-1, keepdim=True)
            cross, spread = (draws * total).mean(0), (total**2).mean(0)
        spread = spread.clamp_min(torch.finfo(cross.dtype).tiny)
        own = self._classes(self.variance)
        mean = outputs - cross * outputs.sum(-1, keepdim=True) / spread
        variance = (own - cross**2 / spread).clamp_min(1e-12 * own + 1e-30)
        log_terms = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(num)
        alpha = (1 - 2 / num + log_terms.exp()) / variance
        return likelihood.flat(alpha / alpha.sum(-1, keepdim=True)).reshape(self.outputs.shape)

    def _classes(self, f: Tensor) -> Float[Tensor, "*K N S c"]:
        """Logits with the classes last, by positions."""
        bound = self._bound
        assert isinstance(bound, Categorical)
        return bound.positions(f.reshape(*f.shape[: f.dim() - len(self._layout.shape)], -1))

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive probabilities, in nats: total uncertainty; of each datum, position or output."""
        return self._entropy(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean of the entropies over samples, in nats: what more data would remove."""
        return (self.entropy - self._entropy(self._link(self._mirrored)).mean(0)).clamp_min(0)

    def _entropy(self, p: Tensor) -> Tensor:
        if isinstance(self.likelihood, Categorical):
            dim = self.likelihood.class_dim
            return torch.special.entr(p).sum(dim if dim < 0 else dim - self.outputs.dim())
        return torch.special.entr(p) + torch.special.entr(1 - p)


@dataclass(frozen=True)
class CountPrediction(Prediction):
    """Predictions of counts: the outputs are logarithms of rates, and so are `samples`, `variance` and `stddev`."""

    @property
    def log_rate(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @cached_property
    def mean(self) -> Float[Tensor, "N *C"]:
        """The expected count, `E[eᶠ] = exp(f + ½ var f)` of a Gaussian `f`."""
        return (self.outputs + self.variance / 2).exp()

    @property
    def observation_variance(self) -> Float[Tensor, "N *C"]:
        """Variance of a new count, `E[eᶠ] + var eᶠ`: that of a Poisson variable, and of its rate."""
        return self.mean + self.mean**2 * self.variance.expm1()


@dataclass(frozen=True)
class HeteroscedasticPrediction(Prediction):
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
        """Of the mean, without noise: what more data would remove."""
        return self._variances.chunk(2, 1)[0]

    @cached_property
    def noise_variance(self) -> Float[Tensor, "N *D"]:
        """Expected variance of the noise, `E[eˢ] = exp(s + ½ var s)` of a Gaussian log variance `s`."""
        return (self.outputs.chunk(2, 1)[1] + self._variances.chunk(2, 1)[1] / 2).exp()

    @property
    def observation_variance(self) -> Float[Tensor, "N *D"]:
        """Variance of a new observation, `variance + noise_variance`."""
        return self.variance + self.noise_variance


@dataclass(frozen=True, eq=False)
class MultiTaskPrediction(Prediction, Mapping[str, Any]):
    """Predictions of a network with several heads: `pred[head]` is that of a head, of the kind of its likelihood.

    `log_prob(y)` and `joint_log_prob(y)` are of all heads together, of a dictionary of targets; `outputs`, `samples`
    and `variance` of the flattened outputs, head after head.
    """

    likelihood: MultiTask

    @property
    def _layout(self) -> Layout:
        assert self.likelihood.layout is not None
        return self.likelihood.layout

    @cached_property
    def _heads(self) -> dict[str, "RegressionPrediction | Prediction"]:
        outputs, deviations = self._layout.split(self.outputs), self._layout.split(self.deviations)
        ends = [0, *itertools.accumulate(self._layout.sizes)]
        heads = {}
        for number, (name, head) in enumerate(self.likelihood.likelihoods.items()):
            columns = slice(ends[number], ends[number + 1])
            function = None if self.function is None else OfOutputs(self.function, columns, self._layout.size)
            heads[name] = prediction(outputs[name], deviations[name], head, function=function)
        return heads

    def __getitem__(self, head: str) -> Any:
        return self._heads[head]

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads)

    def __len__(self) -> int:
        return len(self._heads)


def prediction(
    outputs: Float[Tensor, "N *C"],
    deviations: Float[Tensor, "K N *C"],
    likelihood: Likelihood,
    *,
    function: FunctionCovariance | None = None,
    **noise: Any,
) -> "RegressionPrediction | Prediction":
    """The prediction of the kind that a likelihood has.

    Args:
        outputs: of the network.
        deviations: of samples from them.
        likelihood: of targets.
        function: covariance of the function, where it is known without samples.
        noise: `noise_scale` and `has_noise` of a `RegressionPrediction`.
    """
    if isinstance(likelihood, Gaussian):
        return RegressionPrediction(outputs, deviations, likelihood, function=function, **noise)
    kinds = {
        Categorical: ClassificationPrediction,
        Bernoulli: ClassificationPrediction,
        Poisson: CountPrediction,
        HeteroscedasticGaussian: HeteroscedasticPrediction,
        MultiTask: MultiTaskPrediction,
    }
    kind = next((kind for cls, kind in kinds.items() if isinstance(likelihood, cls)), Prediction)
    return kind(outputs, deviations, likelihood, function=function)
