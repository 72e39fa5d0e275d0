import torch
from quadratics import exact, spectral, true_error
from torch.testing import assert_close

from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.solver import function_error, whiten


def test_whitening_is_a_change_of_coordinates() -> None:
    p = spectral(1e2, uniform=False)
    white, alpha, w = whiten(p)
    assert_close(p.precision * w**2, torch.full_like(w, alpha))
    assert_close(white.precision, torch.full_like(w, alpha))
    assert_close(make_dense(white.operator), w[:, None] * make_dense(p.operator) * w)
    root = torch.cat(list(white.operator.root_rows()))
    assert_close(root.T @ root, make_dense(white.operator))
    assert_close(exact(white) * w, exact(p))
    batch = torch.tensor([0, 5, 7])
    zeta = torch.ones_like(p.centre)
    assert_close(white.operator.matmul(zeta, batch), w * p.operator.matmul(zeta * w, batch))
    assert white.operator.size == p.operator.size
    assert white.operator.num_data == p.operator.num_data
    uniform = spectral(1e2)
    same, alpha, w = whiten(uniform)
    assert same is uniform
    assert alpha == 1.0
    assert bool((w == 1).all())


def test_function_error_is_a_bound() -> None:
    p = spectral(1e4, rows=20)
    M, shift = make_dense(p.operator), 1.0
    zeta = exact(p) + 0.1 * torch.randn(20, 80, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    residual = (exact(p) - zeta) @ (M + shift * torch.eye(80, dtype=torch.float64))
    bound = function_error(residual, zeta, zeta @ M, shift)
    truth = true_error(p, zeta)
    assert bool((truth <= bound * (1 + 1e-9)).all())
    zero = torch.zeros_like(zeta)
    assert float(function_error(zero, zeta, zeta @ M, shift).max()) == 0
    assert float(function_error(zero, zero, zero, shift).max()) == 0


def test_function_error_is_exact_where_an_eigenvalue_equals_the_prior_precision() -> None:
    shift, values = 0.3, torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64)
    truth = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    zeta = truth + torch.tensor([[0.7, 0.0, 0.0]], dtype=torch.float64)  # wrong along that eigenvector only
    residual = (values + shift) * (truth - zeta)
    error = (values * (zeta - truth) ** 2).sum(1).sqrt() / (values * zeta**2).sum(1).sqrt()
    assert_close(function_error(residual, zeta, values * zeta, shift), error)
