r"""`Problem`: what is to be fitted, before a method is chosen, and what dense algebra would take of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.hyperparameters.criterion import Criterion, Evidence
from laplace_sampling.hyperparameters.hyperparameters import Step
from laplace_sampling.hyperparameters.rules import SearchCost, Selection
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.held_out import HeldOut
from laplace_sampling.linear_model.linear_model import TangentModel, is_accumulated
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Prior, overall_precision
from laplace_sampling.solvers.solver import Afford


def figure(number: float) -> str:
    """Two digits, or whole numbers from a hundred on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def counted_in(dense: bool) -> str:
    """Which operations are in a count of epochs."""
    with_dense = "and of dense algebra" if dense else "without dense algebra"
    return f"counted in products with the network {with_dense}, not in seconds"


@dataclass(frozen=True)
class Estimate:
    """What a fit by a method is predicted to take.

    Attributes:
        operations: of products with the network.
        dense: of dense algebra.
        bytes: of memory, besides that of the network itself.
        least: operations with which there is a posterior at all, if it may stop before its end.
    """

    # Operations of dense algebra in float64 in the time of one of a network. On one core products of matrices run at 14
    # to 50 e9 a second, eigendecompositions at 12; gradients of a LeNet and of a CNN with batch norm at 6, those of an
    # MLP at 60. With half the value exact posteriors are taken up to matrices a fifth smaller, with twice a quarter
    # larger.
    DENSE: ClassVar[float] = 3.0

    operations: float
    bytes: float
    dense: float = 0.0
    least: float | None = None

    @property
    def total(self) -> float:
        """In operations of the network."""
        return self.operations + self.dense / self.DENSE


class Strict(float):
    """Training epochs, none of them free: of fits so frequent that a second or so of each is most of the training."""


@dataclass(eq=False)
class Budget:
    """Counts what a fit spends, and says what it can still afford.

    Args:
        epochs: how many training epochs it may take; `None` for any number.
        cost: of products of a datum; without it nothing is counted.
        num_data: `N`.
        products: counts of JVPs and VJPs of the network, which go up as products are made.
        others: operations that are in no count.

    Attributes:
        refused: whether an iteration was not affordable.
    """

    # Floating-point operations that are never refused, a second or so: an epoch of a tiny network takes microseconds.
    # At half and twice networks up to half and twice as large may do what they like.
    FREE: ClassVar[float] = 1e10
    # The part of what is left that a search for hyperparameters may take: the rest is for the samples.
    _TUNING = 0.5

    epochs: float | None = None
    cost: Cost | None = None
    num_data: int = 0
    products: Mapping[str, int] = field(default_factory=dict)
    others: float = 0.0
    refused: bool = field(default=False, init=False)
    _before: dict[str, int] = field(init=False, repr=False)
    _dense: bool = field(default=False, init=False, repr=False)
    _ended: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._before = dict(self.products)

    @property
    def epoch(self) -> float:
        """Operations of a training epoch."""
        return math.nan if self.cost is None else self.cost.epoch(self.num_data)

    @property
    def _counted(self) -> float:
        if self.cost is None:
            return 0.0
        jvps, vjps = (self.products[name] - self._before[name] for name in ("jvp", "vjp"))
        return jvps * self.cost.jvp + vjps * self.cost.vjp + self.others

    @property
    def operations(self) -> float:
        """Operations that have been spent."""
        return self._counted if self._ended is None else self._ended

    @property
    def spent_with_later(self) -> float:
        """Epochs that have been spent, and those of what was asked of the posterior since."""
        return self._counted / self.epoch

    @property
    def spent(self) -> float:
        """Epochs that have been spent; NaN if nothing was counted."""
        return self.operations / self.epoch

    @property
    def allowed(self) -> float:
        """Operations that may be spent in all."""
        if self.epochs is None or self.cost is None:
            return math.inf
        return max(self.epochs * self.epoch, 0.0 if isinstance(self.epochs, Strict) else self.FREE)

    @property
    def left(self) -> float:
        """Operations that may still be spent."""
        return math.inf if self._ended is not None else self.allowed - self.operations

    @property
    def ended(self) -> bool:
        """Whether the fit is over."""
        return self._ended is not None

    def affords(self, operations: float) -> bool:
        """Whether so many operations may still be spent."""
        return operations <= self.left

    def affords_passes(self, passes: float, reserve: float = 0.0) -> bool:
        """Whether so many passes, a JVP and a VJP of all data, may be spent before no more than a reserve is left."""
        affordable = self.cost is None or self.affords(passes * self.cost.passes * self.num_data + reserve)
        self.refused = self.refused or not affordable
        return affordable

    @property
    def advice(self) -> str:
        """What to do about a fit that the budget has ended; empty if it has not."""
        if not self.refused:
            return ""
        return f"The budget of {self.epochs:g} training epochs ended first: raise `budget`, or give `budget=None`."

    @property
    def for_tuning(self) -> Afford:
        """Whether a search for hyperparameters affords some passes: half of what is left now is for the samples."""
        left = self.left
        return partial(self.affords_passes, reserve=self._TUNING * left if math.isfinite(left) else 0.0)

    def add(self, operations: float = 0.0, dense: float = 0.0) -> None:
        """Count operations that are no products, and those of dense algebra."""
        self.others += operations + dense / Estimate.DENSE
        self._dense = self._dense or dense > 0

    def __str__(self) -> str:
        allowed = "" if self.epochs is None else f" of {self.epochs:g}"
        text = f"The fit took {figure(self.spent)}{allowed} training epochs of operations, {counted_in(self._dense)}"
        return text + self.excess(self.operations)

    def excess(self, operations: float) -> str:
        """Why so many operations are more than the budget; empty if they are not."""
        if self.epochs is None or self.cost is None or operations <= self.epochs * self.epoch:
            return ""
        if operations <= (1 + 1e-9) * self.allowed:  # whatever rounding does
            return (
                "; 10¹⁰ operations, a second or so, are always allowed: for this small network and these few data they "
                "are more than the budget"
            )
        return "; what has begun, and a closed form, goes on where the budget ends"

    def end(self) -> None:
        """Stop counting, and allow everything: what is asked of a posterior later is asked for."""
        self._ended = self.operations


