"""What a fit may cost, and what it has cost: counted in operations, the same in two runs."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, LinearisedLaplace
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.methods import problem as budgets
from laplace_sampling.methods.closed_form import Factored
from laplace_sampling.methods.problem import Budget, Strict
from laplace_sampling.networks.memory import Operations

COST = Cost(jvp=2.0, vjp=3.0, gradient=4.0)


def image_problem(num_data: int = 2000) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A convolutional classifier after some training, and its data."""
    model, data = trained_on_images(num_data)
    return copy.deepcopy(model), data


@cache
def trained_on_images(num_data: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(num_data, 1, 12, 12)
        y = (x[:, 0, :6].mean((1, 2)) > 0).long() + (x[:, 0, :, :6].mean((1, 2)) > 0).long()
        layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        model = nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 3))
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(60):
            some = torch.randint(num_data, (100,))
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()
    return model.eval(), list(zip(x.split(250), y.split(250), strict=True))


def fitted(data: Any, model: nn.Module, budget: float | None, **settings: Any) -> LinearisedLaplace:
    la = LinearisedLaplace(model, "classification", num_samples=16, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return la.fit_hyperparameters(data, budget=budget, progress=False)


def spent(la: LinearisedLaplace) -> float:
    return la.diagnose().epochs


def test_a_budget_counts_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.Budget, "FREE", 0.0)
    products = {"jvp": 100, "vjp": 100}
    budget = Budget(10.0, COST, 50, products)
    assert (budget.epoch, budget.spent, budget.left) == (200.0, 0.0, 2000.0)
    products.update(jvp=150, vjp=200)
    assert budget.operations == 50 * 2 + 100 * 3
    budget.add(100, dense=300)
    assert budget.spent == (400 + 100 + 300 / budgets.Estimate.DENSE) / 200
    assert budget.affords(budget.left)
    assert not budget.affords(1.01 * budget.left)
    assert not budget.refused
    passes = budget.left / (50 * 5)
    assert budget.affords_passes(0.99 * passes)
    assert budget.for_tuning(0.49 * passes)
    assert not budget.refused
    assert not budget.for_tuning(0.51 * passes)
    assert "10 training epochs" in budget.advice
    before = budget.spent
    budget.end()
    products["jvp"] = 10**9
    assert budget.affords_passes(1e30)
    assert budget.spent == before


def test_no_limit_and_a_second_of_operations() -> None:
    products = {"jvp": 0, "vjp": 0}
    assert Budget(None, COST, 50, products).affords(1e300)
    tiny = Budget(1e-9, COST, 50, products)
    assert tiny.affords(1e10)
    assert not tiny.affords(1.1e10)


def test_an_epoch_is_a_gradient_of_all_weights() -> None:
    model, data = image_problem(500)
    with Operations() as counted:
        for x, y in data:
            nn.functional.cross_entropy(model(x), y).backward()
    for parameters in (None, "last_layer"):
        la = LinearisedLaplace(model, "classification", parameters=parameters)
        assert_close(la.plan(data).epoch, counted.count, rtol=0.01, atol=0.0)


@covering(method=["auto", "krylov", "stochastic"], budget=[5.0, 20.0, 100.0])
def test_no_more_is_spent_than_allowed(method: str, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.Budget, "FREE", 0.0)
    model, data = image_problem()
    la = fitted(data, model, budget, method=method)
    assert 0.3 < spent(la) <= 1.1 * budget
    assert bool(la.samples_.isfinite().all())
    assert bool((la.predict(data[0][0]).variance >= 0).all())


@pytest.mark.parametrize("budget", [5.0, 40.0, None])
def test_a_fit_does_what_was_planned(budget: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.Budget, "FREE", 0.0)
    model, data = image_problem()
    plan = LinearisedLaplace(model, "classification", num_samples=16).plan(data, budget=budget)
    la = fitted(data, model, budget)
    assert la._fitted.fit.method.name == plan.method
    assert spent(la) / 1.5 < plan.epochs < 1.5 * spent(la)
    assert f'method="{plan.method}"' in str(plan)
    assert all(other.method.name in str(plan) for other in plan.candidates)


@pytest.mark.parametrize("method", ["kfac", "subset"])
@pytest.mark.parametrize("validation", [False, True])
def test_plan_and_rule_agree_on_what_the_rule_takes(
    method: str, validation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets.Budget, "FREE", 0.0)
    # Samples of the weights, as of large networks.
    monkeypatch.setattr("laplace_sampling.hyperparameters.covariance_path._MOST_WEIGHTS", 100)
    model, data = image_problem()
    held_out = [(x.flip(0), y.flip(0)) for x, y in data[:2]] if validation else None
    la = LinearisedLaplace(model, "classification", num_samples=16, method=method)
    plan = la.plan(data, held_out, budget=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(data, held_out, budget=10.0, progress=False)
    assert la.diagnose().method == plan.method == method
    print(method, validation, plan.epochs, spent(la))
    assert spent(la) / 1.35 < plan.epochs < 1.35 * spent(la)


def test_a_plan_fits_nothing() -> None:
    model, data = image_problem(250)
    la = LinearisedLaplace(model, "classification", num_samples=4)
    counts = dict(la.network.products)
    la.plan(data)
    assert la._fitted is None
    assert la.network.products == counts


def test_what_the_budget_does_not_pay_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.Budget, "FREE", 0.0)
    model, data = image_problem(250)
    la = LinearisedLaplace(model, "classification", method="krylov", num_samples=16)
    with pytest.warns(ConvergenceWarning, match="Kronecker"):
        la.fit(data, budget=8.0, progress=False)
    assert not la.converged_
    with pytest.warns(ConvergenceWarning, match="budget=None"):
        la.fit(data, budget=85.0, tolerance=1e-5, progress=False)
    assert la._fitted.fit.method.name == "krylov"
    assert spent(la) <= 94
    before = spent(la)
    la.sample(2)  # is asked for, and takes what it takes
    assert spent(la) == before


def test_kronecker_factors_are_of_as_many_gradients_as_the_budget_pays_for() -> None:
    model, data = image_problem()
    whole, part, free = (
        LinearisedLaplace(model, "classification", method="kfac").fit(data, budget=budget, progress=False)
        for budget in (Strict(20.0), Strict(1.0), 1.0)
    )
    methods = [la._require("test").posterior.method for la in (whole, part, free)]
    assert all(isinstance(method, Factored) for method in methods)
    numbers = [getattr(method, "num_data", None) for method in methods]
    # Without `Strict` a second or so is free.
    assert numbers[0] == numbers[2] == 2000
    assert numbers[1] in (250, 500, 1000)
    assert spent(part) < spent(whole)
    gammas = [float(la.effective_dimension_) for la in (whole, part)]
    assert abs(gammas[1] / gammas[0] - 1) < 0.3
