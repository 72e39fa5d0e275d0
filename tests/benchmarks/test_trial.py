"""A tenth of `python -m benchmarks.trial`, and that it finds what is wrong."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.trial.parts import COUNTS, run
from benchmarks.trial.random_networks import check
from benchmarks.trial.random_problems import Example
from benchmarks.trial.states import changes, state_of
from laplace_sampling import LinearisedLaplace
from laplace_sampling.predictions.dense_covariance import DenseCovariance

EXAMPLE = Example(num_data=12, width=3, likelihood="classification", outputs=2, parameters="all")


# The suites of other libraries are in `tests/gp`.
@pytest.mark.parametrize("part", [part for part in COUNTS if part != "foreign_suites"])
def test_a_tenth_finds_no_defect(part: str) -> None:
    report, _ = run(part, COUNTS[part] // 10, seed=0)
    assert report.skipped or report.trials
    assert not report.defects, "\n".join(report.lines(part))


def test_an_example_says_all_that_repeats_it() -> None:
    assert eval(repr(EXAMPLE), {"Example": Example}) == EXAMPLE
    assert repr(Example(seed=3)) == "Example(seed=3)"


@pytest.mark.parametrize("method", ["exact", "krylov", "diagonal"])
def test_a_wrong_variance_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = replace(EXAMPLE, method=method, num_data=60)
    assert not check(example)
    predict, blocks = LinearisedLaplace.predict, DenseCovariance.blocks

    def wrong(self: LinearisedLaplace, x: Tensor):
        pred = predict(self, x)
        return replace(pred, deviations=5 * pred.deviations)

    monkeypatch.setattr(DenseCovariance, "blocks", lambda self: 1.1 * blocks(self))
    monkeypatch.setattr(LinearisedLaplace, "predict", wrong)
    assert any("wrong" in kind for kind, _ in check(example))


def test_an_error_of_torch_is_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: LinearisedLaplace, x: Tensor):
        raise ValueError(str(torch.linalg.cholesky(-torch.eye(2))))

    monkeypatch.setattr(LinearisedLaplace, "predict", fails)
    assert [kind for kind, _ in check(EXAMPLE)] == ["exact: _LinAlgError"]


def test_what_changes_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout())
    before = state_of(model)
    assert changes(before, state_of(model)) == []
    model[1].eval()
    with torch.no_grad():
        model[0].bias += 1
    assert changes(before, state_of(model)) == ["weights or buffers", "training flags"]


def test_hyperparameters_off_the_evidence_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example(num_data=30, width=4, steps=100, noise="mode")
    assert not check(example)
    tuned = LinearisedLaplace.fit_hyperparameters

    def wrong(self: LinearisedLaplace, loader, **arguments):
        low = float(tuned(self, loader, **arguments).prior_precision_) * 1000
        return tuned(self, loader, **arguments, precision_bounds=(low, 2 * low))

    monkeypatch.setattr(LinearisedLaplace, "fit_hyperparameters", wrong)
    monkeypatch.setattr(LinearisedLaplace, "converged_", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = [kind for kind, _ in check(example)]
    assert "exact: fitted hyperparameters are not at a maximum of the evidence" in kinds
