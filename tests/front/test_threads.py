"""Calls in several threads at the same time have the results of calls one after the other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import make_case
from flat_settings import loader
from snapshot import assert_unchanged, snapshot
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from laplace_sampling import LinearisedLaplace


def together(call: Callable[[int], Any], count: int, threads: int) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, range(count)))


def fitted(name: str, method: str, **settings: Any) -> tuple[LinearisedLaplace, Any]:
    case = make_case(name)
    la = LinearisedLaplace(case.model, case.likelihood, method=method, num_samples=8, **settings)
    la.fit(loader(case), progress=False)
    case.model.train()  # so that a model that is left in evaluation mode is seen
    return la, case.x


def moments(la: LinearisedLaplace, x: Any) -> tuple[Tensor, Tensor]:
    pred = la.predict(x)
    return pred.deviations, pred.stddev


def all_equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, a, b))


def test_200_predictions_by_four_threads_on_two_models() -> None:
    models = [fitted("regression", "krylov"), fitted("conv_batch_norm", "exact")]
    expected = [moments(la, x) for la, x in models]
    before = [snapshot(la.network.source) for la, _ in models]
    found = together(lambda n: all_equal(moments(*models[n // 2 % 2]), expected[n // 2 % 2]), 200, 4)
    assert found == [True] * 200
    for (la, _), state in zip(models, before, strict=True):
        assert_unchanged(la.network.source, state)


@pytest.mark.parametrize(("method", "parameters"), [("krylov", "last_layer"), ("kfac", None), ("diagonal", None)])
def test_fits_of_one_model_in_two_threads(method: str, parameters: str | None) -> None:
    case = make_case("classification")

    def fit(_: int) -> tuple[Tensor, Tensor]:
        la = LinearisedLaplace(case.model, "classification", method=method, parameters=parameters, num_samples=4)
        return moments(la.fit(loader(case, 4), progress=False), case.x)

    expected = fit(0)
    assert all(all_equal(found, expected) for found in together(fit, 12, 3))
    # The flag of torch that its modes set, one in a process: with it nothing is compiled any more.
    assert not is_in_torch_dispatch_mode()


def test_covariances_that_are_computed_when_they_are_asked_for() -> None:
    la, x = fitted("conv_batch_norm", "exact")
    expected = la.predict(x)
    variance, joint = expected.variance, expected.joint_covariance()
    lazy = [la.predict(x) for _ in range(24)]
    found = together(lambda n: lazy[n].joint_covariance() if n % 2 else lazy[n].variance, 24, 4)
    assert all(torch.equal(value, joint if n % 2 else variance) for n, value in enumerate(found))


def test_data_may_wait_for_a_thread_that_predicts() -> None:
    la, x = fitted("regression", "krylov")
    case = make_case("regression")
    batches = [(case.x, case.given[1])]

    class Predicting:
        """A loader that lets another thread predict."""

        def __iter__(self):
            thread = threading.Thread(target=la.predict, args=(x,), daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            return iter(batches)

        def __len__(self) -> int:
            return 1

    other = LinearisedLaplace(case.model, "regression", method="krylov", num_samples=2)
    assert other.fit(Predicting(), progress=False).predict(x).stddev.isfinite().all()
