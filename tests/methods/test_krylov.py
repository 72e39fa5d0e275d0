"""Krylov methods within little memory."""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from problems import linear_problem, trained
from torch import nn
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Evidence, Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.methods import method, solves


@pytest.mark.parametrize("prior", ["isotropic", "layerwise"])
def test_little_memory_gives_the_same_samples(prior: str) -> None:
    model, data = linear_problem("classification")
    size = 8 * sum(p.numel() for p in model.parameters())
    settings = {"prior": prior, "prior_precision": 0.1, "num_samples": 8, "method": "krylov"}
    plenty = laplace_of(model, "classification", **settings).fit(data, tolerance=1e-5, progress=False)
    little = laplace_of(model, "classification", max_memory=100 * size, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of ten steps of EM
        little.fit_hyperparameters(data, progress=False)
    little.sample(3)
    task = little._fitted.fit.task
    assert 1 <= task.method.rows(task.memory, 8) < 8
    little.fit(data, tolerance=1e-5, progress=False)
    assert little.converged_
    assert_close(little.samples_, plenty.samples_, rtol=1e-3, atol=1e-4)
    assert_close(little.effective_dimension_, plenty.effective_dimension_, rtol=1e-4, atol=1e-4)
    assert_close(little.sample(3), plenty.sample(3), rtol=1e-3, atol=1e-4)


def test_a_full_basis_falls_back_to_em(monkeypatch) -> None:
    model, data = linear_problem(inputs=30, num_data=40)
    for module in (solves, method):
        monkeypatch.setattr(module, "basis_that_fits", lambda *_: 12)
    known, settings = Gaussian(10.0, learn=False), {"prior": "isotropic", "num_samples": 4}
    la = laplace_of(model, known, method="krylov", **settings)
    la.fit_hyperparameters(data, criterion=Evidence(max_steps=200, num_samples=64), tolerance=0.005, progress=False)
    assert all(step.sample_residual > 0 for step in la.history_)  # paths have no samples
    exact = laplace_of(model, Gaussian(10.0, learn=False), method="exact", **{**settings, "noise_precision": 1.0})
    exact.fit_hyperparameters(data, criterion=Evidence(max_steps=2000), tolerance=1e-5, progress=False)
    gamma = float(exact.effective_dimension_)
    # γ ≤ rank: its relative standard error is at most √(2/(64 γ)); α moves by about as much, twice that is generous
    ratio = float(la.prior_precision_ / exact.prior_precision_)
    assert abs(ratio - 1) < 2 * 4 * (2 / (64 * gamma)) ** 0.5


def test_a_full_basis_makes_the_evidence_inaccurate_and_says_so(monkeypatch) -> None:
    model, data = linear_problem(inputs=100, num_data=60)
    la = laplace_of(model, "regression", method="krylov", prior="isotropic", prior_precision=1e-3, num_samples=2)
    la.fit(data, progress=False)
    assert la.converged_
    la.log_marginal_likelihood()
    monkeypatch.setattr(method, "basis_that_fits", lambda *_: 12)
    with pytest.warns(
        ConvergenceWarning,
        match="max_memory",
    ):
        la.log_marginal_likelihood()


def linear_regression(mean: float, num_data: int = 200, size: int = 60) -> tuple[nn.Module, list]:
    """A linear model at its optimum; inputs that are not centred give its curvature a very large eigenvalue."""
    g = torch.Generator().manual_seed(0)
    centred = torch.randn(num_data, size, generator=g, dtype=torch.float64)
    centred *= torch.logspace(0, -1.5, size, dtype=torch.float64)
    y = centred @ torch.randn(size, 1, generator=g, dtype=torch.float64)
    y = y + 0.01 * torch.randn(num_data, 1, generator=g, dtype=torch.float64)
    x = centred + mean
    model = nn.Linear(size, 1).double()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones_like(y)], 1), y).solution
    with torch.no_grad():
        model.weight.copy_(solution[:-1].T)
        model.bias.copy_(solution[-1])
    return model.float(), [(x.float(), y.float())]


