"""Rows that are held in the precision of the network, against dense ones."""

import copy

import pytest
import torch
from cases import CASES, Case, make_case
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.gp.gram import add_transposed_, gram
from laplace_sampling.linear_model import held_rows
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.held_rows import HeldRows
from laplace_sampling.linear_model.network_features import NetworkFeatures, features_at
from laplace_sampling.methods.observation_space import MOST_LOST, lost_by_rows
from laplace_sampling.networks.linearisation import Linearisation


@covering(indirect=["case"], case=CASES, numbers=[8, 2**19])
def test_products_are_those_of_the_dense_rows(case: Case, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_rows, "_NUMBERS", numbers)
    features = case.linear_model().features
    held, dense = HeldRows(features), DenseFeatures.of(features)
    g = torch.Generator().manual_seed(0)
    v = torch.randn(3, held.size, generator=g, dtype=torch.float64)
    variance = v[0] ** 2 + 0.1
    everything = torch.arange(held.num_data)
    for batch in (everything, everything.flip(0), torch.tensor([2, 0])):
        u = torch.randn(3, len(batch), held.num_outputs, generator=g, dtype=torch.float64)
        assert_close(held.rows(batch), dense.rows(batch))
        assert_close(held.jvp(v, batch), dense.jvp(v, batch))
        assert_close(held.vjp(u, batch), dense.vjp(u, batch))
        assert_close(held.vjp_each(u[0], batch), dense.vjp_each(u[0], batch))
    assert_close(held.outputs(v), dense.outputs(v))
    assert_close(gram(held, variance), gram(dense, variance, products="rows"))
    u = torch.randn(3, held.num_data, held.num_outputs, generator=g, dtype=torch.float64)
    added, expected = v.clone(), v.clone()
    add_transposed_(added, held, u, variance)
    add_transposed_(expected, dense, u, variance)
    assert_close(added, expected)


def test_each_row_is_computed_once_and_in_the_precision_of_the_network() -> None:
    case = make_case("classification")
    narrow = Case(copy.deepcopy(case.model).float(), case.likelihood, case.x.float(), case.y)
    features = narrow.linear_model().features
    assert isinstance(features, NetworkFeatures)
    held = HeldRows(features)
    features.rows(torch.tensor([0]))
    features.network.products.update(jvp=0, vjp=0)
    variance = torch.ones(held.size, dtype=torch.float64)
    K = gram(held, variance)
    held.outputs(torch.ones(4, held.size))
    gram(held, variance)
    assert features.network.products == {"jvp": 0, "vjp": held.num_data * held.num_outputs}
    assert held.matrix.dtype == torch.float32
    # Products of these rows, whatever the network would compute in float64.
    assert_close(K, held.matrix.double() @ held.matrix.double().T, rtol=1e-12, atol=1e-12)
    precise = held.with_rows_in_float64()
    assert precise.matrix.dtype == torch.float64
    assert_close(precise.matrix, DenseFeatures.of(case.linear_model().features).matrix.flatten(0, 1))


def test_the_gram_matrix_of_rows_in_float32_is_in_float64() -> None:
    phi, variance = torch.randn(8, 2, 50, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 2, 50)
    rows = phi.flatten(0, 1).double()
    gram_matrix = HeldRows(DenseFeatures(phi)).gram(variance)
    assert_close(gram_matrix, rows * variance.double() @ rows.T, rtol=1e-11, atol=1e-11)


def test_rounding_of_rows_loses_less_than_is_said() -> None:
    """At the ratio of noise and prior where rows in float64 are taken, standard deviations are off by less."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(384, 40), nn.Tanh(), nn.Linear(40, 3)
    )
    x = torch.randn(6, 1, 20, 20)
    networks = Linearisation(model), Linearisation(copy.deepcopy(model).double())
    narrow, precise = (HeldRows(features_at(n, x.to(n.dtype))) for n in networks)
    largest = float(torch.linalg.eigvalsh(precise.matrix @ precise.matrix.T)[-1])
    ratio = next(r for r in torch.logspace(6, 14, 801).tolist() if lost_by_rows(narrow, r) > MOST_LOST)

    def stddev(held: HeldRows, network: Linearisation) -> Tensor:
        # Rows of the predicted inputs are computed one by one, as those of other batches.
        rows = torch.cat([network.jacobian(datum.to(network.dtype)[None])[0] for datum in x]).double()
        train = held.matrix.double()
        values, vectors = torch.linalg.eigh(train @ train.T)
        alpha = largest / ratio
        explained = ((rows @ train.T @ vectors) ** 2 / (values + alpha)).sum(1)
        return ((rows**2).sum(1) - explained).clamp_min(0).div(alpha).sqrt()

    expected, found = stddev(precise, networks[1]), stddev(narrow, networks[0])
    assert float((found / expected - 1).abs().max()) < MOST_LOST
    assert lost_by_rows(precise, ratio) == 0


def test_what_rounding_of_rows_loses_is_that_of_a_row_beside_the_trained_one() -> None:
    """One datum with `φ`, and a prediction at `φ + δ`, `δ ⊥ φ`, as large as rounding: `φᵀH⁻¹φ` grows by `‖δ‖²/α`."""
    held, noise, alpha = HeldRows(DenseFeatures(torch.eye(2)[:1, None])), 4.0, 1e-12
    size = 8 * torch.finfo(torch.float32).eps  # the largest error that was measured
    H = torch.diag(torch.tensor([noise + alpha, alpha], dtype=torch.float64))
    phi, rounded = (torch.tensor([1.0, delta], dtype=torch.float64) for delta in (0.0, size))
    expected, found = (float(v @ torch.linalg.solve(H, v)) ** 0.5 for v in (phi, rounded))
    assert lost_by_rows(held, noise / alpha) == pytest.approx(found / expected - 1, rel=1e-6)
    assert found / expected - 1 > 1e-3
