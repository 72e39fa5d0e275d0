"""The linear model of a network on its training data, and the mode of its posterior.

A `TangentModel` is the linear model with the network and the data that it comes from.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.arguments import as_numbers
from laplace_sampling.data.batches import Layout, batched, flattened, place
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.training_data import Data, TrainingData
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood, check_some_given
from laplace_sampling.likelihoods.measurement import Observation, as_measurement
from laplace_sampling.likelihoods.weighted import check_weights, weighted
from laplace_sampling.linear_model.features import (
    BLOCK_BYTES,
    DenseFeatures,
    Features,
    NetworkFeatures,
    ObservedFeatures,
    ScaledFeatures,
    WeightedFeatures,
)
from laplace_sampling.linear_model.ggn import GGN, HeldCurvature, first_of
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.consistency import check_consistency
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.placement import chosen
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import Minimum, Objective, Solver


@dataclass(frozen=True)
class LinearModel:
    r"""The tangent model on the training data, `h(θ, x_i) = o_i + φ_i θ`.

    Attributes:
        features: `Φ`.
        offset: `o`, `[N, C]`: `f(w̄, x) − φ(x) w̄` ("affine") or zero ("homogeneous").
        network_outputs: `f(w̄, x_i)`, `[N, C]`.
        targets: `y`.
        likelihood: likelihood of the targets given the outputs.
        held: keeps `M` in full, for dense algebra on few weights.
    """

    features: Features
    # Network and data decide them, so that recorders need not look at them.
    offset: Float[Tensor, "N C"] = field(compare=False)
    network_outputs: Float[Tensor, "N C"] = field(compare=False)
    targets: Tensor = field(compare=False)
    likelihood: Likelihood
    held: HeldCurvature | None = field(default=None, compare=False)

    def outputs(self, theta: Float[Tensor, "K P"]) -> Float[Tensor, "K N C"]:
        """`h(θ_k, x_i)` for all data."""
        return self.offset + self.features.outputs(theta)

    def total_loss(self, outputs: Float[Tensor, "N C"]) -> float:
        """`Σ_i ℓ(y_i, h_i)` at some outputs."""
        return float(_total("loss", first_of(outputs), lambda: self.losses(outputs).double().sum().cpu()))

    def residuals(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """`y_i − h_i` of a regression in float64, zero where there is no target."""
        targets = self.targets.reshape(outputs.shape)
        return (targets - outputs).double().where(~targets.isnan(), 0)

    def squared_errors(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
        """`Σ_i (y_i − h_i)²` of each output of a regression, in float64."""
        return _total("squares", first_of(outputs), lambda: self.residuals(outputs).square().sum(0).cpu())

    def observed(self, targets: Tensor | None = None) -> Bool[Tensor, "n C"]:
        """Which outputs have a target, by default of all data."""
        return self.likelihood.observed(self.targets if targets is None else targets, self.features.num_outputs)

    def num_targets(self) -> Float[Tensor, " C"]:
        """How many data have a target at each output."""
        return self.observed().double().sum(0).cpu()

    @property
    def num_observations(self) -> int:
        """`N·C`, without the outputs that have no target."""
        return int(self.num_targets().sum())

    @property
    def num_data(self) -> int:
        """How many data have a target."""
        return int(self.observed().any(1).sum())

    def with_targets(self, some: Tensor) -> Tensor:
        """The indices of those data that have a target at any output."""
        return chosen(some, self.observed(self.targets[some]).any(1))

    def losses(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
        """`ℓ(y_i, h_i)`, a few data at a time, for a loss makes numbers of the size of the outputs."""
        if not len(outputs):
            return outputs.new_zeros(0)
        rows = max(1, BLOCK_BYTES // (8 * max(1, outputs.shape[1])))
        parts = zip(outputs.split(rows), self.targets.split(rows), strict=True)
        return torch.cat([self.likelihood.loss(h, y) for h, y in parts])

    def with_likelihood(self, likelihood: Likelihood) -> "LinearModel":
        return replace(self, likelihood=likelihood)

    def ggn(self, outputs: Float[Tensor, "N C"]) -> GGN:
        """The GGN with curvature taken at the given outputs."""
        return GGN(self.features, self.likelihood, outputs, self.targets, self.held)


@recorded
def _total(what: str, first: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """A sum over data, which other quantities follow from to the last bit."""
    return compute()


@dataclass(frozen=True)
class Mode:
    """The mode of a linear model.

    Attributes:
        weights: `θ̄`, `[P]`, unscaled.
        outputs: `h(θ̄, x_i)`, `[N, C]`.
        minimum: of the objective.
    """

    weights: Float[Tensor, " P"]
    outputs: Float[Tensor, "N C"]
    minimum: Minimum


class ModeObjective(Objective):
    """`Σ_i ℓ(y_i, h(θ, x_i)) + ½‖θ‖²_A` in the scaled coordinates of a prior."""

    def __init__(self, model: LinearModel, prior: GaussianPrior) -> None:
        self.model = replace(model, features=ScaledFeatures(model.features, prior.scale))
        self.num_data = model.features.num_data
        self.precision = prior.spread()

    def _outputs(self, theta: Tensor, batch: Tensor) -> Tensor:
        return self.model.offset[batch] + self.model.features.jvp(theta, batch)

    @recorded
    def value(self, theta: Tensor) -> float:
        fit = torch.zeros((), dtype=torch.float64, device=theta.device)
        with self.model.features.summing(fit):
            for batch in self.model.features.own_chunks():
                losses = self.model.likelihood.loss(self._outputs(theta, batch), self.model.targets[batch])
                fit += losses.double().sum()
        return float(fit) + 0.5 * float((self.precision * theta.double() ** 2).sum())

    def gradient(self, theta: Tensor, batch: Tensor | None) -> Tensor:
        return self._full_gradient(theta) if batch is None else self._gradient(theta, batch)

    @recorded
    def _full_gradient(self, theta: Tensor) -> Tensor:
        return self._gradient(theta, None)

    def _gradient(self, theta: Tensor, batch: Tensor | None) -> Tensor:
        total = torch.zeros_like(theta)
        with self.model.features.summing(total):
            for chunk in self.model.features.own_chunks(batch):
                slope = self.model.likelihood.gradient(self._outputs(theta, chunk), self.model.targets[chunk])
                total += self.model.features.vjp(slope, chunk)
        # The loss of a mini-batch stands for that of all data, so that its gradient is unbiased.
        weight = 1.0 if batch is None else self.num_data / len(batch)
        return weight * total + self.precision * theta

    def curvature(self, theta: Tensor) -> GGN:
        return self.model.ggn(self.model.outputs(theta)[0])


def linear_model_mode(
    model: LinearModel,
    prior: GaussianPrior,
    solver: Solver,
    init: Float[Tensor, "1 P"] | None = None,
    *,
    description: str | None = None,
) -> Minimum:
    r"""`θ̄ = argmin_θ Σ_i ℓ(y_i, h(θ, x_i)) + ½‖θ‖²_A`, with `½` (erratum E1 of the thesis; eq. 2.7).

    `init` and the result's `value`, `[1, P]`, are in the scaled coordinates `θ/s` of the prior.
    """
    if init is None:
        # Zero, not the trained weights: iterates then stay in the range of `A⁻¹Φᵀ`, where the mode is.
        init = torch.zeros(1, model.features.size, device=model.features.device, dtype=model.features.dtype)
    return solver.minimise(ModeObjective(model, prior), init, description=description)


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
    network: Linearisation
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
        held = HeldCurvature() if rows >= size else None
        dense = replace(model, features=features, network_outputs=model.network_outputs.double(), held=held)
        return with_offset(dense, self.network.weights, self.kind)


def is_accumulated(rows: int, size: int) -> bool:
    """Whether `M` of `P` weights is accumulated over the rows of the Jacobian, in place of holding them."""
    return rows >= size and 8 * rows * size > BLOCK_BYTES


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


def tangent_model_of(
    network: Linearisation,
    likelihood: Likelihood,
    loader: Iterable[Any],
    *,
    kind: str,
    observation: Observation | None = None,
    options: Data | None = None,
    processes: Processes = ALONE,
) -> TangentModel:
    r"""The tangent model on training data.

    Args:
        network: linearised network.
        likelihood: likelihood of the targets.
        loader: batches of inputs and targets.
        kind: `"affine"`, with the offset `f − φw̄`, or `"homogeneous"`, without.
        observation: `T` of targets `y = T f(x) + noise`, applied to the outputs of each datum.
        options: what the loader does not say, such as weights and noise variances.
        processes: those that share out the data.

    Raises:
        TypeError, ValueError: for data that do not fit the model or the likelihood, or that cannot be read twice.
    """
    options = options or Data()
    noise_variances, weights = options.noise_variances, options.weights
    data = TrainingData(
        loader,
        unpack=options.unpack,
        num_data=options.num_data,
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
        if isinstance(model.features, ObservedFeatures) and noise_variances.shape[1:].numel() > 1:
            noise_variances = model.features.measurement.given(noise_variances)
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
    if data.processes.size > 1 and network.shell.mesh is not None:
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
    targets = _placed(data.targets, outputs.device)
    model = LinearModel(features, zeros_as(outputs), outputs, targets, likelihood)
    # Targets of measurements fit `T f`, not `f`: they are checked against the measured outputs.
    if observation is not None:
        model = observe(model, observation, model.targets)
        targets = model.targets
        model.likelihood.check_targets(model.network_outputs.shape, targets)
        check_some_given(model.likelihood, targets, features.num_outputs)
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
    return data.processes.all_rows(own, data.num_data), layout


def observe(model: LinearModel, T: Observation, targets: Tensor) -> LinearModel:
    r"""The linear model of measurements `T h(θ, x)`, in place of that of the outputs.

    Args:
        model: linear model of the outputs; its targets are not used.
        T: see `as_measurement`; `[m, C]`, applied to the outputs of each datum. Measurements that are zero for all
            outputs are left out.
        targets: `y`, `[N, m]`, or in the shape that `T` gives them.

    Raises:
        ValueError: if `T` does not fit the outputs, or `targets` do not fit the measurements.
    """
    features, outputs = model.features, model.network_outputs
    assert isinstance(features, NetworkFeatures)
    everything = as_measurement(T, outputs.reshape(len(outputs), *features.layout.shape))
    measurement = everything.checked(outputs)
    (num, _), shapes = everything.shape, [everything.entries, everything.shape[:1]]
    # Axes of length one neither add to an order nor take from it.
    own = [[length for length in shape if length != 1] for shape in (*shapes, targets.shape[1:])]
    if len(targets) != features.num_data or own[-1] not in own[:2]:
        wanted = " or ".join(dict.fromkeys(str([features.num_data, *shape]) for shape in shapes))
        raise ValueError(f"The targets must be measurements of shape {wanted}, but have shape {list(targets.shape)}.")
    likelihood, left_out = model.likelihood, num - measurement.shape[0]
    precisions = likelihood.noise_precisions()
    if left_out and precisions is not None and precisions.dim():
        raise ValueError(
            f"`Gaussian(noise_precision=..., observe=T)`: {left_out} of {num} measurements are zero whatever the "
            "outputs are, so that their noise is of no use: leave these rows out of T, or give one precision."
        )
    # `T` is linear: measured offset and outputs are those of the linear model `T h`.
    offset, outputs = measurement.apply(model.offset), measurement.apply(outputs)
    return replace(
        model,
        features=ObservedFeatures(features, measurement),
        offset=offset,
        network_outputs=outputs,
        targets=measurement.given(targets.reshape(len(targets), num)).to(offset),
    )


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
