"""Exact fits in the space of the weights without a Jacobian, against those that hold it."""

from pathlib import Path

import pytest
import torch
from cases import CASES, Case, make_case
from flat_settings import fit_case
from grids import covering
from problems import CLOSE, SAMPLES
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.linear_model import tangent_model
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.network_features import NetworkFeatures


def many_rows(case: Case) -> bool:
    model = case.linear_model()
    return model.features.num_data * model.features.num_outputs >= model.features.size


CASES_OF_MANY_ROWS = [name for name in CASES if many_rows(make_case(name))]


def fits(name: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[LinearisedLaplace, ...]:
    """A fit that holds the Jacobian, and one that accumulates `M`."""
    held = fit_case(make_case(name), "exact", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(tangent_model, "_MOST_HELD", 0)
        accumulated = fit_case(make_case(name), "exact", **settings)
    assert isinstance(held._fitted.fit.model.features, DenseFeatures)
    features = accumulated._fitted.fit.model.features
    assert not isinstance(features, DenseFeatures)
    assert features.held is not None
    return held, accumulated


def test_there_are_cases_of_many_rows() -> None:
    assert len(CASES_OF_MANY_ROWS) >= 2


@covering(
    rest=False,
    name=CASES_OF_MANY_ROWS,
    prior=["isotropic", "g-prior", "layerwise"],
)
def test_accumulated_fits_are_those_that_hold_the_jacobian(
    name: str, prior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, accumulated = fits(name, monkeypatch, prior=prior)
    x = make_case(name).x[:3]
    assert_close(accumulated.samples_, held.samples_, **SAMPLES)
    assert_close(accumulated.mode_, held.mode_, **SAMPLES)
    assert_close(accumulated.effective_dimension_, held.effective_dimension_, **CLOSE)
    assert_close(float(accumulated.log_marginal_likelihood()), float(held.log_marginal_likelihood()), **CLOSE)
    assert_close(accumulated.predict(x).covariance(), held.predict(x).covariance(), **CLOSE)
    one, other = accumulated.leave_one_out(), held.leave_one_out()
    assert_close(one.log_prob, other.log_prob, **CLOSE)


def test_each_row_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else takes products of the sum over data with a vector: samples, mode and outputs."""
    counts = []
    for num_samples in (2, 3):
        _, accumulated = fits("regression_many_data", monkeypatch, num_samples=num_samples)
        features = accumulated._fitted.fit.model.features
        assert isinstance(features, NetworkFeatures)
        counts.append(dict(features.network.products))
    rows = features.num_data * features.num_outputs
    # One VJP of each datum for a sample.
    assert counts[1]["vjp"] - counts[0]["vjp"] == features.num_data
    assert counts[0]["vjp"] <= rows + 6 * features.num_data


def test_a_saved_fit_predicts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, accumulated = fits("regression_many_data", monkeypatch)
    case = make_case("regression_many_data")
    accumulated.save(tmp_path / "fit")
    loaded = LinearisedLaplace.load(tmp_path / "fit", case.model)
    x = case.x[:3]
    assert_close(loaded.predict(x).covariance(), accumulated.predict(x).covariance(), **CLOSE)
    assert torch.equal(loaded.samples_, accumulated.samples_)
