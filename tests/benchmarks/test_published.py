"""Published tables beside ours: what the parts compute themselves, a small run of each, and the page."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.comparison import fidelity
from benchmarks.comparison.networks import NETWORKS, build
from benchmarks.comparison.run import Case, problem_of
from benchmarks.comparison.training import Recipe, outputs_of
from benchmarks.data.tasks import Part
from benchmarks.published import __main__ as command
from benchmarks.published import active_learning, distances, linear_mode, optimisation, parts, regression
from benchmarks.published.batch_bald import batch_bald, joint_entropies
from benchmarks.published.curves import standard_errors
from benchmarks.published.setup import Cells, Rows, Setup, Study
from laplace_sampling import LinearisedLaplace
from laplace_sampling.methods import budget


@pytest.mark.parametrize("size", [3866, 8386])
def test_networks_have_the_sizes_in_their_names(size: int) -> None:
    network = build(f"strided CNN, {size:,} weights", torch.Size([1, 28, 28]), 10)
    assert sum(p.numel() for p in network.parameters()) == size


@pytest.mark.parametrize("name", [*linear_mode.NETWORKS, *distances.NETWORKS])
def test_networks_are_known(name: str) -> None:
    assert name in NETWORKS


def probs_of(seed: int, num_functions: int, candidates: int, classes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_functions, candidates, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


def information(probs: torch.Tensor, batch: Sequence[int]) -> float:
    """`I(y; f)` of the labels of a batch, by a sum over all of them."""
    joint = torch.stack([
        torch.stack([probs[:, i, c] for i, c in zip(batch, labels, strict=True)]).prod(0).mean()
        for labels in itertools.product(range(probs.shape[-1]), repeat=len(batch))
    ])  # fmt: skip
    return float(torch.special.entr(joint).sum() - torch.special.entr(probs[:, batch]).sum(-1).mean(0).sum())


def test_joint_entropies_are_those_of_all_labels() -> None:
    probs = probs_of(0, 5, 4, 3)
    # Labels of the first candidate, as often as their mixture has them; the estimate is exact in expectation.
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial(probs[:, 0].mean(0), 40_000, replacement=True, generator=generator)
    found = joint_entropies(probs[:, 0, labels].log(), probs)
    for j in range(1, 4):
        joint = torch.einsum("ka,kb->ab", probs[:, 0], probs[:, j]) / len(probs)
        assert float(found[j]) == pytest.approx(float(torch.special.entr(joint).sum()), abs=0.01)


def test_a_batch_tells_most_about_the_function() -> None:
    probs = probs_of(2, 6, 5, 2)
    chosen = batch_bald(probs, 3, draws=20_000)
    greedy: list[int] = []
    for _ in range(3):
        rest = [i for i in range(5) if i not in greedy]
        greedy.append(max(rest, key=lambda i: information(probs, [*greedy, i])))
    assert chosen == greedy


def test_a_batch_has_no_two_inputs_that_tell_the_same() -> None:
    # Twelve copies of the input that tells most, and one of another that tells a little less.
    first = torch.tensor([[0.99, 0.01], [0.99, 0.01], [0.01, 0.99], [0.01, 0.99]])
    other = torch.tensor([[0.95, 0.05], [0.05, 0.95], [0.95, 0.05], [0.05, 0.95]])
    probs = torch.stack([*[first] * 12, other], 1)
    assert 12 in batch_bald(probs, 2)


def test_the_precision_at_the_trained_weights() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x.argmax(-1)
    optimiser = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimiser.step()
    la = LinearisedLaplace(network, "classification", hessian_at="network", method="exact")
    la.fit_hyperparameters([(x, y)], criterion="evidence", scale=1.0, progress=False)
    alpha = linear_mode.precision_of_weights(la)
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    per_weight = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)))(parameters)
    jacobian = torch.cat([j.flatten(2) for j in per_weight.values()], -1)
    p = network(x).detach().softmax(-1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    values = torch.linalg.eigvalsh(torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian)).clamp_min(0)
    norm = sum(float(q.square().sum()) for q in parameters.values())
    assert alpha * norm == pytest.approx(float((values / (values + alpha)).sum()), rel=1e-3)


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")  # of so small a network
@pytest.mark.parametrize("found_by", ["exact", "EM", "the mode"])
def test_no_budget_ends_the_search_for_the_exact_precision(found_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # More observations than weights: exact algebra is in the space of the weights, in steps.
    problem = problem_of(
        Case("digits, n=300, noise 1", "strided CNN, 256 weights", Recipe(weight_decay=1e-3, steps=100)), 0, None
    )

    def precision() -> float:
        if found_by == "exact":
            return fidelity.exact(problem)["precision"]
        if found_by == "EM":
            return distances.steps(problem, "exact")[0]["precision"]
        rows = linear_mode.rows(problem)
        return next(row["prior_precision"] for row in rows if row["method"] == linear_mode.MODE)

    free = precision()
    # Of any budget that there is, a search affords its first step only.
    monkeypatch.setattr(budget, "_TUNING", 1.0)
    assert precision() == pytest.approx(free, rel=1e-6)


def test_the_nearest_within_a_number_of_epochs() -> None:
    keys = ("method", "epochs_of_fit", *distances.DISTANCES)
    rows = [
        dict(zip(keys, values, strict=True)) | {"num_weights": 9}
        for values in [("cheap", 1.0, 0.4, 0.4, 0.4), ("dear", 20.0, 0.1, 0.5, 0.1), ("dear", 12.0, 0.3, 0.7, 0.1)]
    ]
    lines = distances.nearest(rows)
    assert [line[1] for line in lines] == ["5", "10", "20", "50"]
    assert lines[1][2:] == ["cheap: 0.4000", "cheap: 0.4000", "cheap: 0.400"]  # the other takes 16 epochs on average
    assert lines[2][2:] == ["dear: 0.2000", "cheap: 0.4000", "dear: 0.100"]


def test_rules_that_look_at_one_input_take_the_largest_scores() -> None:
    network = build(active_learning.NETWORK, torch.Size([1, 28, 28]), 10)
    x = torch.randn(12, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    picked = active_learning.chosen("entropy", network, Part(x, torch.zeros(12).long()), x, 3, 0)
    p = outputs_of(network, x).softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    assert set(picked) == set(entropy.argsort(descending=True)[:3].tolist())
    assert active_learning.chosen("random", network, Part(x, torch.zeros(12).long()), x, 3, 0) == [0, 1, 2]


def test_regrets_are_zero_at_the_optimum() -> None:
    pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    for target in optimisation.targets().values():
        assert float(target.optimal_value - target(target.optimizers.double()).max()) == pytest.approx(0, abs=1e-4)


def test_a_split_is_read(tmp_path: Path) -> None:
    table, mask = np.arange(12.0).reshape(4, 3), np.array([[0, 1], [0, 0], [1, 0], [0, 1]])
    np.savetxt(tmp_path / "data.csv.gz", table, delimiter=",")
    np.savetxt(tmp_path / "test_mask.csv.gz", mask, fmt="%d", delimiter=",")
    found, is_test = regression.read(tmp_path, 1)
    assert np.array_equal(found, table)
    assert is_test.tolist() == [True, False, False, True]


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    command.main(["--quick", "--out", str(out), "--cache", str(out.parent / "networks"), *arguments])
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", parts.PARTS)
def test_a_quick_run_and_its_page(part: str, tmp_path: Path) -> None:
    if part == "optimisation":
        pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    out = tmp_path / "published.jsonl"
    records = run(out, "--parts", part)
    rows = [row for record in records for row in record["rows"]]
    assert rows
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    command.main(["report", str(out), "--page", str(tmp_path / "published.md")])
    text = (tmp_path / "published.md").read_text()
    assert f"## {parts.PARTS[part].title}" in text
    assert "The data are made up" in text
    for row in rows:
        assert row["method"] in text
    for image in (line.split("(")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")):
        assert (tmp_path / image).stat().st_size > 0


def test_the_page_is_that_of_the_records(tmp_path: Path) -> None:
    command.main(["report", "--page", str(tmp_path / "published.md")])
    written = Path(command.__file__).parents[2] / "docs" / "published.md"
    assert (tmp_path / "published.md").read_text() == written.read_text()


def test_a_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def second() -> Rows:
        calls.append("second")
        if calls.count("second") == 1:
            raise KeyboardInterrupt
        return [{"method": "b"}]

    def cells(setup: Setup) -> Cells:
        return {"first": lambda: [{"method": "a"}], "second": second}

    out = tmp_path / "published.jsonl"
    monkeypatch.setitem(parts.PARTS, "fashion", Study("", cells, lambda rows, images: ""))
    with pytest.raises(KeyboardInterrupt):
        run(out, "--parts", "fashion")
    assert [r["cell"] for r in run(out, "--parts", "fashion", "--only", "^first")] == ["first"]
    assert [r["cell"] for r in run(out, "--parts", "fashion")] == ["first", "second"]
    assert len(run(out, "--parts", "fashion")) == 2
    assert len(calls) == 2
    assert len(run(out, "--parts", "fashion", "--epochs", "2")) == 4  # of other sizes nothing is there


def test_a_part_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.main(["--parts", "lunch", "--out", str(tmp_path / "published.jsonl")])
    assert "there are no parts ['lunch']" in capsys.readouterr().err


def test_bands_are_the_standard_errors_of_the_tables() -> None:
    values = np.array([[1.0, 5.0], [3.0, 9.0]])
    # Of two values a half of their difference.
    assert standard_errors(values).tolist() == [1.0, 2.0]
    assert standard_errors(values[:1]).tolist() == [0.0, 0.0]
