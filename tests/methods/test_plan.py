"""What a plan says before a fit: the last layer beside all weights, and what the benchmark lets expect."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.curvature.kronecker import Kronecker
from laplace_sampling.methods.expected import CLASSIFICATION, in_words


def digits(num: int = 400) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(100, 6), torch.randint(3, (100,))) for _ in range(num // 100)]


def network(*end: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3), *end)


def names(plan: Any) -> list[str]:
    return [candidate.name for candidate in plan.candidates]


@pytest.mark.parametrize("validation", [False, True])
def test_the_last_layer_is_planned_as_if_it_had_been_asked_for(validation: bool) -> None:
    data, model = digits(), network()
    held_out = digits(200) if validation else None
    la = LinearisedLaplace(model, "classification")
    row = la.plan(data, held_out).candidates[-1]
    own = LinearisedLaplace(model, "classification", parameters="last_layer").plan(data, held_out)
    assert (row.name, row.method.name, own.method) == ("last layer", "last_layer", "last_layer")
    assert_close(row.epochs, own.epochs, rtol=0.01, atol=0.0)
    assert row.bytes == own.bytes
    # It is the only row where nothing else is random, and none of its samples of all weights.
    assert names(own) == ["last layer"]
    assert la.network.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (network(nn.Tanh()), {}),  # its output is no linear layer's
        (network(), {"parameters": ["0.*", "2.*"]}),
    ],
)
def test_no_last_layer_where_there_is_none_to_compare(model: nn.Module, settings: dict[str, Any]) -> None:
    plan = LinearisedLaplace(model, "classification", **settings).plan(digits())
    assert "last layer" not in names(plan)


def test_what_to_expect_is_said_of_all_weights_and_of_the_last_layer() -> None:
    data = digits()
    text = str(LinearisedLaplace(network(), "classification").plan(data))
    (row,) = [line for line in text.splitlines() if line.startswith("last layer")]
    gain, corrupted, others = CLASSIFICATION["last_layer"]
    assert all(f"{value:.2f}" in row for pair in (gain, corrupted, others) for value in pair if value is not None)
    assert "`val_loader`" in text
    assert "corrupted" in str(LinearisedLaplace(network(), "classification", parameters="last_layer").plan(data))
    # Nothing is known of other weights, and of counts.
    assert "corrupted" not in str(LinearisedLaplace(network(), "classification", parameters=["0.*"]).plan(data))
    counts = [(x, torch.poisson(torch.ones(len(x), 3))) for x, _ in data]
    assert "gain" not in str(LinearisedLaplace(network(), "poisson").plan(counts))


def test_a_regression_is_told_to_take_all_weights() -> None:
    data = [(x, x[:, :3].sin()) for x, _ in digits()]
    plan = LinearisedLaplace(network(), "regression").plan(data)
    assert names(plan)[-1] == "last layer"
    assert in_words(plan.likelihood).strip() in str(plan)
    assert "last layer is not enough" in str(plan).replace("\n", " ")


def test_memory_of_kronecker_factors_is_planned() -> None:
    """Of a wide layer they are larger than all samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 10), nn.Tanh(), nn.Linear(10, 3))
    data = [(torch.randn(300, 200), torch.randint(3, (300,)))]
    la = LinearisedLaplace(model, "classification", method="kfac", num_samples=2)
    planned = la.plan(data).bytes
    la.fit(data, progress=False)
    curvature = la.posterior_.curvature
    assert isinstance(curvature, Kronecker)
    parts = [part for block in curvature.blocks for part in (block.U_G, block.U_A, block.eigenvalues)]
    kept = sum(part.numel() for part in parts) * 8
    samples = 2 * la.network.num_parameters * 4
    assert kept > 10 * samples
    assert kept + samples <= planned <= 3 * kept + samples
