"""`Budget`: what a fit may cost and what it has cost, in training epochs; counted in operations, never timed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.solvers.solver import Afford

# Floating-point operations that are never refused, a second or so: an epoch of a tiny network takes microseconds. At
# half and twice networks up to half and twice as large may do what they like.
_FREE = 1e10
# Operations of dense algebra in float64 in the time of one of a network. On one core products of matrices run at 14 to
# 50 e9 a second, eigendecompositions at 12; gradients of a LeNet and of a CNN with batch norm at 6, those of an MLP at
# 60. With half the value exact posteriors are taken up to matrices a fifth smaller, with twice a quarter larger.
_DENSE = 3.0
# The part of what is left that a search for hyperparameters may take: the rest is for the samples.
_TUNING = 0.5


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

    operations: float
    bytes: float
    dense: float = 0.0
    least: float | None = None

    @property
    def total(self) -> float:
        """In operations of the network."""
        return self.operations + self.dense / _DENSE


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
        """Operations of a training epoch: a gradient of each datum."""
        return math.nan if self.cost is None else self.cost.gradient * self.num_data

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
        return max(self.epochs * self.epoch, 0.0 if isinstance(self.epochs, Strict) else _FREE)

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
        return partial(self.affords_passes, reserve=_TUNING * left if math.isfinite(left) else 0.0)

    def add(self, operations: float = 0.0, dense: float = 0.0) -> None:
        """Count operations that are no products, and those of dense algebra."""
        self.others += operations + dense / _DENSE
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
