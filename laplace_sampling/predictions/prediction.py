"""What `predict` returns: the network's output with joint samples of the function around it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout, as_tensors, flattened, flaw_of
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.predictions.conformal import SplitConformal, check_level
from laplace_sampling.predictions.function_covariance import FunctionCovariance


@dataclass(frozen=True)
class Prediction(ABC):
    """A prediction at some inputs: outputs keep the shape that the network gives them, `[N, ...]`.

    Covariances are those of `function` where it is given (after a fit by the exact method), without the noise of the
    samples; else those of the samples.

    Attributes:
        outputs: of the network.
        deviations: `φ(x) ζ_k` of each sample, `[K, N, ...]`.
        likelihood: of the targets.
        function: covariance of the function, where it is known without samples.
        conformal: scores of data after `calibrate_conformal`.
    """

    outputs: Tensor
    deviations: Tensor
    likelihood: Likelihood
    function: FunctionCovariance | None = field(default=None, kw_only=True)
    conformal: SplitConformal | None = field(default=None, kw_only=True)

    @cached_property
    def samples(self) -> Float[Tensor, "K N *C"]:
        """Draws of the function, `f(w̄, x) + φ(x) ζ_k`: row `k` is one function at all inputs (joint over inputs)."""
        # Around the network's own output, which is a better mean than the mode of the linear model.
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
        """`log p(y_n)` of each datum, joint over those of its outputs that have a target; 0 for a datum without any.

        A mean over data is one over those that have a target: leave the others out of it.
        """

    def scores_of(self, targets: Tensor) -> Float[Tensor, "N S"]:
        """How unlike its prediction each target of a datum is, NaN where it is not given; see `conformal`.

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
        if self.conformal is not None and self.conformal.num_samples != len(self.deviations):
            raise ValueError(
                f"`{call}`: `calibrate_conformal` saw predictions of {self.conformal.num_samples} samples, and this "
                f"one has {len(self.deviations)}: call `predict(x)` without `num_samples` and `accuracy`."
            )
        if self.conformal is not None and self.conformal.num_targets != num_targets:
            raise ValueError(
                f"`{call}`: `calibrate_conformal` saw data of {self.conformal.num_targets} targets each, and these "
                f"have {num_targets}: call it with data of the same shape."
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
    """Predictions for any likelihood but the Gaussian: probabilities are means over the samples `f ± φ(x) ζ_k`.

    The posterior is symmetric about the network, so that each sample stands for two, and costs one product.
    """

    def log_prob(self, y: Any) -> Float[Tensor, " N"]:
        """`log p(y_n)` of each datum, of the mean over the samples; joint over those of its outputs that have a target.

        It is 0 for a datum without any. Of one soft label it is `Σ_c y_c log p_c` with the mean probabilities `p`,
        minus the cross-entropy; of several, as of pixels, the mean over samples is of the exponentials of their sum.
        """
        draws, likelihood, targets = self._drawn(y)
        return likelihood.mean_log_prob(draws, targets)

    def joint_log_prob(self, y: Any) -> Tensor:
        """`log (1/2K) Σ_k Σ_± Π_n p(y_n | f(x_n) ± φ(x_n)ζ_k)`: all targets jointly, a scalar (paper G.2.1)."""
        # The sum over data is inside the mean over samples: one sample is one function at all inputs.
        return self._log_likelihoods(y).sum(-1).logsumexp(0) - math.log(2 * len(self.deviations))

    def _log_likelihoods(self, y: Any) -> Float[Tensor, "2K N"]:
        draws, likelihood, targets = self._drawn(y)
        return -likelihood.loss(draws, targets)

    def _drawn(self, y: Any) -> tuple[Float[Tensor, "2K N C"], Likelihood, Tensor]:
        """Draws of the flattened outputs, the likelihood of these, and targets."""
        likelihood, targets = self._prepared(y, "log_prob(y)", some_given=False)
        return flattened(self._mirrored, 2), likelihood, targets.to(self.outputs.device)
