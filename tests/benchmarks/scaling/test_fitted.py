import math
from typing import Any

import pytest

from benchmarks.scaling.fitted import Arithmetic, Ring, arithmetic, comparison, ring, rows_of
from benchmarks.scaling.measure import Timing


def test_the_fits_find_the_constants_of_made_up_timings() -> None:
    local, summed = Arithmetic(2e-3, 0.03), Ring(5e-5, 2e9)
    found = arithmetic([(n, local.seconds(n, 64)) for n in (16, 32, 64, 100)], 64)
    assert found.per_datum == pytest.approx(local.per_datum)
    assert found.per_batch == pytest.approx(local.per_batch)
    found = ring([(size, summed.seconds(size, 4)) for size in (1e3, 1e5, 1e7)], 4)
    assert found.latency == pytest.approx(summed.latency)
    assert found.bandwidth == pytest.approx(summed.bandwidth)


def test_seconds_of_the_parts() -> None:
    # 130 data in batches of 64 are three batches.
    assert Arithmetic(2.0, 5.0).seconds(130, 64) == 2 * 130 + 3 * 5
    # Of four ranks each sends 2·3/4 of a vector.
    assert Ring(1.0, 2.0).seconds(8, 4) == 1 + 1.5 * 8 / 2
    assert Ring(1.0, 2.0).seconds(8, 1) == 0


def test_no_coefficient_is_negative() -> None:
    # Less than in proportion to the data: by least squares alone a batch would give time back.
    assert arithmetic([(1, 1.0), (2, 2.1), (3, 3.3)], 10).per_batch >= 0
    assert ring([(1.0, 1.0), (2.0, 0.9)], 2).bandwidth == math.inf


def timing(part: str, seconds: list[float | None]) -> Timing:
    return Timing(part, "net", 2, 10, 4, 0, seconds)


def test_the_slowest_rank_counts_and_of_repetitions_the_median() -> None:
    first = [timing("together", [1.0, 5.0, 2.0]), timing("alone", [None, 4.0, None])]
    second = [timing("together", [3.0, 1.0, 2.5]), timing("alone", [7.0, None, 1.0])]
    together, alone = rows_of([first, second])
    assert together["repetitions"] == [3.0, 5.0, 2.5]
    assert together["seconds"] == 3.0
    assert alone["repetitions"] == [7.0, 4.0, 1.0]
    assert alone["seconds"] == 4.0
    assert {"part", "network", "ranks", "data", "vectors", "bytes"} <= together.keys()


def made_up(local: Arithmetic, summed: Ring, slowdown: float, batch: int = 8) -> list[dict[str, Any]]:
    """Rows of a run whose times follow the model."""

    def row(part: str, ranks: int, data: int, num_bytes: int, seconds: float) -> dict[str, Any]:
        return {
            "part": part, "network": "net", "ranks": ranks, "data": data, "vectors": 4, "bytes": num_bytes,
            "batch": batch, "seconds": seconds,
        }  # fmt: skip

    rows = [row("alone", 1, n, 0, local.seconds(n, batch)) for n in (2, 4, 8, 16)]
    rows.append(row("together", 2, 16, 0, slowdown * local.seconds(8, batch)))
    rows.append(row("whole", 1, 44, 0, local.seconds(44, batch)))
    whole = slowdown * local.seconds(22, batch) + summed.seconds(4000, 2)
    rows.append(row("data_parallel", 2, 44, 4000, whole))
    rows.append(row("sample_parallel", 2, 44, 0, slowdown * local.seconds(44, batch) / 2))
    rows.append(row("gather", 2, 0, 2000, 0.5))
    sums = [row("all_reduce", 2, 0, size, summed.seconds(size, 2)) for size in (100, 10_000, 1_000_000)]
    return [*rows, *({**sum_, "network": ""} for sum_ in sums)]


def test_a_run_that_follows_the_model_is_predicted() -> None:
    local, summed = Arithmetic(0.1, 0.05), Ring(0.01, 1e4)
    found = comparison(made_up(local, summed, 1.2), "net")
    assert found.slowdown == pytest.approx(1.2)
    assert found.error == pytest.approx(0, abs=1e-6)
    # 44 data in six batches on one rank, 22 in three on each of two, and a sum of 4,000 bytes.
    alone, parallel = 4.4 + 6 * 0.05, 1.2 * (2.2 + 3 * 0.05) + 0.01 + 0.4
    assert found.predicted == pytest.approx(parallel)
    assert found.data_parallel == pytest.approx(alone / (2 * parallel))
    assert found.sample_parallel == pytest.approx(1 / 1.2)


def test_a_part_that_is_missing() -> None:
    rows = [row for row in made_up(Arithmetic(0.1, 0.05), Ring(0.01, 1e4), 1.0) if row["part"] != "whole"]
    with pytest.raises(ValueError, match=r"no rows of \['whole'\]"):
        comparison(rows, "net")
