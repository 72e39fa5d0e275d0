"""A method is one file and one line: what another one needs to be taken everywhere."""

from dataclasses import dataclass, replace

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from torch.testing import assert_close

from laplace_sampling import Auto, Exact, Krylov, LinearisedLaplace, methods
from laplace_sampling.methods import METHODS, as_method, method_from_recipe, recipe_of_method
from laplace_sampling.methods.solver_method import SolverMethod
from laplace_sampling.solvers.dense import Dense


@dataclass(frozen=True, kw_only=True)
class Toy(SolverMethod):
    """Dense algebra on what the network gives, for the sake of a test."""

    tolerance: float = 1e-12

    @property
    def name(self):
        return "toy"

    def make_solver(self, task, tolerance, shift):
        return Dense(tolerance=self.tolerance)

    def judge(self, sampled, solver):
        return sampled.residual, 1e-6


@pytest.mark.parametrize("name", ["regression", "classification"])
def test_a_new_method_is_a_file_and_a_line(name, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(methods, "import_module", lambda path: pytest.importorskip("builtins"), raising=True)
    monkeypatch.setitem(METHODS, "toy", ("toy", "Toy", {}))
    import builtins

    monkeypatch.setattr(builtins, "Toy", Toy, raising=False)
    case = make_case(name)
    toy = LinearisedLaplace(case.model, case.given[0], method="toy", num_samples=4).fit(case.batches, progress=False)
    monkeypatch.undo()
    exact = LinearisedLaplace(case.model, case.given[0], method="exact", num_samples=4).fit(
        case.batches, progress=False
    )
    assert "method='toy' → 'toy': as asked for" in repr(toy)
    assert_close(toy.samples_, exact.samples_, rtol=1e-6, atol=1e-8)
    assert_close(toy.predict(case.x).stddev, exact.predict(case.x).stddev, rtol=0.5, atol=1.0)
    assert float(toy.log_marginal_likelihood()) == pytest.approx(float(exact.log_marginal_likelihood()), rel=0.05)
    toy.fit_hyperparameters(case.batches, progress=False, max_steps=30, tolerance=0.1)
    assert len(toy.history_) >= 1


@pytest.mark.parametrize("name", METHODS)
def test_a_string_stands_for_a_method_with_its_defaults(name) -> None:
    method = as_method(name)
    assert method.name == name
    assert as_method(method) is method
    assert method_from_recipe(recipe_of_method(method)) == method
    changed = replace(method, max_memory=1e9, autocast=torch.bfloat16)
    assert method_from_recipe(recipe_of_method(changed)) == changed


def test_settings_of_a_method_are_kept_in_files(tmp_path) -> None:
    case = make_case("classification")
    method = Krylov(max_memory=1e9)
    la = laplace_of(case.model, "classification", method=method, num_samples=4).fit(case.batches, progress=False)
    la.save(tmp_path / "la.pt")
    assert LinearisedLaplace.load(tmp_path / "la.pt", case.model).settings.method == method


def test_unknown_methods_say_which_there_are() -> None:
    case = make_case("classification")
    with pytest.raises(ValueError, match=r"`method='newton'` is not known; use one of \['auto', 'exact', 'krylov'"):
        LinearisedLaplace(case.model, "classification", method="newton")
    with pytest.raises(ValueError, match="`max_memory` must be a positive number of bytes, but is -1"):
        Exact(max_memory=-1)
    assert as_method("auto") == Auto()
