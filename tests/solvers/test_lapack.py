"""Dense algebra in the memory of a Gram matrix."""

import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.solvers.lapack import solve_, symmetric_eigen


def test_eigenvalues_of_small_and_singular_matrices() -> None:
    values, vectors = symmetric_eigen(torch.tensor([[4.0]], dtype=torch.float64))
    assert values.tolist() == [4.0]
    assert vectors.abs().tolist() == [[1.0]]
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, vectors = symmetric_eigen(rows @ rows.T)
    assert (values >= 0).all()
    assert_close((vectors * values) @ vectors.T, rows @ rows.T)


def test_solves_in_place() -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G, right = rows @ rows.T + torch.eye(7, dtype=torch.float64), rows[:, :2].contiguous()
    assert_close(G @ solve_(G.clone(), right), right)
    with pytest.raises(FloatingPointError, match="Gram"):
        solve_(-G, right)
