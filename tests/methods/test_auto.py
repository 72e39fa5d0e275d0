"""The choice of a method by sizes, memory and operations."""

from functools import partial
from typing import Any

import pytest
import torch
from flat_settings import fit_case, in_observation_space
from problems import linear_problem, trained, unsolved_problem

from laplace_sampling import SGD, SVRG, Auto, Categorical, Krylov, LinearisedLaplace
from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.methods import auto
from laplace_sampling.methods.method import Choice


def test_operations_are_counted_and_the_same_each_time() -> None:
    model, data = linear_problem("classification")
    la = LinearisedLaplace(model, "classification", method="krylov", num_samples=2).fit(data, progress=False)
    first, second = (measure(la._fitted.fit.model.features) for _ in range(2))
    product = 2 * 60 * 2  # multiplications and additions of x W: two products at least, the network and its derivative
    assert 2 * product <= first.jvp <= 3 * product
    assert 2 * product <= first.vjp <= 3 * product
    assert first == second
    assert first.gradient == first.vjp


def choose(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
    max_memory: float,
    operations: float = 1.0,
    **settings: Any,
) -> Choice:
    """What "auto" makes of `(N, P)`, for products of a network that take so many operations."""
    monkeypatch.setattr(auto, "measure", lambda _: Cost(operations, operations, operations))
    return Auto().choose(unsolved_problem(*sizes, max_memory, **settings))


@pytest.mark.parametrize(
    ("num_data", "size", "operations", "method", "solver"),
    [
        (100, 55, 1.0, "exact", None),  # small
        (500, 3000, 1e6, "krylov", None),
        (500, 3000, 1e10, "exact", None),  # a Jacobian costs less than many passes of an expensive network
        (2500, 2500, 1.0, "krylov", None),  # factorisations cost more than passes of a cheap one, and it pays
        (30_000, 5000, 1e6, "stochastic", SVRG),
        (30_000, 3000, 1e3, "stochastic", SGD),  # a preconditioner would cost more than the passes that it saves
        (30_000, 10**6, 1e6, "stochastic", SGD),  # memory holds no preconditioner
    ],
)
def test_auto_goes_by_size_unless_operations_differ_much(
    num_data: int, size: int, operations: float, method: str, solver: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_weights = {"outputs": 5, "likelihood": Categorical(), "in_observation_space": False}
    chosen = partial(choose, monkeypatch, (num_data, size), operations=operations, **in_weights)
    choice = chosen(max_memory=1e9)
    assert choice.method.name == method
    assert solver is None or type(choice.method.solver) is solver
    assert chosen(max_memory=1e9) == choice
    if operations == 1e10:
        assert "products of this network are expensive" in choice.reason
        assert chosen(max_memory=1e7).method.name == "krylov"


def test_auto_takes_observation_space_where_it_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = partial(choose, monkeypatch, operations=2e6)
    wide = chosen((900, 10**6), 4e9)
    assert wide.method.name == "exact"
    assert wide.reason == "a matrix of 900 rows is cheap"
    assert chosen((900, 10**6), 4e9, in_observation_space=False).method.name != "exact"
    assert "the curvature of 500 weights is one sum over 900 rows" in chosen((900, 500), 4e9).reason
    labels = chosen((900, 500), 4e9, likelihood=Categorical())
    assert "and a Jacobian of 4.5e+05 numbers, are cheap" in labels.reason
    # Memory for samples, but for no Krylov basis.
    size = 10**6
    little = 4 * size * (16 + 60)
    choice = chosen((10_000, size), little)
    assert choice.method.name == "dual"
    assert "memory holds no Krylov basis of weights, but vectors of N·C = 10000 observations" in choice.reason
    assert chosen((10_000, size), little, likelihood=Categorical()).method.name == "krylov"


def test_auto_goes_by_the_memory_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "measure", lambda _: Cost(1e6, 1e6, 1.0))
    few = Auto(max_memory=4 * 3000 * 100).choose(unsolved_problem(5000, 3000, 1e12, num_samples=64))
    assert few.method == Krylov(max_memory=4 * 3000 * 100)
    assert "holds" not in few.reason  # no Krylov basis
    many = Auto(autocast=torch.bfloat16).choose(unsolved_problem(15_000, 14_000, 1e10, num_samples=64))
    assert many.method == Krylov(autocast=torch.bfloat16)
    assert "and memory holds" in many.reason


def test_a_stream_is_read_in_full_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(monkeypatch, (30_000, 20_000), 1e10, in_order=True)
    assert choice.method == Krylov()
    assert choice.reason == "a stream of data is read in its order, in full passes"


def test_auto_is_exact_on_small_regressions() -> None:
    la = fit_case(trained(), "auto")
    assert in_observation_space(la)
