r"""A temperature from training data and the accuracy on new data.

A network is surer of the labels that it has learnt than of new ones. Its outputs for new data are supposed to be those
for training data with noise in the logits, and as large. With `f` the logits of a datum without their mean, `‖f‖` its
root mean square and white noise `z`:

    g_i = r (f_i + s ‖f_i‖ z_i),        Σ_i ‖g_i‖² = Σ_i ‖f_i‖².

The more noise, the fewer labels are predicted rightly; so `s` is that at which they are right as often as new ones are.
The temperature is then the one under which the labels are likeliest. It takes no product with the network.

`docs/design.md` has figures, and what was tried in its place: folds of the training data that are left out.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.predictions.calibration import calibrate, labels_of
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER, normal

# Accuracies are known to about so much: the likeliest temperature is that of three accuracies, the one that is given
# and one on either side. At half a percent of errors a single one would be decided by a handful of data.
SPREAD = 0.03
# The sizes of the noise that are tried, in decades of the size of the logits, and how many in each decade: at half as
# many interpolation misses an accuracy by up to .02. The smallest changes no label, the largest leaves nothing else.
_DECADES, _PER_DECADE = (-3, 2), 8
# The smallest temperature that is looked for: a certain network cannot be made surer.
_LOWEST = math.exp(-5)
# Data that are looked at, at most and at least; fewer ones have noise several times. The standard error of an accuracy
# is then 1.1 % at most.
_MOST_DATA, _LEAST_DATA = 20_000, 2000


def temperature_of(model: LinearModel, accuracy: float, seed: int) -> tuple[float, list[str]]:
    """The likeliest temperature of labels that are predicted as rightly as new ones, and what is wrong.

    Args:
        model: on the training data, at the outputs of the network.
        accuracy: the part of new labels that the network predicts rightly.
        seed: of the noise.
    """
    features = model.features
    together = max(1, min(_MOST_DATA, NUMBERS_TOGETHER // features.num_outputs))
    order = torch.randperm(features.num_data, generator=torch.Generator().manual_seed(seed))
    some = model.with_targets(order)[:together]
    some = some.repeat(max(1, min(_LEAST_DATA, together) // len(some)))
    f, y, likelihood = model.network_outputs[some].double(), model.targets[some], model.likelihood
    problems = []
    if accuracy > (own := accuracy_of(likelihood, f, y)) + SPREAD:
        problems = [
            f"`accuracy={accuracy:g}` is more than the network has on the training data, {own:.3g}. Check the number, "
            "and that these are the data that the network was trained on."
        ]
    # The larger one is at most half of the way to no error.
    accuracies = [accuracy - SPREAD, accuracy, min(accuracy + SPREAD, (1 + accuracy) / 2)]
    outputs = torch.cat(noisy_outputs(likelihood, f, y, accuracies, seed))
    nothing = torch.zeros_like(outputs)[None]
    found = calibrate(likelihood, torch.cat([y] * len(accuracies)), outputs, nothing, ("temperature",), _LOWEST)
    # Too small a temperature costs more than one that is too large by as much.
    return found.temperature if found.temperature > 1 else math.sqrt(found.temperature), problems


def noisy_outputs(
    likelihood: Likelihood, f: Float[Tensor, "n C"], y: Tensor, accuracies: list[float], seed: int
) -> list[Float[Tensor, "n C"]]:
    """Outputs with so much noise that so many labels are predicted rightly, interpolated between sizes of a grid."""
    labels = labels_of(likelihood)
    logits = labels.positions(f)
    logits = logits - logits.mean(-1, keepdim=True)
    white = normal(*logits.shape, seed=seed, dtype=logits.dtype, device=logits.device, drawn_in=torch.float64)
    noise = (white - white.mean(-1, keepdim=True)) * logits.square().mean(-1, keepdim=True).sqrt()

    def with_noise(size: float) -> Float[Tensor, "n C"]:
        noisy = logits + size * noise
        noisy = noisy * (logits.norm() / noisy.norm().clamp_min(1e-300))
        return labels.flat(noisy - noisy[..., :1])  # a single output is the difference of two logits

    low, high = _DECADES
    logs = torch.linspace(low, high, (high - low) * _PER_DECADE + 1, dtype=torch.float64)
    found = torch.tensor([accuracy_of(likelihood, with_noise(10**log), y) for log in logs.tolist()])
    found = found.double().cummin(0).values
    sizes = []
    for accuracy in accuracies:
        index = int((found > accuracy).sum())  # the first that is not above it
        if index in (0, len(found)):
            sizes.append(10 ** float(logs[min(index, len(found) - 1)]))
            continue
        part = (found[index - 1] - accuracy) / (found[index - 1] - found[index])
        sizes.append(10 ** float(torch.lerp(logs[index - 1], logs[index], part)))
    return [with_noise(size) for size in sizes]


def accuracy_of(likelihood: Likelihood, f: Float[Tensor, "n C"], y: Tensor) -> float:
    """The part of the labels that is the likeliest class; of a soft label the probability of that class."""
    labels, targets = labels_of(likelihood), likelihood.unweighted_targets(y)
    counts, predicted = likelihood.weights(y)[:, None] * labels.given(targets), labels.positions(f).argmax(-1)
    if labels.is_soft(targets):
        right = labels.weights_of_classes(targets).gather(-1, predicted[..., None])[..., 0]
    else:
        right = (predicted == labels.labels(targets)[0]).double()
    return float((counts * right).sum() / counts.sum())
