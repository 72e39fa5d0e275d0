"""`python -m benchmarks.gpu` in small on the CPU."""

import importlib

import pytest

pytestmark = pytest.mark.slow


def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    status = importlib.import_module("benchmarks.gpu.__main__").main(
        ["--quick", "--device", "cpu", "--networks", "LeNet", "--parts", "fits", "products", "nccl"]
    )
    assert status == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert {row[0].strip("| ") for row in rows[1:]} == {"fits", "products", "nccl"}
