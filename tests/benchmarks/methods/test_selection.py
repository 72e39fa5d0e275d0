"""Ranks of candidates, and areas of scores as detectors."""

import pytest
import torch
from torch import nn

from benchmarks.data.tasks import Part
from benchmarks.methods import other_data
from benchmarks.methods.selection import Candidate, Recipe, ranked, spearman, table, values
from laplace_sampling import IsotropicPrior, LinearisedLaplace


def test_the_table_has_rank_correlations() -> None:
    found = {str(i): {"test, network": float(i), "good": 2.0 * i, "bad": -(i**3.0)} for i in range(6)}
    mixed = {name: {**row, "good": row["good"] if i else 99.0} for i, (name, row) in enumerate(found.items())}
    assert spearman(found, "good", "test, network") == pytest.approx(1)
    text = table({("a", 0): found, ("b", 0): found, ("b", 1): mixed}, "test, network").splitlines()
    assert text[0] == "| test, network | good | bad |"
    of_mixed = spearman(mixed, "good", "test, network")
    assert of_mixed == pytest.approx(1 - 6 * (25 + 5) / (6 * 35))  # the first becomes the last of six
    assert text[3] == f"| b | {(1 + of_mixed) / 2:.2f} | -1.00 |"
    assert text[4].startswith("| mean |")


def test_scores_of_a_candidate() -> None:
    short = Candidate(width=3, recipe=Recipe(weight_decay=1e-2, steps=20))

    def ours(problem) -> dict[str, float]:
        la = LinearisedLaplace(problem.network, problem.likelihood)
        la.fit_hyperparameters(problem.data.train.loader(), progress=False)
        return {"loo": float(la.score("loo")), "evidence": float(la.score("evidence"))}

    found = ranked("gap", 0, {"short": short}, ours)["short"]
    assert found["evidence"] < 0
    assert found["loo"] < 0
    pytest.importorskip("laplace", reason="laplace-torch is a baseline of the benchmark, not a dependency")
    everything = ranked("gap", 0, {"short": short}, values)["short"]
    assert everything["loo"] == pytest.approx(found["loo"])
    assert everything["test, network"] < 0


def test_areas_of_data_far_away_and_of_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator)
    y = (x[:, 0] + 0.3 * torch.randn(300, generator=generator) > 0).long()
    network = nn.Linear(2, 2)
    network.weight.data = torch.tensor([[-2.0, 0.0], [2.0, 0.0]])
    network.bias.data.zero_()
    la = LinearisedLaplace(network, "classification", prior=IsotropicPrior(10.0)).fit([(x, y)], progress=False)
    # Where the second input, which no label depends on, is large the network is as sure as elsewhere.
    found = other_data.areas(la, Part(x, y), {"far": x + torch.tensor([0.0, 30.0])})
    assert found["epistemic"]["far"] > 0.8
    assert found["epistemic"]["errors"] > 0.8
    assert set(found) == set(other_data.SCORES)
