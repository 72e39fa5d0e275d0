"""The linear model of a network on the data of a loader, after checks of network, data and targets."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout, batched, place
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.training_data import TrainingData, Unpack
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood, check_some_given
from laplace_sampling.likelihoods.measurement import Observation
from laplace_sampling.likelihoods.weighted import check_weights, weighted
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.network_features import NetworkFeatures
from laplace_sampling.linear_model.observed_features import observe
from laplace_sampling.linear_model.tangent_model import TangentModel, zeros_as
from laplace_sampling.linear_model.weighted_features import noise_weights, weigh
from laplace_sampling.networks.consistency import check_consistency
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.checks import as_numbers

__all__ = ["tangent_model_of"]


def tangent_model_of(
    network: Linearisation,
    likelihood: Likelihood,
    loader: Iterable[Any],
    *,
    kind: str,
    observation: Observation | None = None,
    noise_variances: Tensor | None = None,
    weights: Tensor | Sequence[float] | None = None,
    unpack: Unpack | None = None,
    num_data: int | None = None,
    processes: Processes = ALONE,
) -> TangentModel:
    r"""The tangent model on training data.

    Args:
        network: linearised network.
        likelihood: likelihood of the targets.
        loader: batches of inputs and targets.
        kind: `"affine"`, with the offset `f − φw̄`, or `"homogeneous"`, without.
        observation: `T` of targets `y = T f(x) + noise`, applied to the outputs of each datum.
        noise_variances: `R`, the noise variance of each datum or of each of its outputs, in units of `1/b`.
        weights: weight of each datum in the sum of losses; for a Gaussian likelihood `1/R`.
        unpack: `batch -> (inputs, targets)`.
        num_data: number of data of a stream.
        processes: those that share out the data.

    Raises:
        TypeError, ValueError: for data that do not fit the model or the likelihood, or that cannot be read twice.
    """
    data = TrainingData(
        loader,
        unpack=unpack,
        num_data=num_data,
        fill=likelihood.fill,
        missing=likelihood.takes_missing,
        processes=processes,
    )
    if noise_variances is not None and not likelihood.quadratic:
        raise ValueError(
            f"`noise_variances` are of a regression, but the likelihood is {likelihood.name!r}, which has no noise "
            "variance; leave them out."
        )
    if not bool(network.weights.isfinite().all()):
        raise ValueError("The weights of the model contain NaN or infinity; train or load it again.")
    if weights is not None:
        weights = as_numbers("`weights`", weights)
        check_weights(weights, data.num_data)
        if likelihood.quadratic:
            # Weights of a Gaussian likelihood are precisions: as noise variances they keep its loss quadratic.
            weights, noise_variances = None, _as_variances(weights, noise_variances)
    features, outputs = _features(network, data)
    model = _with_missing(_with_targets(features, outputs, likelihood, data, observation, weights))
    row_weights = None
    if noise_variances is not None:
        shape = data.num_data, model.network_outputs.shape[1]
        row_weights = noise_weights(noise_variances, shape).to(network.device)
        model = weigh(model, row_weights)
    return TangentModel(
        model,
        network,
        data,
        kind,
        features.layout,
        row_weights,
        features.data.in_order,
    )


def _features(network: Linearisation, data: TrainingData) -> tuple[NetworkFeatures, Float[Tensor, "N C"]]:
    """The features, and the outputs of the network, after checks of both."""
    first_batch = torch.arange(min(data.batch_size, data.num_data))
    own = torch.arange(data.part.start, data.part.stop)
    if data.processes.size > 1 and network.shell.shards is not None:
        batches = data.processes.even_pieces(own, data.num_data, data.batch_size)
    else:
        batches = list(own.split(data.batch_size)) if len(own) else []
    with data.processes.local_only():
        x = _inputs(network, data, batches[0]) if batches else None
    first = None if x is None else network(x)
    # With random weights in the last layer only, its inputs are kept: products then skip the rest of the network.
    with network.keep_inputs(data) as kept:
        outputs, layout = _outputs(network, data, batches, first)
    features = NetworkFeatures(*network.shortened(data, kept), layout)
    features.network.known_layers = None  # the network may use its weights in another way than at an earlier fit
    check_consistency(network, _inputs(network, data, first_batch))
    return features, outputs.reshape(data.num_data, layout.size)


def _with_targets(
    features: NetworkFeatures,
    outputs: Float[Tensor, "N C"],
    likelihood: Likelihood,
    data: TrainingData,
    observation: Observation | None,
    weights: Tensor | None,
) -> LinearModel:
    """The linear model, still without an offset, after checks of targets and likelihood."""
    targets = _placed(data.all_targets(), outputs.device)
    model = LinearModel(features, zeros_as(outputs), outputs, targets, likelihood)
    # Targets of measurements fit `T f`, not `f`: they are checked against the measured outputs.
    if observation is not None:
        model = observe(model, observation, model.targets)
        targets = model.targets
        model.likelihood.check_targets(model.network_outputs.shape, targets)
        check_some_given(model.likelihood, targets)
    else:
        likelihood, targets = model.likelihood.prepare(features.layout, model.targets)
        if weights is not None:
            likelihood, targets = weighted(likelihood, targets, weights)
        model = replace(model, targets=targets, likelihood=likelihood)
    if not bool(model.losses(model.network_outputs).isfinite().all()):
        largest = float(model.network_outputs.abs().max())
        raise ValueError(
            f"The loss of the model on the data is not finite; check targets and noise precision, and the weights of "
            f"the model, whose largest output is {largest:.3g}."
        )
    model.likelihood.check_curvature(model.network_outputs, model.targets)
    return model


def _with_missing(model: LinearModel) -> LinearModel:
    """The model of a regression, whose likelihood knows whether some data have targets at some outputs only.

    Raises:
        ValueError: for an output without any target whose noise is to be learnt.
    """
    likelihood = model.likelihood
    if not isinstance(likelihood, Gaussian):
        return model
    num = model.num_targets()
    if likelihood.learn and likelihood.noise_precisions().dim() and not bool(num.all()):
        raise ValueError(
            f"Output {int(num.argmin())} has no target at any datum, so that its noise precision cannot be learnt: "
            "give one for all outputs, `Gaussian(b)`, or `Gaussian(..., learn=False)`."
        )
    observed = model.observed()
    return model.with_likelihood(replace(likelihood, partly=bool((observed != observed[:, :1]).any())))


def _as_variances(weights: Tensor, noise_variances: Tensor | None) -> Tensor:
    if noise_variances is not None:
        raise ValueError("`weights` of a regression are `1/noise_variances`: give one of them.")
    if not bool((weights > 0).all()):
        raise ValueError(
            f"`weights` of a regression are `1/noise_variances`, so positive, but {int((weights == 0).sum())} are 0: "
            "leave these data out, as by `torch.utils.data.Subset(dataset, weights.nonzero()[:, 0].tolist())`."
        )
    return 1 / weights.double()


def _placed(y: Any, device: torch.device) -> Any:
    tensors, rebuild = batched(y)
    return rebuild([tensor.detach().to(device) for tensor in tensors])


def _inputs(network: Linearisation, data: TrainingData, batch: Tensor) -> Any:
    return place(data.inputs(batch), network.device, network.dtype)


def _outputs(
    network: Linearisation, data: TrainingData, batches: list[Tensor], first: Tensor | None
) -> tuple[Float[Tensor, "N C"], Layout]:
    """The outputs, and their layout, the largest of all batches.

    Args:
        network: linearised network.
        data: training data.
        batches: of this process.
        first: outputs of the first of them: another run shows a random forward, such as dropout that stays on.
    """
    outputs, found = [], []

    def layout_of_part() -> tuple[Layout, torch.dtype] | None:
        for number, batch in enumerate(batches):
            with data.processes.local_only():
                x = _inputs(network, data, batch)
            output, layout = network.evaluate(x)
            outputs.append(output.reshape(len(batch), -1))
            found.append(layout)
            if not bool(output.isfinite().all()):
                number = int(batch[0]) // data.batch_size
                raise ValueError(f"The model gives NaN or infinity on batch {number} (counted from 0) of the data.")
            if number == 0 and first is not None and not torch.equal(first, output):
                raise ValueError(
                    "The model gives different outputs for the same input in evaluation mode. Remove what is random "
                    "in its forward (for example `F.dropout(..., training=True)`)."
                )
        return (reduce(Layout.union, found), outputs[0].dtype) if found else None

    found_by_all = [one for one in data.processes.gathered(layout_of_part) if one is not None]
    layout, dtype = reduce(Layout.union, [layout for layout, _ in found_by_all]), found_by_all[0][1]
    # Batches with less padding have fewer outputs: all get those of the largest.
    widened = [narrow.widen(output, layout) for narrow, output in zip(found, outputs, strict=True)]
    own = torch.cat([torch.zeros(0, layout.size, dtype=dtype, device=network.device), *widened])
    return data.processes.all_rows(own, data.num_data, data.part), layout
