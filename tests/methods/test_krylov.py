"""Krylov methods within little memory."""

import copy
import warnings

import pytest
import torch
from flat_settings import laplace_of
from problems import linear_problem, trained
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Gaussian, IsotropicPrior, Krylov, LinearisedLaplace
from laplace_sampling.methods import krylov, solver_method
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.preconditioners import Nystrom


@pytest.mark.parametrize("prior", ["isotropic", "layerwise"])
def test_little_memory_gives_the_same_samples_with_one_preconditioner(prior: str, monkeypatch) -> None:
    model, data = linear_problem("classification")
    made = []
    of = Nystrom.of
    monkeypatch.setattr(Nystrom, "of", lambda *args, **kwargs: made.append(1) or of(*args, **kwargs))
    size = 8 * sum(p.numel() for p in model.parameters())
    settings = {"prior": prior, "prior_precision": 0.1, "num_samples": 8, "method": "krylov", "hessian_at": "network"}
    plenty = laplace_of(model, "classification", **settings).fit(data, tolerance=1e-5, progress=False)
    assert made == []
    little = laplace_of(model, "classification", max_memory=100 * size, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of ten steps of EM
        little.fit_hyperparameters(data, progress=False)
    little.sample(3)
    assert made == [1]
    assert "preconditioned conjugate gradients" in repr(little)
    assert isinstance(little._fitted.fit.solver, CG)
    assert little._fitted.fit.solver.preconditioner is not None
    task = little._fitted.fit.task
    assert 1 <= task.method.rows(task.memory, 8) < 8
    little.fit(data, tolerance=1e-5, progress=False)
    assert little.converged_
    assert_close(little.samples_, plenty.samples_, rtol=1e-3, atol=1e-4)
    assert_close(little.effective_dimension_, plenty.effective_dimension_, rtol=1e-4, atol=1e-4)
    assert_close(little.sample(3), plenty.sample(3), rtol=1e-3, atol=1e-4)


def test_a_full_basis_falls_back_to_em(monkeypatch) -> None:
    model, data = linear_problem(inputs=30, num_data=40)
    monkeypatch.setattr(Krylov, "short", lambda *_: False)
    monkeypatch.setattr(krylov, "basis_that_fits", lambda *_: 12)
    known, settings = Gaussian(10.0, learn=False), {"prior": "isotropic", "num_samples": 4}
    la = laplace_of(model, known, method="krylov", **settings)
    la.fit_hyperparameters(data, max_steps=200, num_samples=64, tolerance=0.005, progress=False)
    assert all(step.sample_residual > 0 for step in la.history_)  # paths have no samples
    exact = laplace_of(model, Gaussian(10.0, learn=False), method="exact", **{**settings, "noise_precision": 1.0})
    exact.fit_hyperparameters(data, max_steps=2000, tolerance=1e-5, progress=False)
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
    monkeypatch.setattr(solver_method, "basis_that_fits", lambda *_: 12)
    with pytest.warns(
        ConvergenceWarning,
        match=r"is inaccurate: memory was full before it was accurate: more iterations may .*max_memory",
    ):
        la.log_marginal_likelihood()


def test_small_problems_that_rounding_keeps_from_converging_are_solved_by_dense_algebra() -> None:
    case = trained(30)
    data = [(case.x, case.y)]

    def fit(dtype: torch.dtype, **options: float) -> LinearisedLaplace:
        model = copy.deepcopy(case.model).to(dtype)
        prior = IsotropicPrior(precision=1e-6)
        la = LinearisedLaplace(model, Gaussian(1e4), prior=prior, method="krylov", num_samples=16)
        return la.fit([(x.to(dtype), y.to(dtype)) for x, y in data], progress=False, **options)

    la, precise = fit(torch.float32), fit(torch.float64, tolerance=1e-6)
    assert la.converged_
    assert "dense algebra in their place" in repr(la)
    got, wanted = la.predict(case.x.float()).stddev.double(), precise.predict(case.x).stddev
    assert float((got - wanted).norm() / wanted.norm()) < 0.015
    # A mode by iterations has a bound on its passes; this one has taken few steps of Newton's method, as it should.
    assert la._fitted.fit.minimum.passes < 100


def test_what_no_algebra_resolves_ends_with_a_warning(monkeypatch) -> None:
    case = trained(30)
    monkeypatch.setattr(krylov, "_DENSE_SIZE", 0)
    model = copy.deepcopy(case.model).float()
    la = LinearisedLaplace(model, Gaussian(1e9), prior=IsotropicPrior(precision=1e-10), method="krylov", num_samples=4)
    with pytest.warns(ConvergenceWarning, match="The mode of the linear model has not converged.*The samples have not"):
        la.fit([(case.x.float(), case.y.float())], progress=False)
    assert not la.converged_
    assert bool(la.samples_.isfinite().all())
    # Ten passes for each weight, and the last step of Newton's method.
    assert la._fitted.fit.minimum.passes < 10 * la.samples_.shape[1] + 250
