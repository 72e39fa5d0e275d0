import pytest
import reference
import torch
from cases import FEW_CASES, Case, make_case
from torch.testing import assert_close

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.solvers.operator import largest_eigenvalue, make_dense


def dense(case: Case) -> torch.Tensor:
    J = reference.jacobian(case.model, case.x)
    return reference.ggn(J, reference.curvature(case.likelihood, case.linear_model().network_outputs, case.y))


def test_ggn_equals_the_dense_one(case: Case) -> None:
    model = case.linear_model()
    M = dense(case)
    ggn = model.ggn(model.network_outputs)
    assert_close(make_dense(ggn), M, rtol=1e-6, atol=1e-9)
    assert_close(ggn.diagonal(), M.diagonal(), rtol=1e-6, atol=1e-9)
    rows = torch.cat(list(ggn.root_rows()))
    assert_close(rows.T @ rows, M, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_the_same_vector_twice_gives_the_same_product(case: Case) -> None:
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    v = torch.ones(2, ggn.size, dtype=torch.float64)
    assert torch.equal(ggn.matmul(v), ggn.matmul(v))


def test_mini_batches_add_up_to_the_whole(case: Case) -> None:
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    v = torch.ones(1, ggn.size, dtype=torch.float64)
    order = torch.randperm(ggn.num_data, generator=torch.Generator().manual_seed(0))
    parts = sum(ggn.matmul(v, batch) for batch in order.split(2))
    assert_close(parts, ggn.matmul(v))
    noise = Draws(2, seed=0).noise(model.features.num_outputs)
    parts = sum(ggn.root_matmul(noise, batch) for batch in order.split(2))
    assert_close(parts, ggn.root_matmul(noise))


@pytest.mark.parametrize("name", ["classification", "regression_per_output"])
def test_root_noise_has_covariance_m(name: str) -> None:
    model = make_case(name).linear_model()
    ggn, num = model.ggn(model.network_outputs), 20_000
    M = make_dense(ggn)
    dense_ggn = type(ggn)(DenseFeatures.of(ggn.features), ggn.likelihood, ggn.outputs)
    draws = dense_ggn.root_matmul(Draws(num, seed=0).noise(model.features.num_outputs))
    error = (M.diagonal()[:, None] * M.diagonal() + M**2).sqrt() / num**0.5
    assert ((draws.T @ draws / num - M).abs() < 5.5 * error + 1e-12).all()


def test_largest_eigenvalue_of_a_batch() -> None:
    model = make_case("classification").linear_model()
    ggn = model.ggn(model.network_outputs)
    generator = torch.Generator().manual_seed(0)
    batch = torch.tensor([1, 4])
    part = type(ggn)(DenseFeatures(DenseFeatures.of(ggn.features).matrix[batch]), ggn.likelihood, ggn.outputs[batch])
    exact = 4 * torch.linalg.eigvalsh(make_dense(part))[-1]
    weights = torch.full((2,), 4.0, dtype=torch.float64)
    assert largest_eigenvalue(ggn, batch, weights, 200, generator) == pytest.approx(float(exact), rel=1e-6)
