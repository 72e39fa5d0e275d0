"""Dense algebra in the memory of a Gram matrix."""

import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.solvers.lapack import batched_eigen, solve_, sum_of_squares, symmetric_eigen


def test_eigenvalues_of_small_and_singular_matrices() -> None:
    values, vectors = symmetric_eigen(torch.tensor([[4.0]], dtype=torch.float64))
    assert values.tolist() == [4.0]
    assert vectors.abs().tolist() == [[1.0]]
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, vectors = symmetric_eigen(rows @ rows.T)
    assert (values >= 0).all()
    assert_close((vectors * values) @ vectors.T, rows @ rows.T)


# One block, and five of which the last has 52 rows.
@pytest.mark.parametrize("size", [7, 2100])
def test_solves_in_place(size: int) -> None:
    rows = torch.randn(size, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G, right = rows @ rows.T + torch.eye(size, dtype=torch.float64), rows[:, :2].contiguous()
    assert_close(G @ solve_(G.clone(), right), right)
    with pytest.raises(FloatingPointError, match="Gram"):
        solve_(-G, right)
    G[-1, -1] = -1
    with pytest.raises(FloatingPointError, match="Gram"):
        solve_(G, right)


@pytest.mark.parametrize("size", [7, 2100])
def test_sums_of_squares_of_rows_are_whole_and_symmetric(size: int) -> None:
    rows = torch.randn(11, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = sum_of_squares(rows.split(4), size, rows.device)
    assert_close(total, rows.T @ rows)
    assert torch.equal(total, total.T)


def test_float64_takes_over_where_float32_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which matrices LAPACK fails on depends on its version: this one fails on all of them in float32.
    in_any_precision = torch.linalg.eigh

    def only_float64(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return in_any_precision(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", only_float64)
    rows = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    matrices = rows @ rows.mT
    values, vectors = batched_eigen(matrices)
    assert values.dtype == vectors.dtype == torch.float32
    assert_close(vectors * values[:, None] @ vectors.mT, matrices, rtol=1e-4, atol=1e-4)


def test_a_matrix_that_fails_in_float64_is_an_error() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        batched_eigen(torch.full((3, 3), torch.nan, dtype=torch.float64))
