"""The price list: what it measures with, what it compares with, and a small run of its parts."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.data.tasks import Part
from benchmarks.price import __main__ as command
from benchmarks.price import budgets, defaults, factored, fits, last_layer, numbers, parts, published, training
from benchmarks.price.dense_reference import Reference, distance
from benchmarks.price.fits import Measured, OutOfTime, epochs_row, measured
from benchmarks.price.meter import operations_of, turns
from benchmarks.price.networks import CNN, LENET, MLP, SMALL, build, num_weights
from benchmarks.price.report import page
from benchmarks.price.scores import auroc_of, log_loss, log_losses, our_log_loss, temperature
from benchmarks.price.setup import Row, Setup, at_most
from benchmarks.price.training import epoch_of
from benchmarks.time_limit import time_limit
from laplace_sampling import IsotropicPrior, LinearisedLaplace


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(None, tmp_path / "networks", scale=0.01, narrow=True, repeats=1)


def test_networks_have_the_sizes_of_the_list() -> None:
    assert {name: num_weights(build(name, 0)) for name in (CNN, LENET, SMALL, MLP)} == {
        CNN: 26_874,
        LENET: 61_706,
        SMALL: 4236,
        MLP: 3190,
    }


def test_operations_are_counted_and_seconds_are_the_least() -> None:
    layer, x = nn.Linear(7, 5), torch.ones(3, 7)
    assert operations_of(lambda: layer(x)) == 2 * 3 * 7 * 5
    calls: list[str] = []
    seconds = turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3)
    assert [name for name, _ in groupby(calls)] == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}
    assert min(seconds.values()) > 0


def test_a_limit_ends_what_takes_longer() -> None:
    def forever() -> None:
        while True:
            math.sqrt(2)

    with pytest.raises(OutOfTime, match=r"0\.05 s"), time_limit(0.05, OutOfTime):
        forever()
    with time_limit(10.0, OutOfTime):
        pass


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("timed", [20, 10_000])
def test_three_epochs_cost_three_epochs(setup: Setup, once: bool, timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(setup, repeats=2)
    monkeypatch.setattr(fits, "TIMED", timed)
    network, train = setup.network(LENET, 1000), setup.train(1000)
    epoch = epoch_of(network, train.loader(training.BATCH))
    before = network.state_dict()["0.weight"].clone()

    def fit() -> str:
        for _ in range(3):
            epoch()
        return "fitted"

    cost = measured(network, train, fit, 20.0, setup, others={"one epoch": epoch}, once=once)
    assert cost.result == "fitted"
    assert cost.counted == pytest.approx(3.0)
    assert set(cost.others) == {"one epoch"}
    assert torch.equal(network.state_dict()["0.weight"], before)
    assert epochs_row("", replace(cost, epochs=3.5), 4.0).holds
    assert not epochs_row("", replace(cost, epochs=4.5), 4.0).holds


def test_a_fit_far_above_its_bound_is_stopped(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "GRACE", 0.05)

    def fit() -> None:
        while True:
            math.sqrt(2)

    cost = measured(build(MLP, 0), Part(torch.zeros(4, 64), torch.zeros(4).long()), fit, 1.0, setup)
    assert cost.counted is None
    assert epochs_row("", cost, 1.0).holds is False
    assert epochs_row("", cost, 1.0).figure.startswith("not done after")


def test_a_network_is_trained_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    network = setup.network(CNN, 1000)
    assert not network.training
    train = setup.train(1000)
    start = build(CNN, 0, narrow=True)
    before, after = (log_loss(net.train()(train.x).log_softmax(-1), train.y) for net in (start, network))
    assert after < before
    monkeypatch.delattr(training, "train")
    again = setup.network(CNN, 1000)
    x = setup.test.x
    assert torch.equal(again(x), setup.network(CNN, 1000)(x))


def small_fit(network: nn.Module, train: Part, **settings: Any) -> LinearisedLaplace:
    settings = {"prior": IsotropicPrior(precision=2.0), "hessian_at": "network", "num_samples": 8} | settings
    return LinearisedLaplace(network, "classification", **settings).fit(train.loader(20), progress=False)


def test_the_reference_is_the_exact_posterior(setup: Setup) -> None:
    network, train, x = setup.network(SMALL, 1000).double(), setup.train(1000), setup.test.x[:7].double()
    la = small_fit(network, Part(train.x.double(), train.y), method="exact")
    reference = Reference.of(network, train.x, 2.0)
    assert_close(reference.stddev(x), la.predict(x).stddev, rtol=1e-6, atol=1e-9)
    exact = reference.stddev(x)
    assert distance(exact, exact) == 0
    few, many = (
        torch.tensor([distance(s, exact) for s in reference.sampled_stddev(x, num, 20)]).mean() for num in (16, 1024)
    )
    # the standard deviation of K samples is off by `1/√(2K)`
    assert float(many) == pytest.approx(1 / math.sqrt(2 * 1024), rel=0.3)
    assert float(few) == pytest.approx(1 / math.sqrt(2 * 16), rel=0.3)


def test_scores(setup: Setup) -> None:
    network, test = setup.network(LENET, 1000), setup.test
    f = network(test.x).detach()
    losses = log_losses(network, test, setup.validation)
    assert losses["network"] == pytest.approx(float(nn.functional.cross_entropy(f, test.y)), rel=1e-5)
    scaled = f / temperature(network, setup.validation)
    assert losses["temperature"] == pytest.approx(float(nn.functional.cross_entropy(scaled, test.y)), rel=1e-5)
    la = small_fit(network, setup.train(1000), prior=IsotropicPrior(precision=1e9), method="exact")
    assert our_log_loss(la, test) == pytest.approx(losses["network"], abs=1e-4)
    assert auroc_of(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])) == 1.0
    assert auroc_of(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 0.0


def test_products_of_the_published_recipe() -> None:
    # In each of 8 steps: a mode by 40 epochs, 16 samples by 20, and an effective dimension of 16 JVPs.
    assert published.published_products() == 8 * (40 * 2 + 16 * 20 * 2 + 16) + 16 + 64 * (20 * 2 + 1)


def test_a_budget_is_compared_with_the_exact_posterior(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = LinearisedLaplace.fit

    def with_budget(self: LinearisedLaplace, loader: object, *, budget: float, **settings: Any) -> LinearisedLaplace:
        spent.append(budget)
        return fit(self, loader, **settings)  # pyright: ignore

    spent: list[float] = []
    monkeypatch.setattr(LinearisedLaplace, "fit", with_budget)
    rows = budgets.rows(setup)
    assert spent == [1.0, 5.0, 20.0, 100.0]
    off = [row.values["value"] for row in rows if "distance to" in row.what]
    assert len(off) == 4
    assert max(off) < 1e-2  # so few weights are fitted exactly
    assert [row.holds for row in rows if "by that of" in row.what] == [True]


def test_more_data_are_to_take_fewer_epochs() -> None:
    class Fitted:
        def diagnose(self) -> object:
            return object()

    cost = Measured(Fitted(), 5.0, 4.0)
    row = numbers.row
    assert row(10, cost, []).holds is None
    assert row(100, cost, [5.0]).holds
    assert not row(100, cost, [5.0, 3.0]).holds
    assert row(100, cost, [None]).holds  # more products than with all data were not enough
    assert row(100, replace(cost, counted=None), [5.0]).holds is False


def test_the_page_says_what_holds() -> None:
    rows = [at_most("a", 1.0, 2.0), at_most("b", 3.0, 2.0), Row("c", "≤ 1", "skipped: no peer"), Row("d", "", "known")]
    text = page([{"part": "factored", "rows": [vars(row) for row in rows]}])
    assert "| a | ≤ 2.00 | 1.00 | yes |" in text
    assert "| b | ≤ 2.00 | 3.00 | **no** |" in text
    assert "1 of 3 bounds hold, 1 have no figure." in text


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a quick run."""
    status = command.main(["--quick", "--out", str(out), "--cache", str(out.parent / "networks"), *arguments])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    holds = [row["holds"] for record in records for row in record["rows"]]
    assert status == (False in holds)
    return records


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", parts.PARTS)
def test_a_quick_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(fits, "GRACE", 2.0)
    monkeypatch.setattr(defaults, "CASES", ((CNN, 1000),))
    monkeypatch.setattr(last_layer, "NETWORKS", (CNN,))
    monkeypatch.setattr(factored, "NETWORKS", (CNN,))
    monkeypatch.setattr(numbers, "NUMBERS", (1000, 10_000))
    records = run(tmp_path / "price.jsonl", "--parts", part)
    assert {record["part"] for record in records} == {part}
    rows = [row for record in records for row in record["rows"]]
    assert rows
    printed = capsys.readouterr().out
    for found in rows:
        assert f"| {found['what']} | {found['bound']} | {found['figure']} |" in printed
        assert found["holds"] in ([True, False] if "value" in found["values"] else [True, False, None])
        assert math.isfinite(found["values"].get("value", 0.0))


@pytest.mark.filterwarnings("ignore")
def test_a_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cells(rows: Callable[[], list[Row]]) -> dict[str, Callable[[], list[Row]]]:
        return {"first": lambda: [at_most("first", 1.0, 2.0)], "second": rows}

    def interrupted() -> list[Row]:
        raise KeyboardInterrupt

    out = tmp_path / "price.jsonl"
    monkeypatch.setitem(parts.PARTS, "factored", lambda setup: cells(interrupted))
    with pytest.raises(KeyboardInterrupt):
        run(out, "--parts", "factored")
    monkeypatch.setitem(parts.PARTS, "factored", lambda setup: cells(lambda: [at_most("second", 1.0, 2.0)]))
    assert [record["cell"] for record in run(out, "--parts", "factored")] == ["first", "second"]
    assert len(run(out, "--parts", "factored")) == 2
    assert len(run(out, "--parts", "factored", "--seed", "1")) == 4  # of another seed nothing is there


def test_a_part_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.main(["--parts", "lunch", "--out", str(tmp_path / "price.jsonl")])
    assert "there are no parts ['lunch']" in capsys.readouterr().err
