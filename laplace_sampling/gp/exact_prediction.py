"""The posterior of the function at some inputs, from an eigendecomposition in observation space."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.gram import gram, gram_blocks
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.row_blocks import row_blocks

__all__ = ["ExactPrediction", "PosteriorAt"]


@dataclass(frozen=True)
class ExactPrediction:
    r"""Posterior of the function `φ(x) θ` at some inputs, for every `α` and `b`; noise is not included.

    `k(x, x)/α − Q diag(1/v) Qᵀ/α²` with `Q = k(x, X) R^{-1/2} U` and `v = λ/α + 1/b`.

    Attributes:
        features: `φ(x)`.
        variance: of the weights at `α = 1`, `[P]`.
        rotated: `Q` at `α = 1`, `[M·C, N·C]`.
        eigenvalues: `λ`.
        targets: `c`.
        block_bytes: memory for rows of the Jacobian.
    """

    features: Features
    variance: Float[Tensor, " P"]
    rotated: Float[Tensor, "MC NC"]
    eigenvalues: Float[Tensor, " NC"]
    targets: Float[Tensor, " NC"]
    block_bytes: float = BLOCK_BYTES

    @cached_property
    def _blocks(self) -> Float[Tensor, "M C C"]:
        return gram_blocks(self.features, self.variance, block_bytes=self.block_bytes)

    @cached_property
    def _gram(self) -> Float[Tensor, "MC MC"]:
        return gram(self.features, self.variance, block_bytes=self.block_bytes)

    @cached_property
    def _diagonal(self) -> Float[Tensor, "M C"]:
        """The diagonal of `k(x, x)`, from rows of the Jacobian: blocks of many outputs would not fit in memory."""
        if "_blocks" in vars(self):
            return self._blocks.diagonal(dim1=1, dim2=2)
        parts = [rows**2 @ self.variance for _, rows in row_blocks(self.features, self.block_bytes)]
        return torch.cat(parts).reshape(-1, self.features.num_outputs)

    def _variances(self, precision: float, noise_precision: float) -> Float[Tensor, " NC"]:
        """`v`."""
        return self.eigenvalues / precision + 1 / noise_precision

    def mean(self, precision: float, noise_precision: float) -> Float[Tensor, "M C"]:
        """`φ(x) θ̄`: add the offset of the linear model at `x` for the mean of its outputs."""
        v = self._variances(precision, noise_precision)
        return (self.rotated @ (self.targets / v) / precision).reshape(-1, self.features.num_outputs)

    def covariance(self, precision: float, noise_precision: float) -> Float[Tensor, "M C C"]:
        """Covariance of the outputs of each input."""
        v = self._variances(precision, noise_precision)
        Q = self.rotated.unflatten(0, (-1, self.features.num_outputs))
        return (self._blocks - (Q / (v * precision)) @ Q.mT) / precision

    def stddev(self, precision: float, noise_precision: float) -> Float[Tensor, "M C"]:
        """Standard deviation of each output of each input."""
        v = self._variances(precision, noise_precision)
        reduction = (self.rotated**2 @ (1 / (v * precision))).reshape(-1, self.features.num_outputs)
        # The difference of two nearly equal numbers can be below zero by rounding.
        return ((self._diagonal - reduction) / precision).clamp_min(0).sqrt()

    def joint_covariance(self, precision: float, noise_precision: float) -> Float[Tensor, "MC MC"]:
        """Covariance over all inputs and outputs, the outputs of an input adjacent."""
        v = self._variances(precision, noise_precision)
        return (self._gram - (self.rotated / (v * precision)) @ self.rotated.T) / precision


@dataclass(frozen=True)
class PosteriorAt:
    """Posterior of the function at some inputs, at one prior precision.

    Attributes:
        mean: of `φ(x)θ`, `[M, C]`; add the offset of the linear model at `x`.
        precision: `α`.
        prediction: the covariance, for every `α`.
    """

    mean: Float[Tensor, "M C"]
    precision: float
    prediction: ExactPrediction

    def covariance(self) -> Float[Tensor, "M C C"]:
        """Covariance of the outputs of each input."""
        return self.prediction.covariance(self.precision, 1.0)

    def stddev(self) -> Float[Tensor, "M C"]:
        """Standard deviation of each output of each input."""
        return self.prediction.stddev(self.precision, 1.0)

    def joint_covariance(self) -> Float[Tensor, "MC MC"]:
        """Covariance over all inputs and outputs, the outputs of an input adjacent."""
        return self.prediction.joint_covariance(self.precision, 1.0)
