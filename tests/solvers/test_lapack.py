"""Dense algebra in the memory of a Gram matrix."""

import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.solvers.lapack import inverse_, solve_, symmetric_eigen


def test_eigenvalues_of_small_and_singular_matrices() -> None:
    values, vectors = symmetric_eigen(torch.tensor([[4.0]], dtype=torch.float64))
    assert values.tolist() == [4.0]
    assert vectors.abs().tolist() == [[1.0]]
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, vectors = symmetric_eigen(rows @ rows.T)
    assert (values >= 0).all()
    assert_close((vectors * values) @ vectors.T, rows @ rows.T)


@pytest.mark.parametrize("size", [1, 7, 1100])
def test_the_inverse_in_place(size: int) -> None:
    rows = torch.randn(size, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G = rows @ rows.T + torch.eye(size, dtype=torch.float64)
    P = G.clone()
    assert_close(inverse_(P), torch.linalg.slogdet(G)[1])
    assert torch.equal(P, P.T)
    assert_close(P @ G, torch.eye(size, dtype=torch.float64))
    right = rows[:, :2].contiguous()
    assert_close(G @ solve_(G.clone(), right), right)
    for call in (inverse_, lambda G: solve_(G, right)):
        with pytest.raises(FloatingPointError, match="Gram"):
            call(-G)
