"""`PlannedModel`: what a fit will do and cost, before it runs."""

from collections.abc import Iterable
from typing import Any

from laplace_sampling.criterion import with_selection
from laplace_sampling.fitted import FittedModel
from laplace_sampling.held_out import HeldOut, check_calibration
from laplace_sampling.methods.budget import counted_in
from laplace_sampling.methods.method import Method
from laplace_sampling.methods.plan import Plan, rung_of
from laplace_sampling.methods.problem import Problem
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.preparation import prepare

__all__ = ["PlannedModel"]


class PlannedModel(FittedModel):
    """A model whose fits are planned."""

    @solver_call
    def plan(
        self,
        loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        budget: float | None = 20.0,
        criterion: str = "auto",
        **data: Any,
    ) -> Plan:
        """What `fit_hyperparameters` will do with these data: method, training epochs, memory, and why; `print` it.

        All data are read and go through the network once, and a few Jacobian products are made, whose operations are
        counted. Nothing is fitted, and what was fitted before stays.

        Args:
            loader: as of `fit_hyperparameters`.
            val_loader: likewise.
            budget: likewise.
            criterion: likewise.
            data: `noise_variances`, `weights`, `unpack` and `num_data`, likewise.

        Raises:
            TypeError, ValueError: as of `fit_hyperparameters`, also where no method can fit.
        """
        settings, batching, counts = self.settings, self.network.batching, dict(self.network.products)
        max_rows = batching.max_rows
        try:
            if val_loader is not None:
                check_calibration("val_loader", settings.observation, data.get("noise_variances") is not None)
            problem = prepare(settings, self.network, loader, budget=budget, **data)
            held_out = None
            if val_loader is not None:
                held_out = HeldOut.read(val_loader, self.network, settings, data.get("unpack"))
            return _plan_of(with_selection(criterion, settings, problem, held_out), settings.method)
        finally:
            batching.max_rows = max_rows
            self.network.products.update(counts)


def _plan_of(problem: Problem, asked: Method) -> Plan:
    """What a method makes of a problem, without a fit."""
    budget, cost = problem.budget, problem.cost
    assert cost is not None
    choice = asked.choose(problem)
    choice = choice.method.paid_for(problem, choice)
    choice.method.check(problem)
    chosen = rung_of(choice.method.name, choice.method, problem, cost)
    rungs = tuple(asked.rungs(problem, cost)) or (chosen,)
    # Iterations stop where the budget ends, closed forms do not.
    stops = budget.epochs is not None and choice.method.predicted(problem, cost).least is not None
    epochs = min(chosen.epochs, budget.allowed / budget.epoch) if stops else chosen.epochs
    reason = choice.shortfall or choice.reason
    remark = counted_in(chosen.dense) + budget.excess(epochs * budget.epoch)
    return Plan(choice.method.name, epochs, chosen.bytes, reason, budget.epochs, budget.epoch, rungs, remark)