@dataclass(frozen=True)
class Start:
    """What a fit takes from an earlier posterior of the same weights.

    Attributes:
        prior: `A_old`.
        likelihood: with its noise precision.
        samples: `ζ_old`, unscaled; `None` where no minimisation found them, as with Kronecker factors.
        draws: of the samples.
        mode: `θ̄_old`, if it is known.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"] | None
    draws: Draws
    mode: Float[Tensor, " P"] | None = None

    @property
    def alpha(self) -> float:
        """`α`, the geometric mean over the weights."""
        return overall_precision(self.prior)

    def check(self, prior: GaussianPrior) -> None:
        """Raise a `ValueError` if the posterior is of other weights than those of a prior."""
        old, new = len(self.prior.scale), len(prior.scale)
        if old != new or self.prior.names != prior.names:
            before, now = _described(old, self.prior), _described(new, prior)
            raise ValueError(
                f"`warm_start=True` starts from the posterior that is there, which is of {before}, but the model now "
                f"has {now}: fit without `warm_start`."
            )

    def prior_from(self, prior: GaussianPrior) -> GaussianPrior:
        """A prior with the old precisions; its scale stays, and so what `α` means in its coordinates."""
        return prior.with_precision(self.prior.precision)

    def likelihood_from(self, likelihood: Likelihood) -> Likelihood:
        """A likelihood with the old noise precision, where it is one that is learnt."""
        noise = self.likelihood.noise_precisions()
        if not (isinstance(likelihood, Gaussian) and likelihood.learn) or noise is None:
            return likelihood
        return likelihood.with_precision(noise)

    def delta(self, draws: Draws, prior: GaussianPrior) -> Float[Tensor, "K P"] | None:
        """`δ = ζ − θ⁰` for a solve, in the scaled coordinates of a prior; `None` if there are no such samples.

        Args:
            draws: some of those of the samples.
            prior: `A`, on the device and in the dtype of the solve.
        """
        last = draws.first + draws.num_samples
        if self.samples is None or replace(draws, num_samples=1, first=0) != replace(self.draws, num_samples=1):
            return None
        if last > len(self.samples):
            return None
        old, samples = self.prior.to(prior.scale.device, prior.scale.dtype), self.samples[draws.first : last]
        samples = samples.to(prior.scale)
        # In units of the prior's standard deviation, in which `θ⁰` is white noise.
        white = samples * (old.spread().sqrt() / old.scale)
        return (white - draws.prior(samples.shape[1]).to(white)) / prior.spread().sqrt()

    def mode_in(self, scale: Float[Tensor, " P"]) -> Float[Tensor, "1 P"] | None:
        """The old mode in scaled coordinates."""
        return None if self.mode is None else (self.mode.to(scale) / scale)[None]


def _described(size: int, prior: GaussianPrior) -> str:
    groups = "" if len(prior.names) == 1 else f" in the groups {', '.join(prior.names[:4])}"
    return f"{size} random weights{groups}"


# Bytes that dense algebra takes at most where the user gives no number: it is for small problems, and 8 GiB hold a Gram
# matrix of 16,000 observations. At half they hold 11,000, at twice 23,000.
MOST_BYTES = 8 * 2**30


# Gram matrices in memory at once: itself, its eigenvectors, and the workspace of the decomposition.
_GRAMS = 4


# And for `M`: itself, its eigenvectors, a factor, and the workspace of the decomposition.
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
        family: of the prior.
        layers: returns names of layers, and the layer of each random weight.
        num_samples: `K`.
        seed: of all draws.
        dtype: of samples and mode.
        progress: whether progress bars are shown.
        free_bytes: half of the free memory, that of the process which has least.
        in_observation_space: whether the exact method may work on the Gram matrix.
        cost: of products, if it was measured.
        budget: what the fit may cost, and has cost.
        criterion: what the user asked to choose the hyperparameters.
        selection: the rule of the criterion for the prior precision; `None` for the evidence.
        tolerance: relative error `τ` of predicted standard deviations that is asked for.
        callback: called with the record of each step of a search for hyperparameters.
    """

    tangent: TangentModel
    family: Prior
    layers: Callable[[], tuple[list[str], Tensor]]
    num_samples: int
    seed: int
    dtype: torch.dtype
    progress: bool
    free_bytes: float
    in_observation_space: bool = True
    cost: Cost | None = None
    budget: Budget = field(default_factory=Budget)
    criterion: Criterion = field(default_factory=Evidence)
    selection: Selection | None = None
    tolerance: float = 0.015
    callback: Callable[[Step], object] | None = None

    # The part of the budget that a rule may take.
    _OF_RULE: ClassVar[float] = 0.25

    def by(self, criterion: Criterion, held_out: HeldOut | None) -> Self:
        """The problem with a criterion, whose rule looks at no more data than a part of the budget pays for.

        Raises:
            ValueError: if the criterion does not go with the likelihood, or misses its data.
        """
        return replace(self, criterion=criterion, selection=criterion.rule(self.tangent, held_out, self._affordable))

    def _affordable(self, num_data: int, search: SearchCost) -> int:
        """How many of these data a part of the budget pays for."""
        if self.cost is None:
            return num_data
        return search.data_within(num_data, self.cost, self._OF_RULE * self.budget.left)

    @property
    def features(self) -> Features:
        """`Φ`, as the network gives it."""
        return self.tangent.model.features

    def memory_of(self, max_memory: float | None) -> Memory:
        """The memory of a method: what its `max_memory` says, by default half of what is free."""
        vector = self.dtype.itemsize * self.features.size
        return Memory(self.free_bytes if max_memory is None else max_memory, max_memory is not None, vector)

    @property
    def trained_weights(self) -> Float[Tensor, " P"]:
        """`w̄`."""
        return self.tangent.network.weights

    @property
    def num_observations(self) -> int:
        """`N·C`."""
        return self.features.num_data * self.features.num_outputs

    @property
    def measured(self) -> bool:
        """Whether the targets are measurements of the outputs."""
        return getattr(self.tangent.model.likelihood, "observe", None) is not None

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
