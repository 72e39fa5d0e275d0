"""`Problem`: what is to be fitted, before a method is chosen, and what dense algebra would take of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.linear_model.tangent_model import TangentModel, is_accumulated
from laplace_sampling.methods.budget import Budget

if TYPE_CHECKING:
    from laplace_sampling.predictions.selection import Selection

# Bytes that dense algebra takes at most where the user gives no number: it is for small problems, and 8 GiB hold a Gram
# matrix of 16,000 observations. At half they hold 11,000, at twice 23,000.
MOST_BYTES = 8 * 2**30
# Gram matrices in memory at once: itself, its eigenvectors, and the workspace of the decomposition.
_GRAMS = 4
# Likewise of `M`: itself, its eigenvectors, a factor, and the workspace of the decomposition.
_CURVATURES = 6
# Operations of an eigendecomposition, in units of `n³`.
_EIGEN = 9


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
        num_samples: `K`.
        seed: of all draws.
        dtype: of samples and mode.
        progress: whether progress bars are shown.
        memory_of: from `max_memory` of a method to the memory that it has.
        in_observation_space: whether the exact method may work on the Gram matrix.
        cost: of products, if it was measured.
        budget: what the fit may cost, and has cost.
        selection: the rule for the prior precision, where it is not the evidence.
        criterion: what the user asked to choose the hyperparameters.
    """

    tangent: TangentModel
    prior: Prior
    layers: Callable[[], tuple[list[str], Tensor]]
    num_samples: int
    seed: int
    dtype: torch.dtype
    progress: bool
    memory_of: Callable[[float | None], Memory]
    in_observation_space: bool = True
    cost: Cost | None = None
    budget: Budget = field(default_factory=Budget)
    selection: "Selection | None" = None
    criterion: str = "evidence"

    @property
    def features(self) -> Features:
        """`Φ`, as the network gives it."""
        return self.tangent.model.features

    @property
    def num_observations(self) -> int:
        """`N·C`."""
        return self.features.num_data * self.features.num_outputs

    @property
    def by_evidence(self) -> bool:
        """Whether the mode is needed: for hyperparameters of largest evidence."""
        return self.selection is None and self.tangent.model.likelihood.quadratic

    def of_rule(self, cost: Cost, *, rough: bool = True) -> float:
        """Operations of the rule for the prior precision; not `rough` where it is known where to look."""
        rule = self.selection
        return 0.0 if rule is None else rule.cost(self.features, rough=rough).operations(cost)


def exact_bytes(space: str, rows: int, size: int) -> float:
    """Bytes that dense algebra takes in one of the spaces, for `N·C` rows and `P` columns of the Jacobian."""
    if space == "observations":
        return 8.0 * _GRAMS * rows**2 + min(BLOCK_BYTES, 8 * rows * size)
    if is_accumulated(rows, size):
        return 8.0 * _CURVATURES * size**2
    return jacobian_bytes(rows, size)


def holds_rows(features: Features, memory: Memory) -> bool:
    """Whether the rows of the Jacobian may be held beside the Gram matrix, in float64."""
    rows = features.num_data * features.num_outputs
    needed = 8.0 * rows * features.size + exact_bytes("observations", rows, features.size)
    return needed <= min(MOST_BYTES, memory.bytes)


def jacobian_bytes(rows: int, size: int) -> float:
    """Bytes of dense algebra in the space of the weights where the Jacobian is held."""
    return 8.0 * (rows * size + 3 * min(rows, size) ** 2)


def exact_products(problem: Problem, space: str, cost: Cost) -> float:
    """Operations of products with the network for dense algebra in one of the spaces."""
    features, rows = problem.features, problem.num_observations
    if space == "observations":
        if holds_rows(features, problem.memory_of(None)):
            return rows * cost.vjp
        # Pairs of blocks of rows of the Jacobian are multiplied; each is computed again for every other block.
        blocks = max(1.0, 16 * rows * features.size / BLOCK_BYTES)
        return rows * cost.vjp * (1 + blocks) / 2
    return features.num_data * min(features.num_outputs * cost.vjp, features.size * cost.jvp)


def dense_operations(space: str, rows: int, size: int) -> float:
    """Operations of dense algebra for `N·C` rows and `P` weights in a space of the exact method, roughly."""
    if space == "observations":
        return 2.0 * rows**2 * size + _EIGEN * rows**3
    smaller, larger = min(rows, size), max(rows, size)
    return smaller**2 * larger + _EIGEN * smaller**3


def exact_operations(problem: Problem, space: str, cost: Cost) -> float:
    """Operations of products and of dense algebra in one of the spaces."""
    rows, size = problem.num_observations, problem.features.size
    return exact_products(problem, space, cost) + dense_operations(space, rows, size)


def space_of(problem: Problem) -> str:
    """The space in which dense algebra is smaller: `"weights"` or `"observations"`."""
    smaller = problem.num_observations < problem.features.size
    return "observations" if problem.in_observation_space and smaller else "weights"


def fits_in_observation_space(features: Features, memory: Memory) -> bool:
    """Whether memory holds the Gram matrix and its decomposition."""
    bytes_ = exact_bytes("observations", features.num_data * features.num_outputs, features.size)
    return bytes_ <= min(MOST_BYTES, memory.bytes)
