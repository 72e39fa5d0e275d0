"""Rivals that look at what goes into the last layer, and what the page says of rivals."""

import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.comparison.activations import _variance, hidden, prior_covariance
from benchmarks.comparison.report import merged, verdicts


def test_the_variance_of_an_activation_is_zero_at_training_data_and_one_far_away() -> None:
    known = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert float(_variance(known, known, 0.5).max()) < 1e-4
    assert_close(_variance(known + 100, known, 0.5), torch.ones(50).double())


def test_the_prior_of_the_last_layer_gives_the_tangent_kernel_of_all_weights() -> None:
    """`Φ Σ Φᵀ = ΦΦᵀ + K` where the last layer has as many units as there are data."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2)), 3 * torch.randn(6, 2)
    units = hidden(network, x).double()
    expected = units @ units.T
    for c in range(2):
        J = []
        for row in x:
            gradients = torch.autograd.grad(network(row[None])[0, c], list(network[0].parameters()))
            J.append(torch.cat([g.flatten() for g in gradients]).double())
        expected += torch.stack(J) @ torch.stack(J).T / 2
    assert_close(units @ prior_covariance(network, x) @ units.T, expected, rtol=1e-3, atol=1e-3)


def _row(case: str, method: str, log_likelihood: float, seconds: float = 1.0) -> dict:
    nothing = dict.fromkeys(("rmse", "shifted", "error_auroc", "other_auroc", "joint_5"))
    head = {"suite": "second", "case": case, "method": method, "accuracy": 1.0, "seconds_predict": seconds}
    return nothing | head | {"log_likelihood": log_likelihood}


def test_words_name_what_is_better() -> None:
    rows = [
        _row(case, method, base + gain)
        for case, base in (("a", -1.0), ("b", -3.0))
        for method, gain in (("MAP", 0.0), ("ours", 0.2), ("SNGP", 0.1), ("ensemble of 5", 0.5))
    ]
    assert verdicts(rows).splitlines()[0] == (
        "- Classifications, test data, without validation data: *ours* has +0.200. "
        "**Better are** ensemble of 5 (by 0.300 nats on 2)."
    )


def test_new_results_bring_their_network_alone_and_times_are_relative_to_it() -> None:
    old = [_row("a", "MAP", -1.0, 2.0), _row("a", "ours", -0.7, 5.0), _row("a", "SNGP", -0.9, 3.0)]
    new = [_row("a", "MAP", -1.1, 8.0), _row("a", "ours", -0.8, 16.0), _row("b", "MAP", -2.0, 8.0)]
    assert merged(old, new) == [*new[:2], _row("a", "SNGP", -0.9, 12.0), new[2]]
