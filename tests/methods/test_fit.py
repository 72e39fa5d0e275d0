"""What a fit says of its solves, of its bounds and of its convergence."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import make_case
from flat_settings import in_observation_space, laplace_of
from problems import linear_problem, trained
from torch import Tensor, nn

from laplace_sampling import SGD, ConvergenceWarning, Evidence, Krylov, LinearisedLaplace, Stochastic
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.closed_form import ObservationSpaceFit
from laplace_sampling.methods.method import Fit
from laplace_sampling.solvers.krylov import BlockKrylov
from laplace_sampling.solvers.svrg import SVRG


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_the_noise_is_kept_within_its_bounds(method: str) -> None:
    model, data = linear_problem()
    la = laplace_of(model, "regression", method=method, prior="isotropic", num_samples=2)
    with pytest.warns(ConvergenceWarning, match="noise_bounds") as record:
        la.fit_hyperparameters(data, criterion=Evidence(noise_bounds=(0.1, 2.0), max_steps=200), progress=False)
    assert len(record) == 1
    assert float(la.noise_precision_) == 2.0
    assert "for noise." in la.diagnose()["precisions at a bound"].sentence
    with pytest.raises(ValueError, match="noise_bounds"):
        LinearisedLaplace(model, "regression", method="exact").fit_hyperparameters(
            data, criterion=Evidence(noise_bounds=(2.0, 1.0)), progress=False
        )


def pure_noise(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A network that is not trained, and targets that are independent of its inputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1 if name == "regression" else 3)).double()
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    normal = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    return net, [(x, normal if name == "regression" else torch.randint(3, (40,), generator=generator))]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("regression", method) for method in ("exact", "krylov", "dual", "kfac", "diagonal")),
        *(("classification", method) for method in ("exact", "krylov", "kfac", "diagonal")),
    ],
)
def test_an_alpha_at_its_bound_has_not_converged(name: str, method: str) -> None:
    net, data = pure_noise(name)
    la = laplace_of(net, name, method=method, num_samples=2)
    # Expectation maximisation takes long to a bound that is far.
    highest = 1e12 if method in ("exact", "krylov") else 100.0
    with pytest.warns(ConvergenceWarning, match="upper") as record:
        la.fit_hyperparameters(
            data,
            criterion=Evidence(precision_bounds=(1e-8, highest), num_samples=4, max_steps=30),
            progress=False,
        )
    assert len(record) == 1
    assert float(la.prior_precision_) == pytest.approx(highest)
    assert la.converged_ is False
    assert not la.diagnose()["precisions at a bound"].holds


FAILING = {
    "krylov": lambda: BlockKrylov(1e-9, max_iterations=1),
    "sgd": lambda: SGD(epochs=0.1, min_steps=1, mode_epochs=0.1, finish_passes=0, tolerance=1e-6),
    "svrg": lambda: SVRG(tolerance=1e-12, max_snapshots=1),
}


@pytest.mark.parametrize("method", list(FAILING))
@pytest.mark.parametrize("call", ["fit", "fit_hyperparameters"])
def test_a_failing_solve_is_told_once_and_everywhere(method: str, call: str, monkeypatch) -> None:
    model, data = linear_problem("classification")
    file = Krylov if method == "krylov" else Stochastic
    monkeypatch.setattr(file, "make_solver", lambda *_: FAILING[method]())
    settings = {"prior": "isotropic", "prior_precision": 0.01, "num_samples": 8}  # few, or a block would span it all
    la = laplace_of(model, "classification", method=method, **settings)
    with pytest.warns(ConvergenceWarning, match="samples") as record:
        getattr(la, call)(data, progress=False)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert la.converged_ is False
    diagnosis = la.diagnose()
    assert not diagnosis["samples converged"].holds
    assert not diagnosis.ok
    assert "The samples have not converged" in str(diagnosis)
    with pytest.warns(ConvergenceWarning, match="samples") as record:
        la.sample(2)
    assert len(record) == 1
    assert record[0].filename == __file__
    mode = la._fitted.fit.mode
    la._fitted.fit = replace(la._fitted.fit, known_mode=replace(mode, minimum=replace(mode.minimum, converged=False)))
    with pytest.warns(ConvergenceWarning, match="log_marginal_likelihood") as record:
        la.log_marginal_likelihood()
    assert len(record) == 1
    assert record[0].filename == __file__


@pytest.mark.parametrize("method", ["exact", "krylov", "dual"])
def test_a_fit_that_is_not_finite_keeps_the_one_before(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Samples of an exact regression may be drawn later; here they are drawn with the fit.
    monkeypatch.setattr(ObservationSpaceFit, "draws_later", False)
    case = trained()
    la = laplace_of(case.model, "regression", method=method, num_samples=4).fit(case.batches, progress=False)
    before = la._fitted
    owner = ObservationSpaceFit if method == "exact" else Fit
    draw = owner.draw

    def broken(fit: Any, *arguments: Any) -> PosteriorSamples:
        sampled = draw(fit, *arguments)
        return replace(sampled, samples=sampled.samples * math.nan)

    monkeypatch.setattr(owner, "draw", broken)
    for call in (la.fit, la.fit_hyperparameters):
        with pytest.raises(FloatingPointError, match="NaN"):
            call(case.batches, progress=False)
    assert la._fitted is before
    assert la.predict(case.x).stddev.isfinite().all()


def test_convergence_survives_a_reload(tmp_path) -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression", prior="layerwise")
    with pytest.warns(ConvergenceWarning, match="max_steps"):
        la.fit_hyperparameters(case.batches, criterion=Evidence(max_steps=1), progress=False)
    la.save(tmp_path / "la.pt")
    assert la.converged_ is False
    assert LinearisedLaplace.load(tmp_path / "la.pt", case.model).converged_ is False


@pytest.mark.parametrize("num_data", [24, 60])
@pytest.mark.parametrize("method", ["exact", "dual", "krylov"])
def test_fits_with_learnt_noise_are_diagnosed(method: str, num_data: int) -> None:
    case = trained(num_data)
    la = laplace_of(case.model, "regression", method=method, prior="isotropic", noise_precision=20.0)
    la.fit_hyperparameters(case.batches, progress=False, criterion=Evidence(max_steps=100))
    diagnosis = la.diagnose()
    assert diagnosis.method == method
    assert not [p.name for p in diagnosis.problems if p.serious]
    assert "Verdict: nothing is wrong" in str(diagnosis)
    if method == "exact":
        assert in_observation_space(la) == (num_data == 24)
        reference = sum(diagnosis["γ of the samples"].bounds) / 2
        assert reference == pytest.approx(float(la.effective_dimension_))
