r"""A temperature from training data and the accuracy on new data.

A network is surer of the labels that it has learnt than of new ones. How sure it is of a label that it has not learnt
is seen on folds `F` of the training data that are left out of the linear model. A Newton step for the others has `δ_F =
(H − M_F)⁻¹ Σ_{i∈F} φ_iᵀ∂ℓ_i`, and, where the prior decides, `H − M_F` is `αA₁`:

    f₋F = f + c φ A₁⁻¹ Σ_{i∈F} φ_iᵀ∂ℓ_i on F,        c = 1/α.

How far to go, `c`, training data do not say: on seven networks it was 1/320 to 1/1.8. But the longer the steps, the
fewer of the left-out labels are predicted rightly; so `c` is that at which they are right as often as new ones are. The
temperature is then the one under which the left-out labels are likeliest. One VJP of each datum and one JVP give the
steps of all `c`.

With Kronecker factors of the other data in place of `αA₁`, which take twenty JVPs more, the temperatures of eleven
networks for MNIST and digits gained less. `docs/decisions.md` has the figures, also for other numbers.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import Features, some_of
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.predictions.calibration import calibrate, labels_of
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.recorded import recorded

# Folds, each of which is left out by itself. With 5 the mean gain of eleven networks was .040 nats, with 10 .042, with
# 50 .044, but a network that is not sure enough needs folds of many data: it gained .043 with 5, .026 with 20.
FOLDS = 20


# Accuracies are known to about so much: the likeliest temperature is that of three accuracies, the one that is given
# and one on either side. At half a percent of errors a single one would decide by a handful of data. Without the two
# others an accuracy that is .03 too high gained .014 nats in place of .037.
SPREAD = 0.03


# Lengths of the steps that are tried, in decades of the length that is as large as the outputs, and in each decade.
# A step of the smallest changes no label, one of the largest leaves nothing of the outputs.
_DECADES, _PER_DECADE = (-6, 4), 4


# The smallest temperature that is looked for: a certain network cannot be made surer.
_LOWEST = math.exp(-5)


def left_out_temperature(
    model: LinearModel, scale: Float[Tensor, " P"], accuracy: float, seed: int, in_order: bool
) -> tuple[float, list[str]]:
    """The likeliest temperature of left-out labels that are predicted as rightly as new ones, and what is wrong.

    Args:
        model: on the training data, at the outputs of the network.
        scale: of the weights in the prior.
        accuracy: the part of new labels that the network predicts rightly.
        seed: of the folds.
        in_order: whether data are read in their order only.
    """
    num = max(1, min(model.features.num_data, NUMBERS_TOGETHER // model.features.num_outputs))
    some = model.with_targets(some_of(model.features, num, None if in_order else seed))
    steps = left_out_steps(model, scale, some, seed, in_order)
    f, y = model.network_outputs[some].double(), model.targets[some]
    if not bool(steps.any()):
        return 1.0, [
            "`accuracy` gives no temperature: the network is certain of all training labels, to the last digit of its "
            "outputs, so that leaving some out changes nothing. Pass `val_loader`."
        ]
    problems = []
    if accuracy > (own := accuracy_of(model.likelihood, f, y)) + SPREAD:
        problems = [
            f"`accuracy={accuracy:g}` is more than the network has on the training data, {own:.3g}. Check the number, "
            "and that these are the data that the network was trained on."
        ]
    # The larger one is at most half of the way to no error.
    accuracies = [accuracy - SPREAD, accuracy, min(accuracy + SPREAD, (1 + accuracy) / 2)]
    outputs = torch.cat([f + length * steps for length in lengths_at(model.likelihood, f, steps, y, accuracies)])
    nothing = torch.zeros_like(outputs)[None]
    found = calibrate(model.likelihood, torch.cat([y] * len(accuracies)), outputs, nothing, ("temperature",), _LOWEST)
    return found.temperature, problems


def lengths_at(
    likelihood: Likelihood, f: Float[Tensor, "n C"], steps: Float[Tensor, "n C"], y: Tensor, accuracies: list[float]
) -> list[float]:
    """The lengths of steps at which so many labels are predicted rightly, interpolated between those of a grid."""
    low, high = _DECADES
    logs = torch.linspace(low, high, (high - low) * _PER_DECADE + 1, dtype=torch.float64) + float(
        (f.square().mean().sqrt() / steps.square().mean().sqrt()).log10()
    )
    found = torch.tensor([accuracy_of(likelihood, f + 10**log * steps, y) for log in logs.tolist()])
    found = found.double().cummin(0).values
    lengths = []
    for accuracy in accuracies:
        index = int((found > accuracy).sum())  # the first that is not above it
        if index in (0, len(found)):
            lengths.append(10 ** float(logs[min(index, len(found) - 1)]))
            continue
        part = (found[index - 1] - accuracy) / (found[index - 1] - found[index])
        lengths.append(10 ** float(torch.lerp(logs[index - 1], logs[index], part)))
    return lengths


def accuracy_of(likelihood: Likelihood, f: Float[Tensor, "n C"], y: Tensor) -> float:
    """The part of the labels that is the likeliest class; of a soft label the probability of that class."""
    labels, targets = labels_of(likelihood), likelihood.unweighted_targets(y)
    counts, predicted = likelihood.weights(y)[:, None] * labels.given(targets), labels.positions(f).argmax(-1)
    if labels.is_soft(targets):
        right = labels.weights_of_classes(targets).gather(-1, predicted[..., None])[..., 0]
    else:
        right = (predicted == labels.labels(targets)[0]).double()
    return float((counts * right).sum() / counts.sum())


@recorded
def left_out_steps(
    model: LinearModel, scale: Float[Tensor, " P"], some: Tensor, seed: int, in_order: bool
) -> Float[Tensor, "n C"]:
    """`φ_i A₁⁻¹ Σ_{j∈F} φ_jᵀ∂ℓ_j` of some data, `F` being the fold of datum `i`, up to a common factor."""
    features, num_folds = model.features, min(FOLDS, model.features.num_data)
    fold = torch.randperm(features.num_data, generator=torch.Generator().manual_seed(seed)) % num_folds
    slopes = model.likelihood.gradient(model.network_outputs.double(), model.targets)
    # Of a network that is certain of its labels they are as small as rounding; their length does not matter.
    slopes = (slopes / slopes.abs().max().clamp_min(1e-300)).to(features.dtype)
    gradients = torch.zeros(num_folds, features.size, dtype=features.dtype, device=features.device)
    steps = torch.zeros(features.num_data, features.num_outputs, dtype=features.dtype, device=features.device)
    with features.summing(gradients):
        for number, data in _parts(features, fold, torch.arange(features.num_data), in_order):
            for chunk in features.own_chunks(data):
                gradients[number] += features.vjp(slopes[chunk][None], chunk)[0]
    gradients *= scale.to(gradients) ** 2
    with features.summing(steps):
        for number, data in _parts(features, fold, some, in_order):
            for chunk in features.own_chunks(data):
                steps[chunk] = features.jvp(gradients[number : number + 1], chunk)[0]
    return steps[some].double()


def _parts(features: Features, fold: Tensor, some: Tensor, in_order: bool) -> list[tuple[int, Tensor]]:
    """Some data, by folds; of a stream those of each batch together, which is read once."""
    batches = features.chunks(some) if in_order else [some]
    return [(number, batch[fold[batch] == number]) for batch in batches for number in fold[batch].unique().tolist()]
