from dataclasses import replace

import pytest
import torch
from quadratics import exact, moderate, spectral, true_error
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import IterativeSolver, Quadratic, function_error, whiten
from laplace_sampling.solvers.svrg import SVRG


@pytest.mark.parametrize("solver", [SGD(epochs=30), SVRG(max_snapshots=2, tolerance=1e-20), CG(1e-8)])
def test_rows_do_not_know_of_each_other(solver: IterativeSolver) -> None:
    p = moderate()
    # One row with a gradient a million times larger must not throttle the others, by clipping for instance.
    loud = replace(p, linear=p.linear * torch.tensor([[1.0], [1e6], [1.0]], dtype=torch.float64))
    assert_close(solver.solve(loud).value[0], solver.solve(p).value[0])
    first = replace(p, centre=p.centre[:1], linear=p.linear[:1])
    assert_close(solver.solve(first).value[0], solver.solve(p).value[0])


@pytest.mark.parametrize("solver", [SGD(), SVRG()])
def test_unstable_problems_are_refused_in_words(solver: IterativeSolver) -> None:
    p = moderate()
    with pytest.raises(FloatingPointError, match="batch_size"):
        solver.solve(replace(p, linear=p.linear * float("nan")))
    features = DenseFeatures(torch.full((4, 1, 2), float("nan"), dtype=torch.float64))
    ggn = GGN(features, Gaussian(), torch.zeros(4, 1, dtype=torch.float64))
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(FloatingPointError, match="NaN"):
        solver.solve(Quadratic(ggn, torch.ones(2, dtype=torch.float64), zeros, zeros))


@pytest.mark.parametrize(("kind", "setting", "value"), [
    (SGD, "step", 0.0), (SGD, "epochs", -1.0), (SGD, "finish_passes", -1), (SVRG, "epochs", 0.0), (SVRG, "step", -1.0),
    (SVRG, "max_snapshots", 0), (SVRG, "batch_size", -3), (CG, "tolerance", 1.0), (CG, "max_iterations", -1),
    (BlockKrylov, "tolerance", 0.0), (BlockKrylov, "max_iterations", -1),
])  # fmt: skip
def test_bad_settings_are_refused(kind: type, setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        kind(**{setting: value})


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
