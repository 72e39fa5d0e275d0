"""What the library says that error bars give, against the records of the benchmark."""

from collections.abc import Sequence

import pytest

from benchmarks.comparison.__main__ import MEANS
from benchmarks.comparison.report import Row, mean, read_means, values
from laplace_sampling.methods import expected

ALL = read_means(MEANS)
ROWS = [row for row in ALL if row["suite"] == "second"]
# A method of the library, as rows of the records are called without and with validation data.
NAMES = {
    "subset": ("ours", "ours, validation"),
    "kfac": ("ours, KFAC", "ours, KFAC, validation"),
    "last_layer": ("ours, last layer", "ours, last layer, validation"),
}


def difference(rows: Sequence[Row], method: str, name: str) -> list[float]:
    return list(values(rows, method, name).values())


def check(value: float | None, measured: Sequence[float | None], digits: int) -> None:
    found = mean(measured)
    assert (value is None) == (found is None)
    assert value is None or found is None or value == pytest.approx(found, abs=0.51 * 10**-digits)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("validation", [0, 1])
def test_expected_gains_are_those_of_the_records(method: str, validation: int) -> None:
    rows, name = [row for row in ROWS if row["accuracy"] is not None], NAMES[method][validation]
    gain, corrupted, others = (pair[validation] for pair in expected.CLASSIFICATION[method])
    check(gain, difference(rows, name, "log_likelihood"), 3)
    check(corrupted, difference(rows, name, "shifted"), 2)
    check(others, [row["other_auroc"] for row in rows if row["method"] == name], 2)


def test_the_network_alone_and_regressions() -> None:
    alone = [row["other_auroc"] for row in ROWS if row["method"] == "MAP"]
    check(expected.ALONE, alone, 2)
    rows = [row for row in ROWS if row["rmse"] is not None]
    for name, method in (("all weights", "subset"), ("the last layer", "last_layer")):
        for value, of_method in zip(expected.REGRESSION[name], NAMES[method], strict=True):
            check(value, difference(rows, of_method, "log_likelihood"), 2)


def test_what_is_said_in_words() -> None:
    """The last layer gives nearly all with validation data, except of a regression."""
    (gains, *_), (last, *_) = (expected.CLASSIFICATION[name] for name in ("subset", "last_layer"))
    assert last[1] is not None
    assert gains[1] is not None
    assert last[1] > 0.9 * gains[1]
    whole, layer = expected.REGRESSION["all weights"][1], expected.REGRESSION["the last layer"][1]
    assert layer is not None
    assert whole is not None
    assert layer < 0.2 * whole


def test_the_default_budget_loses_hardly_anything_beside_twice_as_much() -> None:
    rows = [row for row in ALL if row["suite"] == "budget"]

    def lost(name: str, with_validation: str = "") -> float:
        value = {(row["case"], row["method"]): row[name] for row in rows}
        more = [case for case, method in value if method == "ours, 20 epochs" + with_validation]
        found = mean(
            value[case, "ours, 20 epochs" + with_validation] - value[case, "ours" + with_validation] for case in more
        )
        assert found is not None
        return found

    assert lost("log_likelihood") < 0.005
    assert lost("other_auroc") < 0.01
    assert lost("log_likelihood", ", validation") < 0.005
    assert lost("other_auroc", ", validation") < 0.015
    assert lost("epochs_fit") > 3
