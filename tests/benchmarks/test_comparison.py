"""`python -m benchmarks.comparison`, with its methods on two small cases, and the page that it draws."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_quick_run_and_page(tmp_path: Path) -> None:
    command = importlib.import_module("benchmarks.comparison.__main__")
    out, page, records = tmp_path / "quick.jsonl", tmp_path / "results.md", tmp_path / "means.csv"
    command.main(["--quick", "--only", "MAP|temperature scaling|ours, last layer|ensemble of 5$", "--out", str(out)])
    assert '"error":' not in out.read_text()
    lines = len(out.read_text().splitlines())
    command.main(["--quick", "--only", "MAP", "--out", str(out)])  # nothing is left
    assert len(out.read_text().splitlines()) == lines
    command.main(["report", str(out), "--records", str(records), "--page", str(page)])
    assert len(records.read_text().splitlines()) == lines + 1
    assert "| ours, last layer, validation | validation | 1 |" in page.read_text()
    assert (tmp_path / "images" / "results.png").exists()
