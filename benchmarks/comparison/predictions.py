"""One form for the predictions of every method, so that the same code measures all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Classified:
    """Predictions of classes.

    Attributes:
        log_probs: `[N, C]`, of the method's own link.
        samples: joint draws of the logits, `[K, N, C]`; `K = 1` for a network without error bars.
        epistemic: the method's own measure of what it does not know, `[N]`, if it has one.
    """

    log_probs: Tensor
    samples: Tensor
    epistemic: Tensor | None = None


@dataclass(frozen=True)
class Regressed:
    """Predictions of scalars: a Gaussian for each, with noise, and joint draws of the function, `[K, N]`, without.

    `gaussian` says whether the function is a Gaussian process, of which these are some draws, or one of the draws.
    """

    mean: Tensor
    variance: Tensor
    samples: Tensor
    noise_variance: float
    gaussian: bool = False


Prediction = Classified | Regressed


@dataclass(frozen=True)
class Fitted:
    """The result of a method: predictions of inputs, and their cost.

    Attributes:
        predict: from inputs to a prediction.
        epochs: gradients, or pairs of Jacobian products, over all training data that the fit took, networks trained on
            the way included, but not the network that gets error bars.
        details: hyperparameters, and what else tells how it went.
    """

    predict: Callable[[Tensor], Prediction]
    epochs: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


def log_mean_exp(x: Tensor) -> Tensor:
    """The logarithm of the mean of exponentials, over the first axis."""
    return x.logsumexp(0) - torch.tensor(float(len(x))).log()


def prediction(
    likelihood: str, outputs: Tensor, noise_variance: float = 0.0, temperature: float = 1.0
) -> Classified | Regressed:
    """Predictions from outputs of `K` networks, `[K, N, ...]`: a mixture of classes, or the moments of a mixture."""
    outputs = outputs.detach()
    if likelihood == "regression":
        samples = outputs.reshape(len(outputs), -1)
        variance = samples.var(0, correction=0) + noise_variance
        return Regressed(samples.mean(0), variance, samples, noise_variance)
    logits = outputs / temperature
    return Classified(log_mean_exp(logits.log_softmax(-1)), logits)


def targets(likelihood: str, y: Tensor) -> Tensor:
    """Targets in the order of a prediction, `[N]`."""
    return y.flatten() if likelihood == "regression" else y.flatten().long()
