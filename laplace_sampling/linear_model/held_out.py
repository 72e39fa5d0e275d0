"""`HeldOut`: data that the network was not trained on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.data.batches import Layout, batched, digest, place
from laplace_sampling.data.processes import Processes
from laplace_sampling.data.training_data import Data, TrainingData
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import NetworkFeatures, SomeFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.placement import chosen


@dataclass(frozen=True)
class HeldOut:
    """Data that the network was not trained on.

    Attributes:
        data: the inputs.
        targets: as the likelihood takes them.
        likelihood: of the targets.
        layout: of the outputs, the largest of all batches.
    """

    data: TrainingData
    targets: Tensor
    likelihood: Likelihood
    layout: Layout

    @classmethod
    def read(
        cls,
        loader: Iterable[Any],
        network: Linearisation,
        likelihood: Likelihood,
        processes: Processes,
        options: Data,
    ) -> "HeldOut":
        """The data of a loader: all of them in each of the processes that share a fit, whose samplers may give parts.

        Raises:
            TypeError, ValueError: as for training data.
        """
        try:
            data = TrainingData(
                loader,
                unpack=options.unpack,
                num_data=options.num_data,
                fill=likelihood.fill,
                missing=likelihood.takes_missing,
                sampled_by=processes,
            )
            _check_alike(data, processes)
            some = torch.arange(data.num_data).split(data.batch_size) if data.ragged else [torch.arange(1)]
            inputs = (place(data.inputs(batch), network.device, network.dtype) for batch in some)
            layout = reduce(Layout.union, (network.evaluate(x)[1] for x in inputs))
            likelihood, targets = likelihood.prepare(layout, data.targets)
            return cls(data, targets.to(network.device), likelihood, layout)
        except (TypeError, ValueError) as error:
            error.add_note("These are the data of `val_loader`.")
            raise

    def with_targets(self, some: Tensor) -> Tensor:
        """The indices of those data that have a target at any output."""
        return chosen(some, self.likelihood.observed(self.targets[some], self.layout.size).any(1))

    def model(self, network: Linearisation, some: Tensor) -> LinearModel:
        """The tangent model on some of these data, by their indices, without an offset.

        Raises:
            ValueError: if an output is not finite.
        """
        data, outputs = self.data, []
        for batch in some.split(data.batch_size):
            found, layout = network.evaluate(place(data.inputs(batch), network.device, network.dtype))
            outputs.append(layout.widen(found.reshape(len(batch), -1), self.layout))
        outputs = torch.cat(outputs)
        check_finite(outputs)
        features = SomeFeatures(NetworkFeatures(network, data, self.layout), some)
        return LinearModel(features, torch.zeros_like(outputs), outputs, self.targets[some], self.likelihood)


def _check_alike(data: TrainingData, processes: Processes) -> None:
    """Raise if processes that share a fit have other held-out data, from which they would choose other numbers."""
    if processes.size > 1 and processes.differing({"data": digest(("", y) for y in batched(data.targets)[0])}):
        raise ValueError(
            "The processes have different held-out data: give each the same `val_loader` of all data, or one that "
            "differs by its sampler only, such as a DistributedSampler. A stream must be whole in each."
        )


def check_calibration(call: str, observation: Any, unequal_noise: bool) -> None:
    """Raise if held-out data say nothing of these predictions."""
    if observation is not None:
        raise ValueError(f"`{call}` does not go with `observe`: there is no scale for measurements.")
    if unequal_noise:
        raise ValueError(f"`{call}` does not go with `Data(noise_variances=...)`, which the fit was given.")


def check_finite(*found: Tensor) -> None:
    """Raise if what is predicted of held-out data is not finite."""
    if not all(bool(values.isfinite().all()) for values in found):
        raise ValueError(
            "The outputs of the model on the data of `val_loader`, or their error bars, contain NaN or infinity: "
            "check these data, or leave them out."
        )
