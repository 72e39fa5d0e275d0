"""`Problem`: what is to be fitted, before a method is chosen, and what dense algebra would take of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.linear_model.tangent_model import TangentModel

__all__ = ["MOST_BYTES", "Memory", "Problem", "exact_bytes", "fits_in_observation_space", "space_of"]

# Bytes that dense algebra takes at most where the user gives no number: it is for small problems, and 8 GiB hold a Gram
# matrix of 16,000 observations. At half they hold 11,000, at twice 23,000.
MOST_BYTES = 8 * 2**30
# Gram matrices in memory at once: itself, its eigenvectors, and the workspace of the decomposition.
_GRAMS = 4


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
        layers: returns names of layers, and the layer of each random weight.
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
    layers: Callable[[], tuple[list[str], Tensor]]
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


def exact_bytes(space: str, rows: int, size: int) -> float:
    """Bytes that dense algebra takes in one of the spaces, for `N·C` rows and `P` columns of the Jacobian."""
    if space == "observations":
        return 8.0 * _GRAMS * rows**2 + min(BLOCK_BYTES, 8 * rows * size)
    return 8.0 * (rows * size + 3 * min(rows, size) ** 2)


def space_of(problem: Problem) -> str:
    """The space in which dense algebra is smaller: `"weights"` or `"observations"`."""
    smaller = problem.num_observations < problem.features.size
    return "observations" if problem.in_observation_space and smaller else "weights"


def fits_in_observation_space(features: Features, memory: Memory) -> bool:
    """Whether memory holds the Gram matrix and its decomposition."""
    bytes_ = exact_bytes("observations", features.num_data * features.num_outputs, features.size)
    return bytes_ <= min(MOST_BYTES, memory.bytes)
