"""Spectral-normalised networks with a Gaussian process of random features as their last layer (Liu et al. 2020).

The spectral norm of each hidden layer is one, so that distances between inputs cannot grow. The last linear layer is
replaced by random Fourier features of an RBF kernel on the normalised hidden units, `Φ(h) = √(2/D) cos(Wh/ℓ + b)`, and
weights `β`, one vector a class. Their posterior has the precision `I + Σᵢ pᵢ(1 − pᵢ) ΦᵢΦᵢᵀ` for each class (eq. 9).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

FEATURES, LENGTH = 256, 2.0


class RandomFeatures(nn.Module):
    """Logits `Φ(h) β` of hidden units `[N, d]`."""

    def __init__(self, units: int, outputs: int) -> None:
        super().__init__()
        self.directions = nn.Buffer(torch.randn(FEATURES, units) / LENGTH)
        self.phases = nn.Buffer(2 * math.pi * torch.rand(FEATURES))
        self.norm = nn.LayerNorm(units, elementwise_affine=False)
        self.output = nn.Linear(FEATURES, outputs, bias=False)

    def features(self, hidden: Tensor) -> Tensor:
        """`Φ`, `[N, D]`."""
        return math.sqrt(2 / FEATURES) * torch.cos(self.norm(hidden) @ self.directions.T + self.phases)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.features(hidden))


def spectral(network: nn.Module) -> nn.Module:
    """The network, whose last linear layer has become `RandomFeatures` and whose others have spectral norms."""
    *hidden, (last, _) = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    layer = network.get_submodule(last)
    assert isinstance(layer, nn.Linear)
    for _, module in hidden:
        # attention reads the weights of its output layer by itself, and those of its input have no module
        if type(module) in (nn.Linear, nn.Conv2d):
            spectral_norm(module)
    network.set_submodule(last, RandomFeatures(layer.in_features, layer.out_features))
    return network


def head_of(network: nn.Module) -> RandomFeatures:
    return next(module for module in network.modules() if isinstance(module, RandomFeatures))


def posterior_factors(features: Tensor, probs: Tensor) -> Tensor:
    """Cholesky factors `[C, D, D]` of the precisions of `β`, from features `[N, D]` and probabilities `[N, C]`."""
    weights = (probs * (1 - probs)).double()
    features = features.double()
    identity = torch.eye(features.shape[1]).double()
    return torch.stack([torch.linalg.cholesky(identity + features.T @ (w[:, None] * features)) for w in weights.T])
