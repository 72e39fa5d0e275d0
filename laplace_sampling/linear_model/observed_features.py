r"""The features `TΦ` of linear measurements of the outputs, `y = T f(x) + noise` (thesis eq. 7.1, 7.5–7.6).

`observe` turns the linear model of the outputs into that of the measurements, `T h(θ, x) = T o + (TΦ) θ`: all methods,
in weight space and in observation space, then work without a change. Predictions of the outputs themselves are made
with the features of the network.
"""

from dataclasses import replace

import torch
from torch import Tensor

from laplace_sampling.likelihoods.measurement import Measurement, Observation, as_measurement
from laplace_sampling.linear_model.features import DerivedFeatures, Features
from laplace_sampling.linear_model.linear_model import LinearModel

__all__ = ["ObservedFeatures", "observe"]


class ObservedFeatures(DerivedFeatures):
    """`TΦ`: the features of measurements of each datum, `[N, m, P]`."""

    def __init__(self, features: Features, measurement: Measurement) -> None:
        self.features, self.measurement = features, measurement
        self.num_data, self.num_outputs = features.num_data, measurement.shape[0]
        self.size, self.batch_size = features.size, features.batch_size

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.measurement.apply(self.features.jvp(v, batch))

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp(self.measurement.adjoint(u), batch)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp_each(self.measurement.adjoint(u), batch)

    def rows(self, batch: Tensor) -> Tensor:
        # A VJP for each measurement: often there are far fewer of them than outputs.
        eye = torch.eye(self.num_outputs, dtype=self.dtype, device=self.device)
        return torch.stack([self.vjp(eye[:, None], datum) for datum in batch.split(1)])


def observe(model: LinearModel, T: Observation, targets: Tensor) -> LinearModel:
    r"""The linear model of measurements `T h(θ, x)`, in place of that of the outputs.

    Args:
        model: linear model of the outputs; its targets are not used.
        T: see `as_measurement`; `[m, C]`, applied to the (flattened) outputs of each datum.
        targets: `y`, `[N, m]`.

    Raises:
        ValueError: if `T` does not fit the outputs, or `targets` do not fit the measurements.
    """
    features = model.features
    measurement = as_measurement(T, features.num_outputs, features.dtype)
    rows, columns = measurement.shape
    if columns != features.num_outputs:
        raise ValueError(
            f"`observe=T` has {columns} columns, but the model gives {features.num_outputs} outputs a datum."
        )
    shape = (features.num_data, rows)
    if targets.numel() != shape[0] * shape[1] or len(targets) != shape[0]:
        raise ValueError(
            f"The targets must be measurements of shape {list(shape)}, but have shape {list(targets.shape)}."
        )
    # `T` is linear: measured offset and outputs are those of the linear model `T h`.
    offset, outputs = measurement.apply(model.offset), measurement.apply(model.network_outputs)
    return replace(
        model,
        features=ObservedFeatures(features, measurement),
        offset=offset,
        network_outputs=outputs,
        targets=targets.reshape(shape).to(offset),
    )
