"""Predictions, and what they are of, are pickled and copied."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Case, make_case
from flat_settings import loader
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, LinearisedLaplace
from laplace_sampling.predictions import function_covariance


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def fitted(case: Case, method: str) -> LinearisedLaplace:
    la = LinearisedLaplace(case.model, case.likelihood, method=method, num_samples=3)
    return la.fit(loader(case), progress=False)


def numbers(pred: Any) -> list[Tensor]:
    parts = [pred.samples, pred.variance, pred.covariance(), pred.joint_covariance()]
    for name in ("probs", "observation_variance", "entropy"):
        parts += [getattr(pred, name)] if hasattr(pred, name) else []
    return parts + [t for head in getattr(pred, "heads", {}).values() for t in numbers(head)]


@covering(
    rest=False,
    name=[name for name in CASES if "many_data" not in name],
    method=["exact", "kfac"],
    again=[pickled, copy.deepcopy],
)
def test_a_copy_predicts_the_same(name: str, method: str, again: Callable[[Any], Any]) -> None:
    case = make_case(name)
    la = fitted(case, method)
    pred = la.predict(case.x)
    copied = again(pred)
    assert type(copied) is type(pred)
    for a, b in zip(numbers(copied), numbers(pred), strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-14)
    y = case.given[1]
    assert_close(copied.log_prob(y), pred.log_prob(y), rtol=1e-10, atol=0)
    assert_close(pickled(copied).variance, pred.variance, rtol=1e-10, atol=0)


def test_covariances_that_are_too_large_stay_behind(monkeypatch) -> None:
    case = make_case("classification")
    pred = fitted(case, "exact").predict(case.x)
    num, size = pred.outputs.shape
    monkeypatch.setattr(function_covariance, "_KEPT", num * size**2)
    copied = pickled(pred)
    assert torch.equal(copied.covariance(), pred.covariance())
    with pytest.raises(ValueError, match="joint_covariance"):
        copied.joint_covariance()
    assert torch.equal(copy.deepcopy(pred).joint_covariance(), pred.joint_covariance())


def test_a_network_that_changed_before_it_is_pickled() -> None:
    case = make_case("classification")
    pred, expected = (fitted(case, "exact").predict(case.x) for _ in range(2))
    expected = expected.variance
    next(case.model.parameters()).data += 1
    assert torch.equal(pickled(pred).variance, expected)


def test_measurements_by_functions_pickle_with_the_prediction_of_outputs() -> None:
    T = torch.ones(1, 2, dtype=torch.float64)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    y = model(x).detach() @ T.T + 0.1
    la = LinearisedLaplace(model, Gaussian(1.0, observe=T), method="exact", num_samples=2).fit([(x, y)], progress=False)
    for observed in (False, True):
        pred = la.predict(x, observed=observed)
        assert torch.equal(pickled(pred).variance, pred.variance)


@covering(method=["exact", "krylov", "stochastic", "dual", "kfac"], again=[pickled, copy.deepcopy])
def test_a_copy_of_a_fit_goes_on(method: str, again: Callable[[Any], Any]) -> None:
    case = make_case("regression")
    la = fitted(case, method)
    pred, copied = la.predict(case.x), again(la)
    assert copied.network.source is not case.model
    assert torch.equal(copied.predict(case.x).variance, pred.variance)
    assert torch.equal(copied.sample(2), la.sample(2))
    next(case.model.parameters()).data += 1  # the copy has a network of its own
    assert torch.equal(copied.predict(case.x).variance, pred.variance)
