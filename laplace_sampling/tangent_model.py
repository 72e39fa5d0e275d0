"""The linear model of a network on training data; what can be wrong with network, data or targets is found here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data import TrainingData
from laplace_sampling.likelihoods import Gaussian, Likelihood
from laplace_sampling.linear_operators import LinearOperator
from laplace_sampling.linearise import Linearisation
from laplace_sampling.measurements import Measurement, noise_weights, observe, weigh
from laplace_sampling.operators import DenseFeatures, NetworkFeatures
from laplace_sampling.sampling import LinearModel

__all__ = ["Observation", "TangentModel", "tangent_model"]

Observation = Measurement | Tensor | LinearOperator | tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class TangentModel:
    """A linear model, and where it comes from.

    Attributes:
        model: of the targets; of targets times `weights`, if there are any.
        network: the linearised network.
        data: the training data.
        kind: `"affine"` or `"homogeneous"`.
        weights: `R^{-1/2}` of noise variances that were given, `[N, C]`.
    """

    model: LinearModel
    network: Linearisation
    data: TrainingData
    kind: str
    weights: Float[Tensor, "N C"] | None = None

    @property
    def log_scale(self) -> float:
        """`½ Σ log R`: losses of the targets are those of the model and this."""
        return 0.0 if self.weights is None else -float(self.weights.log().sum())

    def in_float64(self) -> LinearModel:
        """The model in float64, with the Jacobian of the network in float64 where the network allows.

        In float32 a Jacobian computed twice may differ by much more than rounding: a unit of almost no input is on in
        one pass and off in another. Covariances in observation space are differences that take them for the same.
        """
        precise = replace(
            self.model, features=self.model.features.in_float64(), network_outputs=self.model.network_outputs.double()
        )
        return _with_offset(precise, self.network, self.kind)

    def dense(self) -> LinearModel:
        """The model with its Jacobian in memory, in float64."""
        dense = replace(
            self.model,
            features=DenseFeatures.of(self.model.features),
            network_outputs=self.model.network_outputs.double(),
        )
        return _with_offset(dense, self.network, self.kind)


def tangent_model(
    network: Linearisation,
    likelihood: Likelihood,
    loader: Iterable[Any],
    *,
    kind: str,
    observation: Observation | None = None,
    noise_variances: Tensor | None = None,
) -> TangentModel:
    r"""The tangent model on training data.

    Args:
        network: the linearised network.
        likelihood: of the targets.
        loader: of pairs `(x, y)`.
        kind: `"affine"`, with the offset `f − φw̄`, or `"homogeneous"`.
        observation: `T` of targets `y = T f(x) + noise`, of the outputs of each datum.
        noise_variances: `R`, the noise variance of each datum or of each of its outputs, in units of `1/b`.

    Raises:
        TypeError, ValueError: for data that do not fit the model or the likelihood, or that cannot be read twice.
    """
    with torch.random.fork_rng(devices=[]):  # a shuffled loader draws from the global generator
        data = TrainingData(loader)
    if noise_variances is not None and not isinstance(likelihood, Gaussian):
        raise ValueError(
            f"`noise_variances` are of a regression, but the likelihood is {likelihood.name!r}, which has no noise "
            "variance; leave them out."
        )
    if not bool(network.weights.isfinite().all()):
        raise ValueError("The weights of the model contain NaN or infinity; train or load it again.")
    outputs = _outputs(network, data)
    targets = data.targets.to(network.device)
    f = outputs.reshape(data.num_data, -1)
    features = NetworkFeatures(network, data, f.shape[1])
    model = LinearModel(features, torch.zeros_like(f), f, targets, likelihood)
    if observation is not None:
        model = observe(model, observation, targets)
        likelihood.check_targets(model.network_outputs.shape, model.targets)
    else:
        likelihood.check_targets(outputs.shape, targets)
    if not bool(likelihood.loss(model.network_outputs, model.targets).isfinite().all()):
        raise ValueError("The loss of the model on the data is not finite; check targets and noise precision.")
    weights = None
    if noise_variances is not None:
        weights = noise_weights(noise_variances.to(network.device), (data.num_data, model.network_outputs.shape[1]))
        model = weigh(model, weights)
    return TangentModel(_with_offset(model, network, kind), network, data, kind, weights)


def _outputs(network: Linearisation, data: TrainingData) -> Float[Tensor, "N *C"]:
    outputs = []
    for number, batch in enumerate(torch.arange(data.num_data).split(data.batch_size)):
        x = data.inputs(batch).to(network.device)
        outputs.append(network(x))
        if not bool(outputs[-1].isfinite().all()):
            raise ValueError(f"The model gives NaN or infinity on batch {number} (counted from 0) of the data.")
        if number == 0 and not torch.equal(network(x), outputs[0]):
            raise ValueError(
                "The model gives different outputs for the same input in evaluation mode. Remove what is random "
                "in its forward (for example `F.dropout(..., training=True)`)."
            )
    return torch.cat(outputs)


def _with_offset(model: LinearModel, network: Linearisation, kind: str) -> LinearModel:
    f, features = model.network_outputs, model.features
    if kind == "homogeneous":
        return replace(model, offset=torch.zeros_like(f))
    return replace(model, offset=f - features.outputs(network.weights[None].to(features.dtype))[0])
