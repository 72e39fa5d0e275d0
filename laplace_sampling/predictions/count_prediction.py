"""Predictions of counts."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.predictions.prediction import SampledPrediction

__all__ = ["CountPrediction"]


@dataclass(frozen=True)
class CountPrediction(SampledPrediction):
    """Predictions of counts: the outputs are logarithms of rates, and so are `samples`, `variance` and `stddev`."""

    @property
    def log_rate(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @property
    def epistemic(self) -> Float[Tensor, " N"]:
        """How little the data say of a datum: `√(Σ var f)`, of the logarithms of its rates, summed over its outputs."""
        return self._total_stddev

    @cached_property
    def mean(self) -> Float[Tensor, "N *C"]:
        """The expected count, `E[eᶠ] = exp(f + ½ var f)` of a Gaussian `f`."""
        return (self.outputs + self.variance / 2).exp()

    @property
    def observation_variance(self) -> Float[Tensor, "N *C"]:
        """Variance of a new count, `E[eᶠ] + var eᶠ`: that of a Poisson variable, and of its rate."""
        return self.mean + self.mean**2 * self.variance.expm1()
