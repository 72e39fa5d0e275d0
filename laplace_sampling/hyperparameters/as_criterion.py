"""The table of criteria: what each string stands for."""

from collections.abc import Callable

from laplace_sampling.hyperparameters.criterion import (
    Accuracy,
    Criterion,
    Default,
    Evidence,
    LeftOutLabels,
    SelfConsistency,
    Validation,
)

CRITERIA: dict[str, Callable[..., Criterion]] = {
    "auto": Default,
    "evidence": Evidence,
    "leave_one_out": LeftOutLabels,
    "self_consistency": SelfConsistency,
    "validation": Validation,
}


def as_criterion(criterion: str | Criterion, accuracy: float | None = None) -> Criterion:
    """The criterion that a user gives by name, as an object, or by the accuracy on new data.

    Raises:
        TypeError, ValueError: for one that is not known, or two.
    """
    if accuracy is not None:
        if criterion != "auto":
            raise ValueError("`accuracy=a` is short for `criterion=Accuracy(a)`: give `accuracy` or `criterion`.")
        return Accuracy(accuracy)
    if isinstance(criterion, Criterion):
        return criterion
    if not isinstance(criterion, str):
        raise TypeError(f"`criterion` must be one of {list(CRITERIA)} or a `Criterion`, but is {criterion!r:.80}.")
    if criterion not in CRITERIA:
        raise ValueError(f"`criterion={criterion!r}` is not known; use one of {list(CRITERIA)}.")
    return CRITERIA[criterion]()
