"""What rounding of the rows of the Jacobian does to standard deviations in observation space."""

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace_sampling.linear_model.features import DenseFeatures, features_at
from laplace_sampling.methods.closed_form import MOST_LOST, lost_by_rows
from laplace_sampling.networks.linearisation import Linearisation


def test_rounding_of_rows_loses_less_than_is_said() -> None:
    """At the ratio of noise and prior where rows in float64 are taken, standard deviations are off by less."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(384, 40), nn.Tanh(), nn.Linear(40, 3)
    )
    x = torch.randn(6, 1, 20, 20)
    networks = Linearisation(model), Linearisation(copy.deepcopy(model).double())
    narrow, precise = (DenseFeatures.of(features_at(n, x.to(n.dtype))) for n in networks)
    largest = float(torch.linalg.eigvalsh(precise.matrix.flatten(0, 1) @ precise.matrix.flatten(0, 1).T)[-1])
    ratio = next(r for r in torch.logspace(6, 14, 801).tolist() if lost_by_rows(narrow, r) > MOST_LOST)

    def stddev(held: DenseFeatures, network: Linearisation) -> Tensor:
        # Rows of the predicted inputs are computed one by one, as those of other batches.
        rows = torch.cat([network.jacobian(datum.to(network.dtype)[None])[0] for datum in x]).double()
        train = held.matrix.flatten(0, 1)
        values, vectors = torch.linalg.eigh(train @ train.T)
        alpha = largest / ratio
        explained = ((rows @ train.T @ vectors) ** 2 / (values + alpha)).sum(1)
        return ((rows**2).sum(1) - explained).clamp_min(0).div(alpha).sqrt()

    expected, found = stddev(precise, networks[1]), stddev(narrow, networks[0])
    assert float((found / expected - 1).abs().max()) < MOST_LOST
    assert lost_by_rows(precise, ratio) < 1e-12


def test_what_rounding_of_rows_loses_is_that_of_a_row_beside_the_trained_one() -> None:
    """One datum with `φ`, and a prediction at `φ + δ`, `δ ⊥ φ`, as large as rounding: `φᵀH⁻¹φ` grows by `‖δ‖²/α`."""
    held, noise, alpha = DenseFeatures(torch.eye(2)[:1, None]), 4.0, 1e-12
    size = 8 * torch.finfo(torch.float32).eps  # the largest error that was measured
    H = torch.diag(torch.tensor([noise + alpha, alpha], dtype=torch.float64))
    phi, rounded = (torch.tensor([1.0, delta], dtype=torch.float64) for delta in (0.0, size))
    expected, found = (float(v @ torch.linalg.solve(H, v)) ** 0.5 for v in (phi, rounded))
    assert lost_by_rows(held, noise / alpha) == pytest.approx(found / expected - 1, rel=1e-6)
    assert found / expected - 1 > 1e-3
