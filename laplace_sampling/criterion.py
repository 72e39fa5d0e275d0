"""What chooses the hyperparameters: the evidence, the self-consistency of the approximation, or validation data."""

import math
from typing import TYPE_CHECKING

import torch

from laplace_sampling.data.batches import place
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.linear_model.network_features import NetworkFeatures
from laplace_sampling.linear_model.some_features import SomeFeatures
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.calibration import labelled
from laplace_sampling.predictions.selection import Selection
from laplace_sampling.predictions.self_consistency import SelfConsistency
from laplace_sampling.predictions.validation import Validation

if TYPE_CHECKING:
    from laplace_sampling.held_out import HeldOut
    from laplace_sampling.settings import Settings

__all__ = ["CRITERIA", "selection_of"]

CRITERIA = ("auto", "evidence", "self_consistency", "validation")
# Held-out data that are looked at, at most, and numbers of their outputs: each takes a row of the Jacobian for each of
# its outputs. Both are round numbers that bound the cost, and are not tuned.
_MOST, _NUMBERS = 1000, 2**20


def selection_of(
    criterion: str, settings: "Settings", network: Linearisation, held_out: "HeldOut | None", in_order: bool
) -> Selection | None:
    """The rule of a criterion; `None` for the evidence. A stream of data may be read in its order only.

    Raises:
        ValueError: for one that is not known, that does not go with the likelihood, or that misses its data.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"`criterion={criterion!r}` is not known; use one of {list(CRITERIA)}.")
    quadratic = settings.likelihood.quadratic
    if criterion == "self_consistency" and quadratic:
        raise ValueError(
            '`criterion="self_consistency"` compares the loss with its curvature, which agree everywhere for a '
            'Gaussian likelihood: use "evidence", or "validation" with a `val_loader`.'
        )
    if criterion == "validation" and held_out is None:
        raise ValueError('`criterion="validation"` needs data that the network was not trained on: give `val_loader`.')
    at_mode = settings.hessian_at == "mode" and not quadratic
    if at_mode and criterion in ("self_consistency", "validation"):
        raise ValueError(
            f'`criterion="{criterion}"` takes the curvature at the outputs of the network, one for every prior '
            'precision, but `hessian_at="mode"`: leave that out, or use `criterion="evidence"`.'
        )
    if criterion == "evidence" or at_mode:
        return None
    if criterion == "validation" or (criterion == "auto" and held_out is not None):
        assert held_out is not None
        return _validation(network, held_out)
    # Other losses have a curvature that is a mean over targets, or a Gaussian part: their rises differ from the start.
    of_labels = labelled(settings.likelihood) is not None or isinstance(settings.likelihood, Poisson)
    return SelfConsistency(in_order=in_order) if of_labels or criterion == "self_consistency" else None


def _validation(network: Linearisation, held_out: "HeldOut") -> Validation:
    """The rule on a part of the held-out data."""
    data = held_out.data
    most = max(1, min(_MOST, _NUMBERS // held_out.layout.size))
    some = torch.arange(0, data.num_data, 1 if data.in_order else math.ceil(data.num_data / most))[:most]
    features = SomeFeatures(NetworkFeatures(network, data, held_out.layout), some)
    outputs = []
    for batch in some.split(data.batch_size):
        found, layout = network.evaluate(place(data.inputs(batch), network.device, network.dtype))
        outputs.append(layout.widen(found.reshape(len(batch), -1), held_out.layout))
    return Validation(features, torch.cat(outputs), held_out.targets[some], held_out.likelihood)
