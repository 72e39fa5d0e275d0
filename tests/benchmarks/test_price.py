"""`python -m benchmarks.price` in small."""

import importlib

import pytest

pytestmark = pytest.mark.slow


def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.price").main(["--quick", "--networks", "CNN with batch norm"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    whats = [row[1] for row in rows]
    assert [sum(what.startswith(part) for what in whats) for part in ("GGN", "fit", "prediction", "file")] == [
        3,
        3,
        6,
        3,
    ]
    assert all(float(row[2]) > 0 for row in rows)
