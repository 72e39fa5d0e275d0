"""`python -m benchmarks.distances` in small."""

import importlib

import pytest

pytestmark = pytest.mark.slow


def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.distances").main(["--quick"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    wasserstein = {row[1]: float(row[-1]) for row in rows}
    assert wasserstein["ours, 64 samples"] < wasserstein["MAP"]
