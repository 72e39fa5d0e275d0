"""`fitting`: what each fit does at its end, whether it comes to one or not."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from laplace_sampling.evidence.step import StopFit
from laplace_sampling.predictions.calibration import CalibrationWarning
from laplace_sampling.solvers.solver import ConvergenceWarning

if TYPE_CHECKING:
    from laplace_sampling.fitted import FittedModel

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fitting(fit: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A fit. After one that failed or was interrupted everything is as before, but for the steps that it finished."""

    @wraps(fit)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        model = cast("FittedModel", args[0])
        fitted, batching, max_rows = model._fitted, model.network.batching, model.network.batching.max_rows
        try:
            with model.settings.processes.shared_call():
                result = fit(*args, **kwargs)
            model._unfinished = ()
            return result
        except BaseException as error:
            # A warning of the end is raised where the user made it an error; the posterior is there.
            if not isinstance(error, ConvergenceWarning | CalibrationWarning):
                model._fitted, batching.max_rows = fitted, max_rows
            if not isinstance(error, StopFit):
                raise
        return cast(Result, model)

    return wrapper
