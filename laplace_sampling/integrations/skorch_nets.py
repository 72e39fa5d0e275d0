"""Nets of skorch for the estimators of `scikit_learn`: given, or made of a module, and the default network."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from sklearn.base import clone
from skorch import NeuralNet, NeuralNetClassifier
from torch import Tensor, nn

__all__ = [
    "LIKELIHOODS",
    "Log",
    "Network",
    "default_network",
    "initialised",
    "inputs_of",
    "outputs_of",
    "returns_probs",
]

# What an estimator takes.
Network = nn.Module | NeuralNet | Callable[[int, int], nn.Module]

# Of which each criterion is the loss.
LIKELIHOODS = {
    nn.MSELoss: "regression",
    nn.CrossEntropyLoss: "classification",
    nn.NLLLoss: "classification",
    nn.BCEWithLogitsLoss: "binary",
}
_WIDTH = 50


class _Affine(nn.Module):
    """`scale ⊙ x + shift`, without weights."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class Log(nn.Module):
    """The logarithms of probabilities, which are logits of them."""

    def forward(self, probs: Tensor) -> Tensor:
        # As `NeuralNetClassifier` takes them for its loss.
        return (probs + torch.finfo(probs.dtype).eps).log()


def returns_probs(net: NeuralNet) -> bool:
    """Whether the module of a net returns probabilities, of which skorch takes the logarithm."""
    return isinstance(net, NeuralNetClassifier) and isinstance(net.criterion_, nn.NLLLoss)


def default_network(x: np.ndarray, num_outputs: int, targets: np.ndarray | None) -> nn.Module:
    """Two layers between inputs, and targets if they are numbers, that are standardised inside the network."""
    mean, stddev = _moments(x)
    layers = [
        nn.Flatten(),
        _Affine(1 / stddev, -mean / stddev),
        nn.Linear(len(mean), _WIDTH),
        nn.SiLU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.SiLU(),
        nn.Linear(_WIDTH, num_outputs),
    ]
    if targets is not None:
        mean, stddev = _moments(targets)
        layers.append(_Affine(stddev, mean))
    return nn.Sequential(*layers).double()


def _moments(values: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; one for a column that is constant."""
    columns = torch.tensor(values).reshape(len(values), -1)
    stddev = columns.std(0, correction=0)
    return columns.mean(0), stddev.where(stddev > 0, 1)


def inputs_of(module: nn.Module, x: np.ndarray) -> Tensor:
    """In the precision of a network, and where it is."""
    weights = (weight for weight in module.parameters() if weight.is_floating_point())
    # Copied: arrays may be read-only, which tensors cannot be.
    return torch.tensor(x).to(next(weights, torch.zeros(0)))


def outputs_of(module: nn.Module, x: np.ndarray) -> Tensor:
    """What a network computes of two inputs, in evaluation mode, where normalisations take nothing from them."""
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            outputs = module(inputs_of(module, x[:2]))
    finally:
        for part, flag in training:
            part.training = flag
    if not isinstance(outputs, Tensor):
        raise TypeError(f"The network must return a tensor, but returned a {type(outputs).__name__}: wrap it.")
    return outputs


def initialised(
    network: Network | None,
    x: np.ndarray,
    targets: np.ndarray | None,
    num_outputs: int,
    *,
    max_epochs: int,
    lr: float,
    batch_size: int,
) -> NeuralNet:
    """The net of skorch, with weights; it is the one that was given only if that has weights.

    Args:
        network: what an estimator was given.
        x: training data.
        targets: those of a regression.
        num_outputs: that are needed.
        max_epochs: of a net that is made here.
        lr: of the same.
        batch_size: of the same.
    """
    if isinstance(network, NeuralNet):
        return network if network.initialized_ else clone(network).initialize()
    if network is None:
        module = default_network(x, num_outputs, targets)
    elif isinstance(network, nn.Module):
        module = copy.deepcopy(network)
    else:
        module = network(x[0].size, num_outputs) if callable(network) else network
        if not isinstance(module, nn.Module):
            raise TypeError(
                "The network must be a `torch.nn.Module`, a callable `(num_inputs, num_outputs) -> nn.Module` or a net "
                f"of skorch, but {'the callable returned' if callable(network) else 'is'} a {type(module).__name__}."
            )
    criterion: type[nn.Module] = nn.MSELoss
    if targets is None:
        criterion = nn.BCEWithLogitsLoss if outputs_of(module, x)[0].numel() == 1 else nn.CrossEntropyLoss
    # The types of skorch are those of its defaults.
    options = {"optimizer": torch.optim.Adam, "train_split": None, "device": str(inputs_of(module, x[:1]).device)}
    options |= {"lr": lr, "max_epochs": max_epochs, "batch_size": batch_size}
    return NeuralNet(module, criterion, iterator_train__shuffle=True, verbose=0, **options).initialize()
