"""The choice of a method by sizes, memory and operations."""

from functools import partial
from typing import Any

import pytest
import torch
from flat_settings import fit_case, in_observation_space
from problems import linear_problem, trained, unsolved_problem

from laplace_sampling import SGD, SVRG, Auto, Categorical, Krylov, LinearisedLaplace
from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.methods import plan
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
    operations: float = 1e6,
    **settings: Any,
) -> Choice:
    """What "auto" makes of `(N, P)` without a budget, for products of a network that take so many operations."""
    monkeypatch.setattr(plan, "measure", lambda _: Cost(operations, operations, operations))
    return Auto().choose(unsolved_problem(*sizes, max_memory, **settings))


@pytest.mark.parametrize(
    ("num_data", "size", "operations", "method", "solver"),
    [
        (100, 55, 1.0, "exact", None),
        (500, 3000, 1e6, "exact", None),  # dense algebra of 2,500 rows takes a minute at most
        (2500, 2500, 1e10, "exact", None),  # many passes of an expensive network cost more than its Jacobian
        (3000, 6000, 1.0, "krylov", None),  # factorisations cost more than passes of a cheap one
        (30_000, 9000, 1e4, "stochastic", SVRG),
        (30_000, 3 * 10**6, 1e6, "stochastic", SGD),  # memory holds no preconditioner
    ],
)
def test_auto_is_exact_unless_operations_differ_much(
    num_data: int, size: int, operations: float, method: str, solver: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_weights = {"outputs": 5, "likelihood": Categorical(), "in_observation_space": False}
    chosen = partial(choose, monkeypatch, (num_data, size), operations=operations, **in_weights)
    choice = chosen(max_memory=4e9)
    assert choice.method.name == method
    assert solver is None or type(choice.method.solver) is solver
    assert chosen(max_memory=4e9) == choice
    assert "as there is no limit" in choice.reason


def test_auto_takes_observations_where_memory_holds_no_basis_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    size, chosen = 10**6, partial(choose, monkeypatch)
    assert chosen((900, size), 4e9).method.name == "exact"
    # Memory for samples, but for no Krylov basis.
    little = 4 * size * (16 + 60)
    assert chosen((10_000, size), little).method.name == "dual"
    assert chosen((10_000, size), little, likelihood=Categorical()).method.name == "krylov"


def test_auto_hands_on_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure", lambda _: Cost(1e6, 1e6, 1.0))
    few = Auto(max_memory=4 * 3000 * 100).choose(unsolved_problem(5000, 3000, 1e12, num_samples=64))
    assert few.method == Krylov(max_memory=4 * 3000 * 100)
    many = Auto(autocast=torch.bfloat16).choose(unsolved_problem(15_000, 14_000, 1e10, num_samples=64))
    assert many.method == Krylov(autocast=torch.bfloat16)


def test_a_stream_is_read_in_full_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, (30_000, 20_000), 1e10, in_order=True).method == Krylov()


def test_auto_is_exact_on_small_regressions() -> None:
    la = fit_case(trained(), "auto")
    assert in_observation_space(la)
