"""From loaders to what tells how unlike the training data an input is."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import place
from laplace_sampling.data.training_data import Data, TrainingData
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.networks.layer_inputs import Features, layer_inputs, watched
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.novelty import MOST_DATA, Novelty
from laplace_sampling.settings import Settings

# So that there is a p-value below .1, and covariances and neighbours are of something.
_LEAST_RANKED = 10


def novelty_by(
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None,
    network: Linearisation,
    settings: Settings,
    data: Data,
) -> Novelty:
    """What tells by training data, and by held-out data if there are any, how new an input is.

    Raises:
        TypeError, ValueError: as for training data; for fewer than ten of them; for a network without layers.
    """
    trained = _read_inputs(train_loader, settings, data)
    layers = layer_inputs(network, place(trained.inputs(torch.arange(3)), network.device, network.dtype))

    def features(data: TrainingData) -> Features:
        some = _spread(data).split(data.batch_size)
        inputs = (place(data.inputs(batch), network.device, network.dtype) for batch in some)
        with watched(network, layers) as seen:
            for x in inputs:
                network.evaluate(x)
        return Features.joined(seen)

    try:
        held_out = None if val_loader is None else features(_read_inputs(val_loader, settings, data))
    except (TypeError, ValueError) as error:
        error.add_note("These are the data of `val_loader`.")
        raise
    one_each = isinstance(settings.likelihood, Categorical) and trained.targets.shape == (trained.num_data,)
    labels = trained.targets[_spread(trained)].to(network.device) if one_each else None
    return Novelty.of(layers, network.fingerprint(), features(trained), held_out, labels)


def _spread(data: TrainingData) -> Tensor:
    """Some data from all of them, which may be in the order of their classes."""
    return torch.linspace(0, data.num_data - 1, min(MOST_DATA, data.num_data)).long()


def _read_inputs(loader: Iterable[Any], settings: Settings, data: Data) -> TrainingData:
    """All data of a loader, whatever their targets are."""
    read = TrainingData(
        loader,
        unpack=data.unpack,
        num_data=data.num_data,
        fill=settings.likelihood.fill,
        missing=True,
        sampled_by=settings.processes,
    )
    if read.num_data < _LEAST_RANKED:
        raise ValueError(
            f"`calibrate_novelty` ranks inputs among {read.num_data} data: give {_LEAST_RANKED} or more, as its "
            "smallest p-value is one over their number."
        )
    return read


def novelty_at(novelty: Novelty, network: Linearisation, x: Any) -> Float[Tensor, " N"]:
    """Novelty of some inputs, by one forward pass."""
    x = place(x, network.device, network.dtype)
    with novelty.watching(network, x) as seen:
        outputs = network(x)
    return novelty(seen, len(outputs))
