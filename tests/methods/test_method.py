"""A method is one file and one line; what every method has in common: names, recipes, memory."""

import json
from dataclasses import dataclass

import pytest
import reference
import torch
from cases import make_case
from flat_settings import laplace_of
from problems import linear_problem, unsolved_problem
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling import SGD, SVRG, Dual, Evidence, Factored, Krylov, LinearisedLaplace, Stochastic
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods import METHODS, as_method, method_from_recipe, recipe_of_method
from laplace_sampling.methods.method import Task
from laplace_sampling.methods.solves import Solves
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.preconditioners import Curvature, Jacobi
from laplace_sampling.solvers.solver import Solver


@dataclass(frozen=True, kw_only=True)
class Toy(Solves):
    """Dense algebra by products with the network: all that a file of a new method needs."""

    residual: float = 1e-6

    @property
    def name(self) -> str:
        return "toy"

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        return Dense()

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, self.residual


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line in the table."""
    monkeypatch.setitem(METHODS, "toy", Toy())


class Own(Jacobi):
    """A class of curvature that files do not know."""


@dataclass(frozen=True, kw_only=True)
class Even(Factored):
    """The same curvature of all weights: all that a file of a new closed form needs."""

    kind_of_curvature: type[Jacobi] = Jacobi

    @property
    def name(self) -> str:
        return "even"

    def curvature_of(self, ggn: GGN, prior: GaussianPrior, seed: int) -> Curvature:
        return self.kind_of_curvature(3 * prior.scale.double() ** 2)


@pytest.mark.parametrize("prior", ["isotropic", "layerwise", "g-prior"])
@pytest.mark.parametrize("known", [True, False])
def test_a_new_closed_form_is_one_function(known: bool, prior: str, tmp_path) -> None:
    case = make_case("regression")
    method = Even() if known else Even(kind_of_curvature=Own)
    la = LinearisedLaplace(case.model, case.given[0], method=method, prior=prior, num_samples=4)
    la.fit(case.batches, progress=False)
    pred, rows, prior_ = la.predict(case.x), reference.jacobian(case.model, case.x), la.posterior_.prior
    variance = torch.einsum("ncp,p,ncp->nc", rows, 1 / (3 + prior_.diagonal().double()), rows)
    assert_close(pred.variance, variance, rtol=1e-6, atol=0)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model, case.given[0], method=method)
    assert_close(again.predict(case.x).samples, pred.samples)
    if known:
        assert_close(again.predict(case.x).variance, pred.variance)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("name", ["regression", "classification"])
def test_a_new_method_is_a_file_and_a_line(name: str, tmp_path) -> None:
    case = make_case(name)
    toy, exact = (
        LinearisedLaplace(case.model, case.given[0], method=method, num_samples=4).fit(case.batches, progress=False)
        for method in ("toy", "exact")
    )
    assert "method='toy' → 'toy': as asked for" in repr(toy)
    assert_close(toy.samples_, exact.samples_, rtol=1e-6, atol=1e-8)
    assert_close(toy.sample(2), exact.sample(2), rtol=1e-6, atol=1e-8)
    assert_close(toy.mode_, exact.mode_, rtol=1e-6, atol=1e-8)
    assert float(toy.log_marginal_likelihood()) == pytest.approx(float(exact.log_marginal_likelihood()), rel=1e-3)
    assert toy.diagnose().method == "toy"
    with pytest.raises(ValueError, match="toy"):
        toy.leave_one_out()
    toy.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert again.settings.method == Toy()
    assert torch.equal(again.predict(case.x).samples, toy.predict(case.x).samples)


@pytest.mark.usefixtures("toy")
def test_em_finds_hyperparameters_for_a_new_method() -> None:
    model, data = linear_problem(inputs=10, num_data=40)
    toy, exact = (
        LinearisedLaplace(model, "regression", method=method, num_samples=4).fit_hyperparameters(
            data, criterion=Evidence(max_steps=50, num_samples=64), progress=False
        )
        for method in ("toy", "exact")
    )
    assert toy.converged_
    # γ of 64 samples has a relative standard error of about √(2/(64γ)), and α moves by about as much.
    allowed = 5 * (2 / (64 * float(exact.effective_dimension_))) ** 0.5
    assert abs(float((toy.prior_precision_ / exact.prior_precision_).log())) < allowed


@pytest.mark.parametrize(
    "method",
    [
        Krylov(max_memory=1e9),
        Stochastic(solver=SGD(epochs=3.0, seed=2)),
        Stochastic(solver=SVRG(max_rank=10)),
        Dual(rank=3, accuracy=1e-3),
        Factored(kind="diagonal", autocast=torch.float16),
    ],
    ids=lambda method: method.name,
)
def test_settings_of_a_method_are_kept_in_files(method) -> None:
    assert method_from_recipe(json.loads(json.dumps(recipe_of_method(method)))) == method


def test_a_method_of_ones_own_must_be_given_to_load(tmp_path) -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression", method=Toy(), num_samples=4).fit(case.batches, progress=False)
    la.save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match="Toy"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert LinearisedLaplace.load(tmp_path / "la.pt", case.model, method=Toy()).settings.method == Toy()


def test_too_little_memory_says_what_it_takes() -> None:
    model, data = linear_problem()
    la = laplace_of(model, "regression", method="krylov", num_samples=8, max_memory=20 * 8 * 61)
    with pytest.raises(ValueError, match="max_memory"):
        la.fit(data, progress=False)


@pytest.mark.parametrize(("name", "stacks"), [("krylov", 16), ("dual", 24), ("diagonal", 0)])
def test_a_method_needs_its_samples_and_one_solve(name: str, stacks: int) -> None:
    """And no more: with as many vectors it goes on, with one fewer it does not."""
    method, sizes = as_method(name), (500, 1000)
    method.check(unsolved_problem(*sizes, 4 * 1000 * (8 + stacks), num_samples=8))
    with pytest.raises(ValueError, match=rf"{name}.*\b{8 + stacks}\b"):
        method.check(unsolved_problem(*sizes, 4 * 1000 * (7 + stacks), num_samples=8))
