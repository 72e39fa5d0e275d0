"""The table of criteria: what each string stands for."""

from collections.abc import Callable

from laplace_sampling.hyperparameters.criterion import (
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


def as_criterion(criterion: str | Criterion) -> Criterion:
    """The criterion that a user gives by name or as an object.

    Raises:
        TypeError, ValueError: for one that is not known.
    """
    if isinstance(criterion, Criterion):
        return criterion
    if not isinstance(criterion, str):
        raise TypeError(f"`criterion` must be one of {list(CRITERIA)} or a `Criterion`, but is {criterion!r:.80}.")
    if criterion not in CRITERIA:
        raise ValueError(f"`criterion={criterion!r}` is not known; use one of {list(CRITERIA)}.")
    return CRITERIA[criterion]()
