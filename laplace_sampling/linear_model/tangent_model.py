"""`TangentModel`: the linear model of a network on training data, and what it comes from."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.linear_model.dense_curvature import HeldCurvatures
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel

if TYPE_CHECKING:
    from laplace_sampling.networks.linearisation import Linearisation

__all__ = ["TangentModel", "is_accumulated", "with_offset", "zeros_as"]

# Bytes of a Jacobian that is held: products with it are then cheaper than those of a network. It is a round number that
# bounds memory, and is not tuned.
_MOST_HELD = 2e8


@dataclass(frozen=True)
class TangentModel:
    """A linear model, and the network and data that it comes from.

    Attributes:
        model: linear model of the targets, still without an offset; with `weights`, of the targets times these.
        network: linearised network.
        data: training data.
        kind: `"affine"` or `"homogeneous"`.
        layout: layout of the outputs of a datum.
        weights: `R^{-1/2}` of given noise variances, `[N, C]`.
        in_order: whether the features can read the data in one order only, so that there are no mini-batches.
    """

    model: LinearModel
    network: "Linearisation"
    data: TrainingData
    kind: str
    layout: Layout
    weights: Float[Tensor, "N C"] | None = None
    in_order: bool = False

    @property
    def log_scale(self) -> float:
        """`½ Σ log R` over the targets: what the loss of the targets has on top of the loss of the model."""
        if self.weights is None:
            return 0.0
        return -float(self.weights.log().where(self.model.observed(), 0).sum())

    def with_offset(self) -> LinearModel:
        """The model with the offset of its kind, in the precision of the network."""
        counts = dict(self.network.products)
        model = with_offset(self.model, self.network.weights, self.kind)
        # It is part of the model, not of a fit.
        self.network.products.update(counts)
        return model

    def in_float64(self) -> LinearModel:
        """The model in float64, with the Jacobian of the network in float64 where the network allows.

        In float32 a Jacobian computed twice may differ by much more than rounding: a ReLU with an input near zero is on
        in one pass and off in another. Covariances in observation space are differences of products with both.
        """
        precise = replace(
            self.model, features=self.model.features.in_float64(), network_outputs=self.model.network_outputs.double()
        )
        return with_offset(precise, self.network.weights, self.kind)

    def dense(self) -> LinearModel:
        """The model for dense algebra in the space of the weights, in float64 where the network allows.

        With its Jacobian in memory, or, where that is large and has more rows than columns, without.
        """
        model, features = self.model, self.model.features.in_float64()
        rows, size = features.num_data * features.num_outputs, features.size
        if not is_accumulated(rows, size):
            features = DenseFeatures.of(features)
        if rows >= size:
            features = features.holding_curvature(HeldCurvatures())
        dense = replace(model, features=features, network_outputs=model.network_outputs.double())
        return with_offset(dense, self.network.weights, self.kind)


def is_accumulated(rows: int, size: int) -> bool:
    """Whether `M` of `P` weights is accumulated over the rows of the Jacobian, in place of holding them."""
    return rows >= size and 8 * rows * size > _MOST_HELD


def with_offset(model: LinearModel, trained_weights: Float[Tensor, " P"], kind: str) -> LinearModel:
    """The model with the offset of its kind: `f − Φw̄` or zero."""
    # `o = f(w̄) − Φw̄`, so that the affine model agrees with the network at the trained weights.
    f, features = model.network_outputs, model.features
    if kind == "homogeneous":
        return replace(model, offset=zeros_as(f))
    return replace(model, offset=f - features.outputs(trained_weights[None].to(features.dtype))[0])


def zeros_as(f: Tensor) -> Tensor:
    """Zeros in the shape of the outputs, which take no memory."""
    return f.new_zeros(1, 1).expand_as(f)
