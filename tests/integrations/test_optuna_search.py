"""`examples/optuna_search.py`: bad trials end early, in two threads."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

optuna = pytest.importorskip("optuna", reason="the extra `optuna` is not installed")

from optuna.trial import TrialState  # noqa: E402

pytestmark = pytest.mark.slow

PATH = Path(__file__).parents[2] / "examples" / "optuna_search.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("optuna_search", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bad_trials_end_early(example: ModuleType) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = example.new_study()
    # The last two hardly learn: at least five others have ended when the first of them starts.
    for lr in [0.05] * 6 + [1e-4] * 2:
        study.enqueue_trial({"lr": lr, "width": 16})
    example.search(study, trials=8)
    assert [trial.state for trial in study.trials[-2:]] == [TrialState.PRUNED] * 2
    assert TrialState.COMPLETE in {trial.state for trial in study.trials[:6]}
    for trial in study.trials:
        reports = trial.intermediate_values
        last = max(reports)
        assert list(reports) == list(range(example.EVERY, last + 1, example.EVERY))
        assert (last == example.EPOCHS) or trial.state == TrialState.PRUNED
        if trial.state == TrialState.COMPLETE:
            assert trial.value == reports[example.EPOCHS]
            assert math.isfinite(trial.user_attrs["score"])


def test_the_value_of_a_trial_is_that_of_its_last_epoch_whatever_fits_may_cost(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget that leaves fits out leaves the last one in, and logs the others."""

    class Limited(example.PeriodicFits):
        def __init__(self, *args: Any, budget: None, **options: Any) -> None:
            super().__init__(*args, **options)

    monkeypatch.setattr(example, "PeriodicFits", Limited)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = example.new_study()
    example.search(study, trials=1, threads=1)
    reports = study.trials[0].intermediate_values
    left_out = [record.getMessage() for record in caplog.records if record.name.startswith("laplace_sampling")]
    assert study.trials[0].value == reports[example.EPOCHS]
    assert len(reports) + len(left_out) == example.EPOCHS // example.EVERY
    assert left_out
