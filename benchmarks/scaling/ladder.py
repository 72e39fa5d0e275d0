"""What `la.plan` says for problems that are too large to be made: its own predictions, from sizes alone."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.scaling.model import Work, jvp_operations, vjp_operations
from laplace_sampling.criterion import with_selection
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.features import Features
from laplace_sampling.methods import as_method
from laplace_sampling.methods.auto import LADDER, Auto
from laplace_sampling.methods.budget import Budget
from laplace_sampling.methods.plan import Rung, rung_of
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.settings import Settings

__all__ = ["Ladder", "cost_of", "ladder"]


class _Sizes(Features):
    """Features of which only the sizes are known."""

    def __init__(self, work: Work) -> None:
        self.num_data, self.num_outputs, self.size = work.num_data, work.outputs, work.weights
        self.batch_size = work.batch

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        raise NotImplementedError("There are no data.")

    vjp = vjp_each = rows = jvp  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True)
class Ladder:
    """The rungs of `method="auto"` for a classification, and what the rule for the prior precision looks at.

    Attributes:
        rungs: exact, samples by solves, a part of the data; Kronecker factors need the layers of a network.
        rule_jvps: JVPs of a datum that the rule takes.
        rule_vjps: VJPs, likewise.
    """

    rungs: tuple[Rung, ...]
    rule_jvps: float
    rule_vjps: float

    @property
    def chosen(self) -> Rung:
        """The first that the budget pays for."""
        return next(rung for rung in self.rungs if rung.affordable)

    @property
    def solves(self) -> Rung:
        """Samples by solves."""
        return self.rungs[1]


def cost_of(work: Work) -> Cost:
    """Operations of one product of one datum, as `linear_model.cost` counts them."""
    vjp = vjp_operations(work, 1, 1)
    return Cost(jvp_operations(work, 1, 1), vjp, vjp)


def ladder(
    work: Work, memory: float, *, num_samples: int = 64, budget: float = 20.0, cost: Cost | None = None
) -> Ladder:
    """The ladder with a budget of training epochs.

    Args:
        work: sizes.
        memory: bytes that solvers may take, half of what is free by default.
        num_samples: `K`.
        budget: in training epochs.
        cost: of a datum, by default by the formulas of the model.
    """
    settings, features = Settings.of("classification", num_samples=num_samples), _Sizes(work)
    cost = cost_of(work) if cost is None else cost
    allowance = Budget(budget, cost, work.num_data, {"jvp": 0, "vjp": 0})
    # All data go through the network once before, as in `preparation.prepare`.
    allowance.add(work.num_data * cost.gradient / 3)
    model = SimpleNamespace(features=features, likelihood=settings.likelihood, num_data=work.num_data)
    tangent: Any = SimpleNamespace(model=model, network=None, in_order=False)
    problem = Problem(
        tangent,
        settings.prior,
        layers=lambda: ([], torch.zeros(0)),
        num_samples=num_samples,
        seed=0,
        dtype=torch.float32,
        progress=False,
        memory_of=lambda given: Memory(memory if given is None else given, given is not None, 4 * work.weights),
        cost=cost,
        budget=allowance,
    )
    problem = with_selection("auto", settings, problem, None)
    auto = as_method("auto")
    assert isinstance(auto, Auto)
    rungs = []
    for name, method in LADDER[:3]:
        chosen = auto._solves(problem, cost).method if method is None else as_method(method).within(problem, cost)
        rungs.append(rung_of(name, chosen, problem, cost))
    assert problem.selection is not None
    looks = problem.selection.looks(features)
    return Ladder(tuple(rungs), looks.products(features), looks.num_vjps)
