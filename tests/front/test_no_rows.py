"""Predictions of no data have no rows, and the shape that they have of some, in every other axis."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, make_case
from exported import BATCH, fitted
from flat_settings import loader, scaled
from torch import Tensor

from laplace_sampling import Data, Gaussian, LinearisedLaplace

# Of these the first axis is that of the samples.
SAMPLED = ("samples", "deviations", "sampled")


def assert_no_rows(none: Any, some: Any, axis: int = 0) -> None:
    """Tensors of the shape of others but for the rows."""
    if isinstance(some, Tensor):
        assert none.shape == (*some.shape[:axis], 0, *some.shape[axis + 1 :])
        assert none.dtype == some.dtype
    else:
        for a, b in zip(none, some, strict=True):
            assert_no_rows(a, b, axis)


def assert_predicts_nothing(none: Any, some: Any, targets: Any) -> None:
    """Every quantity of a prediction; `targets` are those of `some`."""
    if hasattr(some, "heads"):
        for name, head in some.heads.items():
            assert_predicts_nothing(none.heads[name], head, targets[name])
        return
    names = {n for n in dir(some) if not n.startswith("_")} - {"novelty"}  # it is there once it is calibrated
    tensors = [n for n in names if isinstance(getattr(some, n), Tensor)]
    assert {"outputs", "deviations", "variance", "stddev"} <= set(tensors)
    for name in tensors:
        if getattr(some, name).dim():  # a noise variance may be a number
            value = getattr(some, name)
            # Neither may be one for each output.
            if value.shape[SAMPLED.count(name)] == len(some.outputs):
                assert_no_rows(getattr(none, name), value, SAMPLED.count(name))
    assert_no_rows(none.covariance(), some.covariance())
    assert none.joint_covariance().shape == (0, 0)
    assert_no_rows(none.log_prob(targets[:0]), some.log_prob(targets))
    for call, of in {"interval": 0.9, "prediction_set": 0.9, "probs_with": "probit"}.items():
        if hasattr(some, call):
            assert_no_rows(getattr(none, call)(of), getattr(some, call)(of))


# One case for each likelihood and kind of prediction; the others are slow.
KINDS = ["regression", "heteroscedastic", "classification", "binary", "poisson", "multi_task", "segmentation"]


@pytest.mark.parametrize("method", ["krylov", pytest.param("exact", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_quantity(name: str, method: str) -> None:
    case = make_case(name)
    la = LinearisedLaplace(case.model, case.given[0], method=method, num_samples=4)
    la.fit(loader(case), progress=False)
    assert_predicts_nothing(la.predict(case.x[:0]), la.predict(case.x), case.given[1])


@pytest.mark.parametrize("method", ["auto", "exact", "krylov"])
def test_a_last_layer_and_one_that_is_loaded(method: str, tmp_path: Path) -> None:
    """Data of no rows do not say which module gives the outputs."""
    case = make_case("classification")
    la = LinearisedLaplace(case.model, case.likelihood, method=method, parameters="last_layer", num_samples=4)
    la.fit(loader(case), progress=False)
    some = la.predict(case.x)
    assert_predicts_nothing(la.predict(case.x[:0]), some, case.y)
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert_predicts_nothing(again.predict(case.x[:0]), some, case.y)
    assert torch.equal(again.predict(case.x).deviations, some.deviations)


def test_with_what_calibration_and_noise_add() -> None:
    case = make_case("regression_per_output")
    la = LinearisedLaplace(case.model, Gaussian(1.0, observe=torch.ones(2, 3).double()), method="krylov", num_samples=4)
    la.fit([(case.x, case.x)], progress=False)
    none, some = [la.predict(x, observed=True, num_samples=3) for x in (case.x[:0], case.x)]
    assert_predicts_nothing(none, some, case.x)
    la = LinearisedLaplace(case.model, case.likelihood, method="krylov", num_samples=4)
    scaled(la.fit(loader(case), progress=False), 2.0)
    la.calibrate_conformal(loader(case))
    assert_predicts_nothing(la.predict(case.x[:0]), la.predict(case.x), case.y)
    la.fit(loader(case), data=Data(noise_variances=torch.ones(8)), progress=False)
    none, some = [la.predict(x, noise_variances=torch.ones(len(x))) for x in (case.x[:0], case.x)]
    assert_predicts_nothing(none, some, case.y)


@pytest.mark.parametrize("name", ["classification", "multi_task"])
def test_novelty(name: str) -> None:
    case = make_case(name)
    la = LinearisedLaplace(case.model, case.given[0], method="krylov", num_samples=4).fit(loader(case), progress=False)
    la.calibrate_novelty([(torch.cat([case.x] * 2), torch.zeros(2 * len(case.x)))])
    none, some = la.predict(case.x[:0]), la.predict(case.x)
    assert_no_rows(none.novelty, some.novelty)
    assert_no_rows(la.novelty_of(case.x[:0]), la.novelty_of(case.x))
    assert_predicts_nothing(none, some, case.given[1])


def test_a_loader_with_a_batch_of_none() -> None:
    case = make_case("classification")
    la = LinearisedLaplace(case.model, case.likelihood, method="krylov", num_samples=4)
    la.fit(loader(case), progress=False)
    names = ("probs", "stddev", "samples", "entropy")
    with_none = la.predict_loader([case.x[:3], case.x[:0], case.x[3:]], names, progress=False)
    without = la.predict_loader([case.x[:3], case.x[3:]], names, progress=False)
    assert all(torch.equal(with_none[name], without[name]) for name in names)
    none = la.predict_loader([case.x[:0]], names, progress=False)
    for name in names:
        assert_no_rows(none[name], without[name], SAMPLED.count(name))


@pytest.mark.parametrize(
    ("name", "likelihood", "settings"),
    [
        ("mlp", "binary", {}),
        ("mlp", "regression", {"parameters": "last_layer"}),
    ],
)
def test_a_module(name: str, likelihood: str, settings: dict) -> None:
    la, x = fitted(name, likelihood, **settings)
    module = la.to_module()
    some, program = module(x), torch.export.export(module, (x[:2],), dynamic_shapes=BATCH).module()
    for none in (module(x[:0]), program(x[:0])):
        assert_no_rows(list(none.values()), list(some.values()))
