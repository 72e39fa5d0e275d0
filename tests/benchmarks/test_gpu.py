"""The run on a GPU, in small on the CPU: its table has all rows, whatever fails."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import suite
from benchmarks.gpu.fits import FITS
from benchmarks.gpu.networks import NETWORKS, made, num_weights
from benchmarks.gpu.report import COLUMNS, FailedError, Job, Report, Setup

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status, and the rows of the table at the end."""
    status = command.main(["--quick", "--device", "cpu", *arguments])
    heading, _, table = capsys.readouterr().out.rpartition(f"| {' | '.join(COLUMNS)} |\n")
    assert f"torch {torch.__version__}" in heading
    rows = [line.strip("|").split("|") for line in table.splitlines()[1:]]
    assert all(len(row) == len(COLUMNS) for row in rows)
    return status, [{name: cell.strip() for name, cell in zip(COLUMNS, row, strict=True)} for row in rows]


def test_networks_have_the_sizes_of_the_page() -> None:
    sizes = [num_weights(made(full, CPU)) for full, _, _ in NETWORKS.values()]
    assert sizes == ["421,642", "1,794,442", "11,172,810"]


def test_a_quick_run(capsys: pytest.CaptureFixture) -> None:
    status, rows = run(capsys, "--parts", "fits,products", "nccl")
    assert status == 0
    found = [(row["part"], row["network"], row["run"]) for row in rows]
    assert found[3:21] == [("fits", name, fit) for name in NETWORKS for fit in ("training", *FITS)]
    assert [(part, name) for part, name, _ in found[:3] + found[21:]] == (
        [("fits", "MLP")] * 3 + [("products", name) for name in ("LeNet", "ViT") for _ in range(2)] + [("nccl", "MLP")]
    )
    for row in rows[4:21]:
        if row["run"] != "training":
            figures = ("seconds", "epochs or gradients", "accuracy", "predict 10,000, s", "one image, ms")
            assert all(float(row[name]) >= 0 for name in figures)
            assert row["outcome"] == "last_layer" if "last_layer" in row["run"] else row["outcome"] != "–"
            assert "made up 0." in row["AUROC"] or "made up 1." in row["AUROC"]
            assert row["peak, GB"] == "–"


def test_what_fails_is_a_row_beside_the_others(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setup: Setup) -> Iterator[Job]:
        yield Job(lambda: {"outcome": "first"}, {"run": "a"})
        yield Job(lambda: 1 // 0, {"run": "b"})  # pyright: ignore
        yield Job(lambda: {"outcome": "third"}, {"run": "c"})
        yield Job(lambda: time.sleep(9), {"run": "d"}, most=0.1)  # pyright: ignore
        raise RuntimeError("planted\nin two lines")

    monkeypatch.setitem(command.PARTS, "products", (broken, 1.0))
    monkeypatch.setitem(command.PARTS, "nccl", (lambda setup: [Job(lambda: {"outcome": "last"})], 1.0))
    status, rows = run(capsys, "--parts", "products", "nccl")
    assert status == 1
    assert [(row["part"], row["run"], row["outcome"]) for row in rows] == [
        ("products", "a", "first"),
        ("products", "b", "**ZeroDivisionError**: integer division or modulo by zero"),
        ("products", "c", "third"),
        ("products", "d", "stopped: it took more than 0.1 s"),
        ("products", "", "**RuntimeError**: planted"),
        ("nccl", "", "last"),
    ]


def test_no_part_starts_after_its_deadline(capsys: pytest.CaptureFixture) -> None:
    status, rows = run(capsys, "--minutes", "0")
    assert status == 1
    assert [(row["part"], row["outcome"]) for row in rows] == [
        (part, "not run: no time left") for part in ("tests", "fits", "products", "nccl")
    ]


def test_a_wrong_result_is_a_failure_with_its_figures() -> None:
    def wrong() -> dict[str, str]:
        raise FailedError("off by 2", {"seconds": "3"})

    report = Report()
    report.run("nccl", lambda: [Job(wrong)], time.monotonic() + 60)
    assert report.failed
    assert report.rows[0]["seconds"] == "3"
    assert report.rows[0]["outcome"] == "**FailedError**: off by 2"


def test_failed_tests_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import pytest", "pytestmark = pytest.mark.gpu", "def test_right(): pass", "def test_wrong(): assert 0"]
    (tmp_path / "test_planted.py").write_text("\n".join(lines))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without xdist
    with pytest.raises(FailedError, match="1 failed, 1 passed") as caught:
        suite.run(tmp_path)
    assert caught.value.cells["remarks"] == "test_planted.py::test_wrong"
