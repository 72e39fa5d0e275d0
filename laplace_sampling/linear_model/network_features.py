"""The features `Φ` of a network, by forward- and reverse-mode products."""

import copy
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.data.batches import Layout, num_rows, place, take
from laplace_sampling.data.processes import Processes
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.linear_model.datum_rows import DatumRows
from laplace_sampling.linear_model.features import Curvature, Features
from laplace_sampling.networks.layers import vjp_by_layers
from laplace_sampling.networks.linearisation import Linearisation


class NetworkFeatures(Features):
    """`Φ` of a network on its training data, by forward- and reverse-mode products.

    Args:
        network: linearised network.
        data: training data.
        layout: layout of the outputs of a datum; the outputs of a batch with less padding are widened to it by zeros.
    """

    def __init__(self, network: Linearisation, data: TrainingData, layout: Layout) -> None:
        self.network, self.data, self.layout = network, data, layout
        self.num_data, self.num_outputs = data.num_data, layout.size
        self.size, self.batch_size = network.num_parameters, data.batch_size

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def processes(self) -> Processes:
        return self.data.processes

    @property
    def collective(self) -> bool:
        return self.processes.size > 1 and self.network.shell.mesh is not None

    @property
    def counts(self) -> MutableMapping[str, int]:
        return self.network.products

    def own(self, batch: Tensor) -> Tensor | slice:
        if self.processes.size == 1:
            return slice(None)
        if self.collective:
            part = self.processes.part(len(batch))
            return slice(part.start, part.stop)
        part = self.data.part
        return (batch >= part.start) & (batch < part.stop)

    def in_float64(self) -> Features:
        if self.dtype == torch.float64:
            return self
        other = copy.copy(self)
        try:
            other.network = self.network.in_float64()
            computed = other.network(other.inputs(torch.tensor([0]))[0]).dtype
        except Exception:  # some networks cannot be copied, or compute in a dtype of their own
            return self
        return other if computed == torch.float64 else self

    def inputs(self, batch: Tensor) -> tuple[Any, Layout]:
        """The inputs, and the layout of the outputs that the network gives for them."""
        # Only ragged data need a forward pass for the layout, which depends on the padding of each batch.
        x = place(self.data.inputs(batch), self.device, self.dtype)
        return x, self.network.evaluate(x)[1] if self.data.ragged else self.layout

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        return layout.widen(self.network.jvp(x, v), self.layout)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        return self.network.vjp(x, self.layout.narrow(u, layout))

    def ggn(self, v: Tensor, batch: Tensor, curvature: Curvature) -> Tensor:
        x, layout = self.inputs(batch)
        if layout == self.layout:
            return self.network.ggn(x, v, curvature)
        return self.network.ggn(x, v, lambda u: self.layout.narrow(curvature(layout.widen(u, self.layout)), layout))

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        return self.network.vjp_each(x, self.layout.narrow(u, layout))

    def datum_rows(self, u: Tensor, batch: Tensor) -> DatumRows:
        # Layers are those of a whole network, not of some of its weights or a head.
        if type(self.network).vjp_each is Linearisation.vjp_each:
            x, layout = self.inputs(batch)
            layers = vjp_by_layers(self.network, x, self.layout.narrow(u, layout))
            if layers is not None:
                return DatumRows.of_layers(self.size, layers)
        return super().datum_rows(u, batch)

    def rows(self, batch: Tensor) -> Tensor:
        x, layout = self.inputs(batch)
        rows = self.network.jacobian(x)
        return rows if layout == self.layout else layout.widen(rows.mT, self.layout).mT


def features_at(
    network: Linearisation, x: Any, batch_size: int | None = None, layout: Layout | None = None
) -> NetworkFeatures:
    """The features `φ(x)` of a network at inputs without targets, `[N, ...]`.

    Args:
        network: linearised network.
        x: inputs as the network takes them.
        batch_size: number of inputs that go through the network together, by default all.
        layout: layout of the outputs, if it is known; else one input goes through the network.
    """
    layout = layout or network.evaluate(take(x, slice(1)))[1]
    return NetworkFeatures(network, TrainingData.unlabelled(x, batch_size or num_rows(x)), layout)
