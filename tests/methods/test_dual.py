"""Conjugate gradients in observation space, through the public class."""

from dataclasses import replace

import pytest
import torch
from cases import make_case
from flat_settings import fit_case, laplace_of
from problems import trained
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Dual, Evidence, Gaussian, LayerwisePrior, LinearisedLaplace
from laplace_sampling.methods.method import balances

# Seed, data, inputs, units and steps of training of problems where EM went to its upper bound, or oscillated.
SMALL = [(7, 22, 1, 11, 20), (12, 22, 4, 5, 300), (30, 22, 2, 8, 300), (40, 20, 4, 12, 300)]


def small_regression(seed: int, num: int, inputs: int, units: int, steps: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network after few or many steps of training, on a sine with noise or on noise alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, 1)).double()
        x = torch.randn(num, inputs, dtype=torch.float64)
        y = torch.sin(2 * x[:, :1]) * (seed % 2) + 0.5 * torch.randn(num, 1, dtype=torch.float64)
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(steps):
            optimiser.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            optimiser.step()
    return net, x, y


# Some of them know their data by heart, and a warning says so.
@pytest.mark.filterwarnings("ignore:The network knows its training data:laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize(("seed", "num", "inputs", "units", "steps"), SMALL)
def test_hyperparameters_of_small_regressions_are_the_exact_ones(
    seed: int, num: int, inputs: int, units: int, steps: int
) -> None:
    net, x, y = small_regression(seed, num, inputs, units, steps)
    exact, dual = (
        LinearisedLaplace(net, "regression", method=method, num_samples=4).fit_hyperparameters([(x, y)], progress=False)
        for method in ("exact", "dual")
    )
    assert dual.converged_
    assert_close(dual.prior_precision_, exact.prior_precision_, rtol=1e-6, atol=0)
    assert_close(dual.noise_precision_, exact.noise_precision_, rtol=1e-6, atol=0)
    assert dual.history_[0].passes <= 2
    assert dual.history_[0].effective_dimension[0] == pytest.approx(float(exact.effective_dimension_), rel=1e-6)


def test_em_that_ends_where_samples_contradict_it_has_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace_sampling.methods.solves._GRAM_ROWS", 0)
    case = trained()
    la = laplace_of(case.model, "regression", method="dual", num_samples=64)
    la.fit_hyperparameters(case.batches, criterion=Evidence(max_steps=50), progress=False)
    fit = la._fitted.fit
    task = fit.task
    assert all(check.holds for check in balances(fit.method.fit(task, fit.found)))
    wrong = replace(fit.found, prior=task.prior.with_precision(5 * task.prior.precision))
    found = fit.method.fit(task, wrong).found
    assert found.converged is False
    assert "prior precision" in found.problems[-1]
    assert "mode" in found.problems[-1]


def test_em_in_the_dual_comes_close_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace_sampling.methods.solves._GRAM_ROWS", 0)  # as for more observations
    case = trained()
    settings = {"prior": "isotropic", "num_samples": 4, "noise_precision": 10.0}
    exact = laplace_of(case.model, "regression", method="exact", **settings)
    exact.fit_hyperparameters(case.batches, progress=False)
    dual = laplace_of(case.model, "regression", method="dual", **settings)
    dual.fit_hyperparameters(case.batches, progress=False, criterion=Evidence(max_steps=5, num_samples=64))
    assert dual.converged_
    # γ from 64 samples has a relative standard error of at most √(2/64γ)
    gamma = float(exact.effective_dimension_)
    allowed = 6 * (2 / (64 * gamma)) ** 0.5
    assert abs(float((dual.prior_precision_ / exact.prior_precision_).log())) < allowed
    assert abs(float((dual.noise_precision_ / exact.noise_precision_).log())) < allowed
    assert dual.samples_.shape == exact.samples_.shape
    assert dual.samples_.dtype == exact.samples_.dtype
    assert "'dual': as asked for" in repr(dual)
    fixed = LinearisedLaplace(case.model, Gaussian(10.0, learn=False), method="dual", prior="isotropic", num_samples=4)
    fixed.fit_hyperparameters(case.batches, progress=False, criterion=Evidence(max_steps=20))
    assert fixed.noise_precision_ == 10.0


def test_a_poor_preconditioner_of_the_dual_costs_no_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace_sampling.methods.solves._GRAM_ROWS", 0)
    case = trained()
    settings = {"method": "dual", "prior": "isotropic", "num_samples": 4}
    poor, whole = (
        laplace_of(case.model, "regression", solver={"rank": rank}, **settings).fit_hyperparameters(
            case.batches, progress=False, criterion=Evidence(max_steps=5)
        )
        for rank in (4, 24)
    )
    assert poor.converged_
    assert_close(poor.prior_precision_, whole.prior_precision_, rtol=0.06, atol=0)  # EM stops at 0.03 in log α


def test_solver_settings_of_the_dual_survive_a_reload(tmp_path) -> None:
    case = trained()
    settings = {"rank": 5, "accuracy": 1e-6, "max_iterations": 77}
    la = fit_case(case, "dual", solver=settings)
    assert la._fitted.fit.solver.rank == 5
    assert la._fitted.fit.solver.held is not None
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert again.settings.method == Dual(**settings)
    assert torch.equal(again.predict(case.x).samples, la.predict(case.x).samples)


def test_settings_of_the_dual_that_are_not_given_are_chosen() -> None:
    case = trained()
    plain, given = (fit_case(case, "dual", solver=s)._fitted.fit.solver for s in (None, {"max_iterations": 500}))
    assert given.rank == plain.rank == len(case.x)
    assert given.tolerance == plain.tolerance
    tight = fit_case(case, "dual", solver={"accuracy": 1e-9, "rank": 0})
    assert tight._fitted.fit.solver.rank == 0
    exact = fit_case(case, "exact")
    assert_close(tight.samples_, exact.samples_, rtol=1e-7, atol=1e-9)


def test_the_dual_is_for_gaussian_likelihoods() -> None:
    with pytest.raises(ValueError, match="exact"):
        LinearisedLaplace(make_case("classification").model, "classification", method="dual")


@pytest.mark.parametrize("call", ["fit", "fit_hyperparameters"])
# Error bars of samples that are not solved may be too wide.
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_a_dual_solve_that_does_not_converge_names_its_residual(call: str) -> None:
    case = trained()
    solver = {"rank": 0, "max_iterations": 1}
    la = laplace_of(case.model, case.likelihood, method="dual", solver=solver, prior_precision=1e-3)
    with pytest.warns(ConvergenceWarning, match="tolerance") as record:
        getattr(la, call)(
            case.batches,
            progress=False,
            **({"criterion": Evidence(max_steps=2)} if call == "fit_hyperparameters" else {}),
        )
    (warning,) = (found for found in record if issubclass(found.category, ConvergenceWarning))
    assert warning.filename == __file__
    assert "`Dual(rank=..., max_iterations=...)`" in str(warning.message)
    assert la.converged_ is False
    assert not la.diagnose().ok
    with pytest.warns(ConvergenceWarning, match="samples"):
        la.sample(2)


def test_samples_and_hyperparameters_do_not_depend_on_memory() -> None:
    net, x, y = small_regression(1, 60, 2, 40, 300)
    num_weights = sum(p.numel() for p in net.parameters())
    much, little = (
        LinearisedLaplace(
            net,
            "regression",
            prior=LayerwisePrior(),
            method=Dual(max_memory=None if vectors is None else 8 * vectors * num_weights),
            num_samples=16,
        ).fit_hyperparameters([(x, y)], progress=False, budget=None)
        for vectors in (None, 60)
    )
    # 60 vectors are memory for one sample at a time: both are within the tolerance of the solver.
    assert_close(little.prior_precision_, much.prior_precision_, rtol=2e-3, atol=0)
    assert_close(little.noise_precision_, much.noise_precision_, rtol=1e-4, atol=0)
    assert float((little.samples_ - much.samples_).norm() / much.samples_.norm()) < 1e-2
