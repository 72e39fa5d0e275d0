"""Cholesky factors of covariances that are singular up to rounding."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.gp.jittered_covariance import JitteredCovariance


def covariances(rank: int, *batch: int) -> Tensor:
    root = torch.randn(*batch, 5, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return root @ root.mT


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("rank", [5, 2])
def test_the_factor_is_that_of_the_matrix(rank: int, batch: tuple[int, ...]) -> None:
    matrix = covariances(rank, *batch)
    factor = JitteredCovariance(matrix).cholesky().to_dense()
    assert_close(factor @ factor.mT, matrix, rtol=0, atol=1e-12)
    assert_close(factor, factor.tril(), rtol=0, atol=0)
    assert_close(JitteredCovariance(matrix).cholesky(upper=True).to_dense(), factor.mT)


def test_jitter_rises_only_for_the_matrix_that_needs_it() -> None:
    good = covariances(5)
    bad = covariances(2) - 1e-9 * torch.eye(5, dtype=torch.float64)
    factors = JitteredCovariance(torch.stack([good, bad])).cholesky().to_dense()
    assert_close(factors[0] @ factors[0].mT, good, rtol=0, atol=1e-12)
    assert_close(factors[1] @ factors[1].mT, bad, rtol=0, atol=1e-7)
    assert float((factors[1] @ factors[1].mT - bad).abs().max()) > 1e-9


def test_solves_determinants_and_gradients_are_those_of_the_matrix() -> None:
    matrix, b = covariances(5, 2).requires_grad_(), torch.ones(2, 5, 1, dtype=torch.float64)
    operator = JitteredCovariance(matrix)
    assert_close(operator.solve(b), torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-8)
    assert_close(operator.logdet(), torch.linalg.slogdet(matrix)[1], rtol=1e-6, atol=1e-8)
    found = torch.autograd.grad(operator.cholesky().to_dense().square().sum(), matrix)[0]
    expected = torch.autograd.grad(matrix.diagonal(dim1=-1, dim2=-2).sum(), matrix)[0]
    assert_close((found + found.mT) / 2, expected, rtol=1e-6, atol=1e-8)


def test_a_matrix_that_is_not_finite_is_refused() -> None:
    with pytest.raises(FloatingPointError, match="covariance"):
        JitteredCovariance(torch.full((3, 3), torch.nan)).cholesky()
