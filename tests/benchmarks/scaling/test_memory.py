import json
from pathlib import Path

import pytest

from benchmarks.scaling import memory


def test_records_have_each_process(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    sizes = ["--gigabytes", "0.02", "--kept", "0.01", "--outputs", "0", "--samples", "0"]
    memory.main([*sizes, "--ranks", "1,2", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["inputs"], record["ranks"]) for record in records] == [("kept", 1), ("kept", 2), ("streamed", 2)]
    for record in records:
        assert len(record["processes"]) == record["ranks"]
        assert all(0 < one["before"] <= one["peak"] for one in record["processes"])


def test_what_has_no_size_is_left_out() -> None:
    assert [record["inputs"] for record in memory.run(0.02, 0, [1])] == ["streamed"]
    assert [record["inputs"] for record in memory.run(0, 0.01, [1])] == ["kept"]


def test_outputs_go_through_each_number_of_processes() -> None:
    records = memory.run_outputs(0.001, [1, 2])
    assert [(record["outputs"], len(record["processes"])) for record in records] == [(0.001, 1), (0.001, 2)]


def test_samples_that_are_shared_out_are_kept_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_WEIGHTS", 10_000)
    records = memory.run_samples(8, [1, 2])
    kept = {(record["shared"], record["ranks"]): record["processes"][0]["kept"] for record in records}
    assert kept[False, 1] == kept[False, 2] == kept[True, 1] == 2 * kept[True, 2]


def test_images_differ_and_are_not_stored(tmp_path: Path) -> None:
    memory.VirtualImages.write(tmp_path / "numbers")
    images = memory.VirtualImages(tmp_path / "numbers", 100_000)
    first, again, other = images[0][0], images[0][0], images[64][0]
    assert len(images) == 100_000
    assert first.equal(again)
    assert not first.equal(other)
    assert (other - first).std() < 1e-6  # the same numbers of the file, moved
