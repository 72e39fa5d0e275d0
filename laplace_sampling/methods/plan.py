"""`Plan`: what a fit will do and cost, said before it runs."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laplace_sampling.linear_model.cost import Cost
    from laplace_sampling.methods.method import Method
    from laplace_sampling.methods.problem import Problem


@dataclass(frozen=True)
class Rung:
    """A method on the ladder, and whether budget and memory are enough for it.

    Attributes:
        name: of the kind of posterior.
        method: that finds it.
        epochs: predicted, in training epochs.
        bytes: predicted, of memory.
        affordable: whether both are there.
        reason: in words.
        dense: whether dense algebra is counted, too.
    """

    name: str
    method: "Method"
    epochs: float
    bytes: float
    affordable: bool
    reason: str
    dense: bool


@dataclass(frozen=True)
class Plan:
    """What `fit_hyperparameters` will do: `print` it.

    Attributes:
        method: its name.
        epochs: predicted, in training epochs: gradients of all data, counted in floating-point operations.
        bytes: predicted memory of solvers and matrices, without that of the network itself.
        reason: why this method.
        budget: training epochs that are allowed; `None` for any number.
        epoch: floating-point operations of a training epoch.
        rungs: all methods that were looked at, from the best posterior down.
        remark: which operations are counted, and why they may be more than the budget.
    """

    method: str
    epochs: float
    bytes: float
    reason: str
    budget: float | None
    epoch: float
    rungs: tuple[Rung, ...]
    remark: str = ""

    def __str__(self) -> str:
        allowed = "no limit" if self.budget is None else f"a budget of {self.budget:g}"
        head = (
            f'method="{self.method}": about {_epochs(self.epochs)} training epochs ({allowed}; one takes '
            f"{self.epoch:.2g} operations) and {_size(self.bytes)}, {self.reason}"
        )
        head += f"\nEpochs are {self.remark}." if self.remark else ""
        rows = [
            (rung.name, f'"{rung.method.name}"', _epochs(rung.epochs), _size(rung.bytes), rung.reason)
            for rung in self.rungs
        ]
        rows.insert(0, ("posterior", "method", "epochs", "memory", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        return "\n".join([head, "", *(line.rstrip() for line in lines)])


def rung_of(name: str, method: "Method", problem: "Problem", cost: "Cost") -> Rung:
    """A method, what it is predicted to take, and whether that is there."""
    budget, estimate = problem.budget, method.predicted(problem, cost)
    try:
        method.check_likelihood(problem.tangent.model.likelihood)
        method.check(problem)
        fits = method.is_held(problem, cost)
    except ValueError:
        fits = False
    pays = budget.affords(estimate.total)
    epochs = estimate.total / (cost.gradient * problem.features.num_data)
    reason = _reason(fits, pays, epochs, problem)
    return Rung(name, method, epochs, estimate.bytes, fits and pays, reason, estimate.dense > 0)


def _reason(fits: bool, pays: bool, epochs: float, problem: "Problem") -> str:
    budget = problem.budget
    if not fits:
        return "more than memory holds, or not possible for these data"
    if budget.epochs is None:
        return "as there is no limit"
    if not pays:
        return f"more than the budget of {budget.epochs:g} epochs"
    within = epochs <= budget.epochs
    return f"within the budget of {budget.epochs:g} epochs" if within else "a second or so of operations"


def _epochs(epochs: float) -> str:
    return f"{epochs:.2g}" if epochs < 100 or not math.isfinite(epochs) else f"{epochs:.0f}"


def _size(bytes_: float) -> str:
    unit = min(3, max(0, int(math.log2(max(bytes_, 1)) // 10)))
    return f"{bytes_ / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
