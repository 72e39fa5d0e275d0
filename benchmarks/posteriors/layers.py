"""Fully connected networks as functions of a stack of weight vectors, so that samples and chains run side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import Fitted, Prediction, prediction

# Draws by which the predictions of all sampled methods are scored: mixtures of other sizes do not compare.
DRAWS = 64


@dataclass(frozen=True)
class Layers:
    """A network with one output; the weights of a layer are a matrix whose last row are its biases."""

    sizes: Sequence[int]
    activation: nn.Module

    @classmethod
    def of(cls, network: nn.Module) -> "Layers":
        """The layers of `benchmarks.comparison.networks.mlp`."""
        linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
        plain = (nn.Linear, nn.Flatten, nn.Sequential)
        activation = next((m for m in network.modules() if not isinstance(m, plain)), nn.Identity())
        return cls([linear[0].in_features, *(module.out_features for module in linear)], activation)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(inputs + 1, outputs) for inputs, outputs in pairwise(self.sizes)]

    @property
    def prior_variances(self) -> Tensor:
        """The prior of Neal (1996) for each weight, `[P]`: one over the inputs of its layer, the constant included."""
        return torch.cat([torch.full((a * b,), 1 / a, dtype=torch.float64) for a, b in self.shapes])

    def weights_of(self, network: nn.Module) -> Tensor:
        """The weights of a module as a vector `[P]`, in double precision."""
        linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
        parts = [torch.cat([module.weight.mT, module.bias[None]]).flatten() for module in linear]
        return torch.cat(parts).detach().double()

    def matrices(self, weights: Tensor) -> list[Tensor]:
        """A stack of matrices `[S, inputs + 1, outputs]` for each layer, of weights `[S, P]`."""
        parts = weights.split([a * b for a, b in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def __call__(self, weights: Tensor, x: Tensor) -> Tensor:
        """Outputs `[S, N]` at inputs `[N, D]`."""
        *hidden, last = self.matrices(weights)
        h = x.expand(len(weights), *x.shape)
        for matrix in hidden:
            h = self.activation(torch.baddbmm(matrix[:, -1:], h, matrix[:, :-1]))
        return torch.baddbmm(last[:, -1:], h, last[:, :-1])[..., 0]


def by_draws(outputs: Callable[[Tensor], Tensor], noise: float, /, **details: object) -> Fitted:
    """Predictions by a mixture of networks, whose outputs at inputs are `[DRAWS, N]`, with Gaussian noise."""

    def predict(x: Tensor) -> Prediction:
        with torch.no_grad():
            return prediction("regression", outputs(x.double()), noise)

    return Fitted(predict, details=details)
