"""`examples/optuna_search.py`: bad trials end early, in two threads."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import optuna
import pytest
from optuna.trial import TrialState

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
    study = example.search(trials=8)
    states = [trial.state for trial in study.trials]
    assert set(states) == {TrialState.COMPLETE, TrialState.PRUNED}
    for trial in study.trials:
        reports = trial.intermediate_values
        last = max(reports)
        assert list(reports) == list(range(example.EVERY, last + 1, example.EVERY))
        assert (last == example.EPOCHS) or trial.state == TrialState.PRUNED
        if trial.state == TrialState.COMPLETE:
            assert trial.value == reports[example.EPOCHS]
            assert math.isfinite(trial.user_attrs["score"])
