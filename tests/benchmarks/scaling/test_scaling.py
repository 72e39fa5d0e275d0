import json
from pathlib import Path

import pytest
import torch

from benchmarks.scaling import __main__ as command
from benchmarks.scaling.networks import CASES, resnet18
from benchmarks.scaling.report import TABLES, with_tables

PAGE = Path(command.__file__).parents[2] / "docs" / "scaling.md"


def test_a_quick_run_and_its_page(tmp_path: Path) -> None:
    out, page = tmp_path / "scaling.jsonl", tmp_path / "scaling.md"
    command.main(["--quick", "--vectors", "2", "--out", str(out)])
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"setup", "load_before", "cores", "rows", "versions"} <= record.keys()
    columns = {"part", "network", "ranks", "data", "vectors", "bytes", "batch", "seconds", "repetitions"}
    assert all(columns <= row.keys() and row["seconds"] > 0 for row in record["rows"])
    assert record["setup"] == "quick, 2 times the vectors"
    assert {row["vectors"] for row in record["rows"] if row["network"]} == {2 * CASES[0].quick().vectors}
    parts = {(row["network"], row["part"]) for row in record["rows"]}
    of_network = ("alone", "together", "whole", "data_parallel", "sample_parallel", "gather")
    assert parts == {("", "all_reduce")} | {(case.name, part) for case in CASES for part in of_network}
    # Figures of a quick run are no figures of the page, those of a full one are.
    page.write_text(PAGE.read_text())
    command.main(["report", str(out), "--page", str(page)])
    assert "There is no record of a full run yet." in page.read_text()
    out.write_text("".join(json.dumps({**record, "setup": setup}) + "\n" for setup in ("full", "full, twice")))
    command.main(["report", str(out), "--page", str(page)])
    assert all(page.read_text().count(f"| {case.name} | 4 |") == 2 for case in CASES)


def test_the_page_is_that_of_the_records(tmp_path: Path) -> None:
    page = tmp_path / "scaling.md"
    page.write_text(PAGE.read_text())
    command.main(["report", "--page", str(page)])
    assert page.read_text() == PAGE.read_text()


def test_a_page_without_a_table() -> None:
    with pytest.raises(ValueError, match="measured"):
        with_tables("# A page", [])
    assert len(TABLES) == PAGE.read_text().count("<!-- table: ")


def test_the_network_for_small_images() -> None:
    network = resnet18()
    assert sum(p.numel() for p in network.parameters()) == 11_173_962
    assert network.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
