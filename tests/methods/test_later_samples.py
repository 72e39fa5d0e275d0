"""Exact regressions draw their samples when they are asked for: the same numbers as if they were drawn in the fit."""

from pathlib import Path

import pytest
import torch
from cases import make_case
from flat_settings import fit_case
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.methods.closed_form import ObservationSpaceFit, _cancellation


def undrawn(la: LinearisedLaplace) -> bool:
    return len(la._fitted.posterior.samples) == 0 and len(la._fitted.fit.sampled.energies) == 0  # pyright: ignore


@pytest.fixture
def drawn_in_the_fit(monkeypatch: pytest.MonkeyPatch) -> LinearisedLaplace:
    with monkeypatch.context() as patched:
        patched.setattr(ObservationSpaceFit, "draws_later", False)
        la = fit_case(make_case("regression"), "exact")
    assert not undrawn(la)
    return la


def test_samples_are_those_of_the_same_seed(drawn_in_the_fit: LinearisedLaplace, tmp_path: Path) -> None:
    case, expected = make_case("regression"), drawn_in_the_fit
    asked = {
        "samples_": lambda la: la.samples_,
        "predict": lambda la: la.predict(case.x).deviations,
        "state_dict": lambda la: la.state_dict()["posterior"]["samples"],
        "calibrate": lambda la: la.calibrate([(case.x, case.y)]).noise_precision_,
        "diagnose": lambda la: torch.tensor(la.diagnose()["energy"].value),
        "save": lambda la: (
            (la.save(tmp_path / "la.pt"), LinearisedLaplace.load(tmp_path / "la.pt", case.model))[1].samples_
        ),
    }
    for name, ask in asked.items():
        la = fit_case(case, "exact")
        assert undrawn(la), name
        assert str(la) == str(fit_case(case, "exact"))
        assert_close(ask(la), ask(expected), rtol=0, atol=0)
        assert_close(la.samples_, expected.samples_, rtol=0, atol=0)
        assert not undrawn(la) or name == "diagnose"
    la, other = fit_case(case, "exact"), drawn_in_the_fit
    assert_close(la.sample(3), other.sample(3), rtol=0, atol=0)
    assert undrawn(la)
    assert_close(la.effective_dimension_, other.effective_dimension_, rtol=0, atol=0)
    assert la.diagnose().passes == other.diagnose().passes


def test_samples_of_a_fit_are_there_when_the_network_has_changed() -> None:
    case = make_case("regression")
    la, other = fit_case(case, "exact"), fit_case(case, "exact")
    expected = other.samples_
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.add_(1.0)
    assert_close(la.samples_, expected, rtol=0, atol=0)


def test_a_regression_with_other_data_to_calibrate_by() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, case.likelihood, method="exact", num_samples=8)
    la.fit_hyperparameters(case.batches, case.batches, criterion="evidence", progress=False)
    assert len(la.samples_) == 8
    assert torch.isfinite(la.noise_precision_).all()  # pyright: ignore


@pytest.mark.parametrize("name", ["regression", "classification"])
def test_the_cancellation_is_that_of_samples(name: str) -> None:
    la = fit_case(make_case(name), "exact")
    fit = la._fitted.fit
    assert isinstance(fit, ObservationSpaceFit)
    # The bound is close where the data determine few directions of many.
    assert 0.9 < fit.cancellation / _cancellation(fit.with_samples()) < 1.6


def test_samples_are_of_the_fit_that_they_are_used_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that another thread ends while samples are drawn does not mix with them."""
    la = fit_case(make_case("regression"), "exact")
    first, other = la._fitted, fit_case(make_case("regression_many_data"), "exact")._fitted
    drawn = ObservationSpaceFit.draw

    def meanwhile(fit, *arguments):
        la._fitted = other
        return drawn(fit, *arguments)

    monkeypatch.setattr(ObservationSpaceFit, "draw", meanwhile)
    assert la._drawn("predict") is first
    assert len(first.posterior.samples) == la.settings.num_samples
