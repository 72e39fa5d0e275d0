"""`Step`: what loggers get, and fits that a callback ends."""

import pytest
import torch
from torch import nn

from laplace_sampling import LinearisedLaplace, Step, StopFit

X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BATCHES = [(X, X.sum(1, keepdim=True).sin())]


def laplace(**settings) -> LinearisedLaplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return LinearisedLaplace(model, "regression", method="krylov", num_samples=4, **settings)


def test_numbers_by_name() -> None:
    step = Step(2, [1.0, 2.0], [3.0, 4.0], [5.0], None, 6.0, 7.0, 8.0, 9.0, noise_precision=[0.5])
    assert step.to_dict() == {
        "step": 2,
        "prior_precision/0": 1.0,
        "prior_precision/1": 2.0,
        "new_prior_precision/0": 3.0,
        "new_prior_precision/1": 4.0,
        "effective_dimension": 5.0,
        "loss": 6.0,
        "network_loss": 7.0,
        "passes": 8.0,
        "seconds": 9.0,
        "noise_precision": 0.5,
    }


def test_steps_of_a_fit_are_logged_as_they_are_made() -> None:
    logged: list[dict[str, float]] = []
    la = laplace().fit_hyperparameters(BATCHES, progress=False, callback=lambda step: logged.append(step.to_dict()))
    assert logged == [step.to_dict() for step in la.history_]
    assert logged


@pytest.mark.parametrize("fitted", [False, True])
def test_a_fit_that_is_stopped_keeps_what_was_fitted_before(fitted: bool) -> None:
    def stop(step: Step) -> None:
        raise StopFit

    la = laplace()
    if fitted:
        la.fit(BATCHES, progress=False)
        before = la.samples_.clone()
    assert la.fit_hyperparameters(BATCHES, progress=False, callback=stop) is la
    assert len(la.history_) == 1
    assert (la._fitted is not None) == fitted
    if fitted:
        assert torch.equal(la.samples_, before)
        la.predict(X)


def test_other_exceptions_reach_the_caller() -> None:
    def fail(step: Step) -> None:
        raise KeyError(step.step)

    with pytest.raises(KeyError, match="1"):
        laplace().fit_hyperparameters(BATCHES, progress=False, callback=fail)
