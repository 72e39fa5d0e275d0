"""From the posterior that a `LinearisedLaplace` has to the start of its next fit."""

from dataclasses import replace
from typing import TYPE_CHECKING

from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.methods.method import Task
from laplace_sampling.methods.problem import Start
from laplace_sampling.solvers.checks import check_flag

if TYPE_CHECKING:
    from laplace_sampling.fitted import Fitted

__all__ = ["warmed"]


def warmed(task: Task, fitted: "Fitted | None", warm_start: bool) -> Task:
    """The task of a fit that starts from what was fitted before, with its precisions; without that, a cold one.

    Raises:
        TypeError: if `warm_start` is not a bool.
        ValueError: if the random weights are not those of the earlier fit.
    """
    check_flag("`warm_start`", warm_start)
    if fitted is None or not warm_start:
        return task
    start = start_of(fitted, task.seed)
    start.check(task.prior)
    model = task.model.with_likelihood(start.likelihood_from(task.model.likelihood))
    return replace(task, model=model, prior=start.prior_from(task.prior), start=start)


def start_of(fitted: "Fitted", seed: int) -> Start:
    """What a fit takes from an earlier one, also from one that was loaded without its data."""
    posterior, fit = fitted.posterior, fitted.fit
    known = None if fit is None or fit.known_mode is None else fit.known_mode.weights
    return Start(
        prior=posterior.prior,
        likelihood=posterior.likelihood,
        samples=posterior.samples if posterior.method.minimises else None,
        draws=Draws(len(posterior.samples), seed, Stream.SAMPLES),
        mode=known if posterior.mode is None else posterior.mode,
        solver=getattr(fit, "solver", None),
    )
