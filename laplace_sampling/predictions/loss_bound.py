"""`LossBound`: how much draws of the function may raise the training loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.calibration import label_losses

__all__ = ["LossBound", "Used", "cost_of_error_bars"]

# The part of a bound that draws of the function at some data use, `[K, n, C]` and indices of the data.
Used = Callable[[Tensor, Tensor], float]


class LossBound(ABC):
    """How much draws of the function may raise the training loss."""

    name: str
    # What is wrong where no precision keeps to it.
    nowhere: str

    def num_vjps(self, features: Features) -> int:
        """VJPs of a datum that `used` makes."""
        return 0

    @abstractmethod
    def used(self, model: LinearModel, prior: GaussianPrior, seed: int, in_order: bool) -> Used:
        """The part of the bound that draws of the function use; more than one is too much.

        Args:
            model: on the training data.
            prior: with its scale.
            seed: of what is random.
            in_order: whether it looks at the first data in place of random ones.
        """


def cost_of_error_bars(
    likelihood: Likelihood, y: Tensor, f: Float[Tensor, "n C"], z: Float[Tensor, "K n C"]
) -> tuple[float, float]:
    """By how much labels lose log-likelihood when they are predicted with error bars, and the loss by the network."""
    alone = label_losses(likelihood, y, f, torch.zeros_like(z[:1]), 0.0).sum()
    return float(label_losses(likelihood, y, f, z, 1.0).sum() - alone), float(alone)
