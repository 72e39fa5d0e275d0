"""What is to be fitted: the linear model of a network on training data, and the same as one method takes it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import Features, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Prior
from laplace_sampling.linear_model.tangent_model import TangentModel

if TYPE_CHECKING:
    from laplace_sampling.methods.method import Method

__all__ = ["EM_STREAM", "PATH_STREAM", "PRIOR_STREAM", "SAMPLE_STREAM", "Memory", "Problem", "Task"]

# Each set of draws has its own stream of the one seed, so that none of them is correlated with another. Streams of
# posterior samples count up from `SAMPLE_STREAM`, one for each call of `sample`; the path's is far above them.
EM_STREAM, PRIOR_STREAM, SAMPLE_STREAM, PATH_STREAM = 0, 1, 2, 2**20


@dataclass(frozen=True)
class Memory:
    """The memory that solvers may take for vectors of `P` numbers.

    Attributes:
        bytes: as a number.
        given: whether the user gave it; otherwise it is half of what is free.
        vector: bytes of one vector.
    """

    bytes: float
    given: bool
    vector: int

    @property
    def vectors(self) -> float:
        """How many vectors it holds."""
        return self.bytes / self.vector


@dataclass(frozen=True)
class Problem:
    """A linear model on training data, before a method is chosen for its posterior.

    Attributes:
        tangent: the linear model, and what it comes from.
        prior: the family of the prior.
        layers: names of layers, and the layer of each random weight.
        hessian_at: `"network"` or `"mode"`, where the curvature of the loss is taken.
        num_samples: `K`.
        seed: of all draws.
        dtype: of samples and mode.
        progress: whether progress bars are shown.
        memory_of: from `max_memory` of a method to the memory that it has.
        in_observation_space: whether the exact method may work on the Gram matrix.
    """

    tangent: TangentModel
    prior: Prior
    layers: tuple[list[str], Tensor]
    hessian_at: str
    num_samples: int
    seed: int
    dtype: torch.dtype
    progress: bool
    memory_of: Callable[[float | None], Memory]
    in_observation_space: bool = True

    @property
    def features(self) -> Features:
        """`Φ`, as the network gives it."""
        return self.tangent.model.features

    @property
    def num_observations(self) -> int:
        """`N·C`."""
        return self.features.num_data * self.features.num_outputs


@dataclass(frozen=True)
class Task:
    """A problem as one method takes it.

    Attributes:
        method: that was chosen for it.
        model: the linear model, as the method works on it: in float64, or with its Jacobian in memory.
        prior: with the precisions to start from, or those of the posterior.
        memory: that solvers may take.
        reason: why the method was chosen, in words.
        cost: of products, if it was measured.
        hessian_at: as of a `Problem`; likewise `num_samples`, `seed`, `dtype`, `progress`.
    """

    method: "Method"
    model: LinearModel
    prior: GaussianPrior
    memory: Memory
    reason: str
    hessian_at: str
    num_samples: int
    seed: int
    dtype: torch.dtype
    progress: bool
    cost: Cost | None = None

    @property
    def draws(self) -> Draws:
        """The draws of the samples that are kept."""
        return Draws(self.num_samples, self.seed, SAMPLE_STREAM)

    def ggn(self, mode_outputs: Tensor | None = None) -> GGN:
        """`M`, with the curvature at the network's outputs or at those of the mode, whichever the task asks for.

        Before the mode is known its place is taken by outputs of zero, where `B` does not depend on `α`.
        """
        outputs = self.model.network_outputs
        if self.hessian_at == "mode":
            outputs = torch.zeros_like(outputs) if mode_outputs is None else mode_outputs
        return self.model.ggn(outputs)

    def scaled_ggn(self, mode_outputs: Tensor | None = None) -> GGN:
        """The same in the scaled coordinates of the prior."""
        ggn = self.ggn(mode_outputs)
        return replace(ggn, features=ScaledFeatures(ggn.features, self.prior.scale.to(ggn.device, ggn.dtype)))
