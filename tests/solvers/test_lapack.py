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


# One block, one and a row, and five of which the last has 52 rows.
SIZES = [7, 513, 2100]


@pytest.mark.parametrize("size", SIZES)
def test_solves_in_place(size: int) -> None:
    rows = torch.randn(size, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G, right = rows @ rows.T + torch.eye(size, dtype=torch.float64), rows[:, :2].contiguous()
    overwritten = G.clone()
    assert_close(G @ solve_(overwritten, right), right)
    assert_close(overwritten.tril() @ overwritten.tril().T, G)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entry", [-1.0, torch.nan])
def test_what_is_not_positive_definite_is_an_error(size: int, entry: float) -> None:
    # In the first block, in one of the middle, and in the last.
    for place in (0, size // 2, size - 1):
        G = torch.eye(size, dtype=torch.float64)
        G[place, place] = entry
        with pytest.raises(FloatingPointError, match="Gram"):
            solve_(G, torch.ones(size, 1, dtype=torch.float64))


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_squares_of_rows_are_whole_symmetric_and_in_float64(size: int) -> None:
    rows = torch.randn(11, size, generator=torch.Generator().manual_seed(0))
    total = sum_of_squares(rows.split(4), size, rows.device)
    assert_close(total, rows.double().T @ rows.double(), rtol=1e-12, atol=1e-13)
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
