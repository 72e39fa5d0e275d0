r"""Features whose rows have weights: noise of unequal variances `R`.

Targets times `R^{-1/2}` have noise of equal variance, so `weigh` turns their linear model into one that all methods
take.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import flattened
from laplace_sampling.linear_model.features import DerivedFeatures, Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.solvers.checks import as_numbers

if TYPE_CHECKING:
    from laplace_sampling.networks.layers import Outer

__all__ = ["WeightedFeatures", "noise_weights", "weigh"]


class WeightedFeatures(DerivedFeatures):
    """`R^{-1/2}Φ`: each row `φ_ic` has its own weight.

    Args:
        features: `Φ`.
        weights: `R^{-1/2}`, `[N, C]`.
    """

    def __init__(self, features: Features, weights: Float[Tensor, "N C"]) -> None:
        self.features, self.weights = features, weights.to(features.device, features.dtype)
        self.num_data, self.num_outputs = features.num_data, features.num_outputs
        self.size, self.batch_size = features.size, features.batch_size

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self._weights_of(batch) * self.features.jvp(v, batch)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp(u * self._weights_of(batch), batch)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp_each(u * self._weights_of(batch), batch)

    def vjp_by_layers(self, u: Tensor, batch: Tensor) -> "list[Outer] | None":
        return self.features.vjp_by_layers(u * self._weights_of(batch), batch)

    def rows(self, batch: Tensor) -> Tensor:
        return self.features.rows(batch) * self._weights_of(batch)[..., None]

    def _weights_of(self, batch: Tensor) -> Float[Tensor, "n C"]:
        return self.weights[batch]


def noise_weights(noise_variances: Tensor, shape: tuple[int, int]) -> Float[Tensor, "N C"]:
    """`R^{-1/2}` of noise variances that are given for each datum, `[N]`, or each of its outputs, `[N, ...]`.

    Args:
        noise_variances: `R`, in the units of the targets squared, up to the common factor `1/b`.
        shape: `(N, C)`.

    Raises:
        ValueError: if they are of another shape, or not positive and finite.
    """
    variances = as_numbers("`noise_variances`", noise_variances).double()
    if variances.shape[:1] != shape[:1] or variances.numel() not in (shape[0], shape[0] * shape[1]):
        raise ValueError(
            f"`noise_variances` must have one entry a datum, [{shape[0]}], or one an output, {list(shape)}, in the "
            f"order of the dataset, but have shape {list(variances.shape)}."
        )
    if not bool((variances > 0).all()) or not bool(variances.isfinite().all()):
        raise ValueError("`noise_variances` must be positive and finite.")
    return flattened(variances).expand(-1, shape[1]).rsqrt()


def weigh(model: LinearModel, weights: Float[Tensor, "N C"]) -> LinearModel:
    """The linear model of `R^{-1/2} y`, whose noise has the same variance for all data.

    Densities of the targets themselves are those of this model times `Π R^{-1/2}`.

    Args:
        model: of the targets.
        weights: `R^{-1/2}`, see `noise_weights`.
    """
    # Targets, offset and features times `R^{-1/2}` give the loss `½ b ‖R^{-1/2}(y − h)‖²`.
    w = weights.to(model.offset)
    targets = model.targets.reshape(model.offset.shape).to(model.offset)
    return replace(
        model,
        features=WeightedFeatures(model.features, weights),
        offset=w * model.offset,
        network_outputs=w * model.network_outputs,
        targets=w * targets,
    )