@pytest.mark.slow
def test_two_steps_of_lanczos_are_not_believed_where_they_see_no_small_eigenvalue() -> None:
    # Targets in thousands: at the noise precision of one that the search starts from, the data seem to determine all
    # weights, which two steps confirm, and the fixed point of these curves is at 2.3 times the best `α`.
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 4, generator=g, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + 0.3 * x[:, 1:2] * x[:, 2:3]
    y = 1000 * (y + 0.01 * torch.randn(1000, 1, generator=g, dtype=torch.float64))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(400):
        optimiser.zero_grad()
        (model(x) - y / 1000).square().mean().backward()
        optimiser.step()
    with torch.no_grad():
        model[4].weight *= 1000
        model[4].bias *= 1000
    found = [
        laplace_of(model, "regression", method=method).fit_hyperparameters([(x, y)], budget=None, progress=False)
        for method in ("krylov", "exact")
    ]
    assert all(la.converged_ for la in found)
    alpha, best = (float(la.prior_precision_) for la in found)
    assert alpha == pytest.approx(best, rel=0.06)  # twice the tolerance


def test_hyperparameters_that_the_samples_contradict_are_not_called_converged(monkeypatch) -> None:
    model, data = linear_problem("regression")
    by_traces = solves.by_traces

    def astray(*arguments):
        found = by_traces(*arguments)
        return replace(found, prior=found.prior.with_precision(30 * found.prior.precision))

    monkeypatch.setattr(solves, "by_traces", astray)
    with pytest.warns(ConvergenceWarning, match="num_samples") as warned:
        la = laplace_of(model, "regression", method="krylov").fit_hyperparameters(data, progress=False)
    assert not la.converged_
    monkeypatch.undo()
    right = laplace_of(model, "regression", method="krylov").fit_hyperparameters(data, progress=False)
    assert right.converged_
    asked = float(re.search(r"ask for ([\d.e+-]+)", str(warned[0].message))[1].rstrip("."))
    # the update goes from 30 times the best toward it
    assert asked < 15 * float(right.prior_precision_)


def test_what_no_algebra_resolves_ends_with_a_warning() -> None:
    case = trained(30)
    model = copy.deepcopy(case.model).float()
    la = LinearisedLaplace(model, Gaussian(1e9), prior=IsotropicPrior(precision=1e-10), method="krylov", num_samples=4)
    with pytest.warns(ConvergenceWarning, match="samples"):
        la.fit([(case.x.float(), case.y.float())], progress=False)
    assert not la.converged_
    assert bool(la.samples_.isfinite().all())
    # Ten passes for each weight, and the last step of Newton's method.
    assert la._fitted.fit.mode.minimum.passes < 10 * la.samples_.shape[1] + 250


@pytest.mark.parametrize("name", ["regression_many_data", "classification_many_data"])
def test_krylov_agrees_with_the_exact_method(name: str) -> None:
    case = make_case(name)
    settings = {"prior": "isotropic", "prior_precision": 2.0, "num_samples": 200}
    exact, krylov = (
        laplace_of(case.model, case.likelihood, method=method, **settings).fit(case.batches, progress=False)
        for method in ("exact", "krylov")
    )
    assert_close(krylov.samples_, exact.samples_, rtol=1e-6, atol=1e-8)
    assert_close(krylov.sample(3), exact.sample(3), rtol=1e-6, atol=1e-8)
    a, b = exact.log_marginal_likelihood(), krylov.log_marginal_likelihood()
    assert float(b) == pytest.approx(float(a), rel=1e-4)  # the mode is as good as its tolerance
    assert a.exact
    assert a.standard_error == 0
    assert a.value == pytest.approx(-a.data_fit - a.complexity)
    curves = [la.evidence_path(decades=3, num=7) for la in (exact, krylov)]
    assert_close(curves[0].log_marginal_likelihood, curves[1].log_marginal_likelihood, rtol=1e-3, atol=0)
    assert_close(curves[0].effective_dimension, curves[1].effective_dimension, rtol=1e-5, atol=0)
