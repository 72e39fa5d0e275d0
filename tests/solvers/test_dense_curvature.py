"""Dense curvature, against dense algebra."""

from dataclasses import replace

import pytest
import reference
import torch
from cases import Case, make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.curvature.kronecker import restored_curvature
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import NetworkFeatures
from laplace_sampling.linear_model.ggn import GGN, HeldCurvature
from laplace_sampling.solvers.dense import DenseCurvature
from laplace_sampling.solvers.lapack import sum_of_squares

P = 7


def positive(size: int = P, rank: int | None = None) -> Tensor:
    half = torch.randn(size, rank or size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return half @ half.T


def numbers(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1


def symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.sqrt() @ vectors.T


def shift_of(kind: str) -> float | Tensor:
    even = torch.full((P,), 0.3, dtype=torch.float64)
    return {"number": 0.3, "even": even, "uneven": numbers(P), "zero-dimensional": torch.tensor(0.3)}[kind]


def ggn_of(case: Case) -> GGN:
    model = case.linear_model()
    return model.ggn(model.network_outputs)


@pytest.mark.parametrize("kind", ["number", "even", "uneven", "zero-dimensional"])
@pytest.mark.parametrize("rank", [P, 3])
def test_functions_of_the_shifted_matrix(kind: str, rank: int) -> None:
    M, v, shift = positive(rank=rank), numbers(3, P), shift_of(kind)
    found = DenseCurvature.of(M, 1.0)
    H = M + torch.diag(torch.ones(P, dtype=torch.float64) * shift)
    assert_close(found.matmul(v), v @ M)
    assert_close(found.solve(v, shift), v @ H.inverse())
    assert_close(found.solve_root(v, shift), v @ symmetric_root(H.inverse()))
    assert_close(found.variance(shift), H.inverse().diagonal())
    assert_close(found.leverage(shift), (H.inverse() @ M).diagonal())
    assert_close(found.eigenvalues().sort()[0], torch.linalg.eigvalsh(M).clamp_min(0), atol=1e-12, rtol=1e-9)
    assert found.solve(v.float(), shift).dtype == torch.float32


def test_the_decomposition_of_one_shift_is_not_used_for_another() -> None:
    M, v = positive(), numbers(3, P)
    found = DenseCurvature.of(M, 1.0)
    shift = numbers(P)
    for _ in range(3):
        assert_close(found.solve(v, shift), v @ (M + torch.diag(shift)).inverse())
        shift *= 2


@pytest.mark.parametrize("w", [numbers(P), torch.full((P,), 3.0, dtype=torch.float64)])
def test_congruent(w: Tensor) -> None:
    M, v = positive(), numbers(3, P)
    found = DenseCurvature.of(M, 4.0).congruent(w)
    assert_close(found.matmul(v), v @ (w[:, None] * M * w))
    assert_close(found.eigenvalues().sort()[0], torch.linalg.eigvalsh(w[:, None] * M * w))
    assert found.passes == 4.0


def test_covariances_of_many_shifts() -> None:
    M, rows, shifts = positive(), numbers(4, 2, P), torch.tensor([0.1, 3.0, 50.0])
    expected = [rows @ (M + float(s) * torch.eye(P)).inverse() @ rows.mT for s in shifts]
    assert_close(DenseCurvature.of(M, 1.0).covariances(rows, shifts), torch.stack(expected))


def test_the_matrix_given_is_not_changed_and_must_be_finite() -> None:
    M = positive()
    before = M.clone()
    DenseCurvature.of(M, 1.0)
    assert torch.equal(M, before)
    M[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        DenseCurvature.of(M, 1.0)


def test_it_is_restored_from_its_tensors() -> None:
    found, v = DenseCurvature.of(positive(), 1.0), numbers(3, P)
    restored = restored_curvature(found.tensors())
    assert isinstance(restored, DenseCurvature)
    assert torch.equal(restored.solve(v, 0.3), found.solve(v, 0.3))


def test_the_accumulated_matrix_is_the_dense_ggn(case: Case) -> None:
    ggn = ggn_of(case)
    B = reference.curvature(case.likelihood, ggn.outputs, case.y)
    expected = reference.ggn(reference.jacobian(case.model, case.x), B)
    found = ggn.dense_curvature()
    assert_close(found.matmul(torch.eye(ggn.size, dtype=torch.float64)), expected, rtol=1e-6, atol=1e-9)
    assert found.passes == ggn.features.num_outputs / 2


def test_a_held_matrix_serves_every_noise_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held = make_case("regression").linear_model(), HeldCurvature()
    scale = numbers(model.features.size)
    ggn = model.ggn(model.network_outputs)
    ggns = [replace(ggn, likelihood=Gaussian(noise)) for noise in (1.0, 3.0)]
    plain = [ggn.dense_curvature().matrix for ggn in ggns]
    held.of(ggns[0], None)
    monkeypatch.setattr(GGN, "accumulated", None)
    for ggn, matrix in zip(ggns[::-1], plain[::-1], strict=True):
        assert_close(held.of(ggn, None).matrix, matrix)
        for factor in (scale, torch.full_like(scale, 0.5)):
            found = held.of(ggn, factor)
            assert_close(found.matrix, factor[:, None] * matrix * factor)
            assert_close(found.spectrum, torch.linalg.eigvalsh(found.matrix))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_each_row_is_computed_once(batch_size: int) -> None:
    ggn = ggn_of(make_case("classification"))
    ggn = replace(ggn, features=ggn.features.in_chunks(batch_size))
    features = ggn.features
    assert isinstance(features, NetworkFeatures)
    ggn.dense_curvature()
    features.network.products.update(jvp=0, vjp=0)
    ggn.dense_curvature()
    assert features.network.products == {"jvp": 0, "vjp": features.num_data * features.num_outputs}


def test_products_of_float32_rows_are_summed_in_float64() -> None:
    """Rows of which float32 would lose all but the largest."""
    blocks = [torch.tensor([[1e4, 1.0]]), torch.full((3, 2), 1e-3)]
    expected = sum(block.double().T @ block.double() for block in blocks)
    found = sum_of_squares(iter(blocks), 2, torch.device("cpu"))
    assert_close(found, expected, rtol=1e-12, atol=0.0)
