"""The commands of the benchmarks in small."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def rows(shown: str) -> list[list[str]]:
    """The rows of a table that a command has printed."""
    lines = [line for line in shown.splitlines() if line.startswith("| ") and "---" not in line]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def test_comparison_and_its_page(tmp_path: Path) -> None:
    command = importlib.import_module("benchmarks.comparison.__main__")
    out, page, records = tmp_path / "quick.jsonl", tmp_path / "results.md", tmp_path / "means.csv"
    command.main(
        [
            "--quick",
            "--only",
            "MAP|temperature scaling|ours, last layer|GAPA|projected|ensemble of 5$",
            "--out",
            str(out),
        ]
    )
    assert '"error":' not in out.read_text()
    lines = len(out.read_text().splitlines())
    command.main(["--quick", "--only", "MAP", "--out", str(out)])  # nothing is left
    assert len(out.read_text().splitlines()) == lines
    command.main(["report", str(out), "--records", str(records), "--page", str(page)])
    assert len(records.read_text().splitlines()) == lines + 1
    assert "| ours, last layer, validation | validation | 1 |" in page.read_text()
    assert "Classifications, test data, with validation data: *ours, last layer, validation* has" in page.read_text()
    command.main(["report", str(out), "--records", str(records), "--page", str(page)])  # the same rows again
    assert len(records.read_text().splitlines()) == lines + 1
    assert (tmp_path / "images" / "results.png").exists()


def test_distances(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.distances").main(["--quick"])
    wasserstein = {row[1]: float(row[-1]) for row in rows(capsys.readouterr().out)}
    assert wasserstein["ours, 64 samples"] < wasserstein["MAP"]


def test_gpu_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--device", "cpu", "--networks", "LeNet", "--parts", "fits", "products", "nccl"]
    assert importlib.import_module("benchmarks.gpu.__main__").main(arguments) == 0
    assert {row[0] for row in rows(capsys.readouterr().out)} == {"fits", "products", "nccl"}


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.kernels").main(["--quick"])
    errors = {row[1]: float(row[2]) for row in rows(capsys.readouterr().out) if row[2]}
    assert len(errors) == 3
    assert errors["condition, at most 100 passes"] < 0.3


def test_optimisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    command, out = importlib.import_module("benchmarks.optimisation"), tmp_path / "runs.jsonl"
    command.main(["--quick", "--out", str(out)])
    found = rows(capsys.readouterr().out)
    assert [row[0] for row in found] == list(command.METHODS)
    assert len(out.read_text().splitlines()) == len(found)
    command.main(["--quick", "--out", str(out)])  # nothing is left to run
    assert rows(capsys.readouterr().out) == found


def test_posteriors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("benchmarks.posteriors.__main__")
    out = tmp_path / "posteriors.jsonl"
    command.main(["--quick", "--parts", "gap", "--out", str(out)])
    first = rows(capsys.readouterr().out)
    assert {row[0].rpartition(" (1)")[0] for row in first} >= {"ours", "global inducing", "HMC (reference)"}
    lines = out.read_text()
    command.main(["--quick", "--parts", "gap", "--out", str(out)])  # nothing is left
    assert out.read_text() == lines
    assert rows(capsys.readouterr().out) == first


def test_price(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.price").main(["--quick", "--networks", "CNN with batch norm"])
    found = rows(capsys.readouterr().out)
    kinds = [sum(row[1].startswith(part) for row in found) for part in ("GGN", "fit", "prediction", "file")]
    # Each setting predicts one image, a batch, and a thousand.
    assert kinds == [3, 3, 9, 3]
    assert all(float(row[2]) > 0 for row in found)


def test_solvers(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("benchmarks.solvers").main(["--quick"])
    passes = {row[4]: row[5] for row in rows(capsys.readouterr().out)}
    assert len(passes) == 5
    assert float(passes["SVRG"]) < 10
