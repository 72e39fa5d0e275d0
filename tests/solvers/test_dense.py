import pytest
import torch
from quadratics import exact, moderate
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.dense import Dense, Factor
from laplace_sampling.solvers.operator import make_dense


@pytest.mark.parametrize("shape", [(30, 2, 8), (3, 2, 20)], ids=["primal", "dual"])
def test_dense_solves_both_ways(shape: tuple[int, int, int]) -> None:
    p = moderate(*shape)
    solution = Dense().solve(p)
    M = make_dense(p.operator)
    H = M + torch.diag(p.precision)
    assert_close(solution.value, exact(p))
    assert_close(solution.delta, exact(p) - p.centre)
    assert_close(solution.leverage[0], torch.linalg.solve(H, M).diagonal())
    assert solution.converged
    assert solution.exact
    assert float(solution.residual.max()) < 1e-10


def test_the_factor_keeps_its_digits_where_the_prior_decides() -> None:
    # Six rows of rank three: the sum of `M` and a prior of 1e-11 has lost the prior, a root of it has not.
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = DenseFeatures((rows @ torch.eye(3, 5, dtype=torch.float64))[:, None])
    ggn = GGN(features, Gaussian(), torch.zeros(6, 1, dtype=torch.float64))
    undetermined = torch.eye(5, dtype=torch.float64)[3:]
    found = Factor.of(ggn, torch.full((5,), 1e-11, dtype=torch.float64)).solve(undetermined)
    assert_close(found, 1e11 * undetermined, rtol=1e-6, atol=1e-2)


def test_woodbury_keeps_its_digits_where_the_data_decide() -> None:
    # A condition of 4e11: in the row space of R a solution is small beside the terms of which it is the difference. The
    # identity alone is off by 1e-5 to 1e-4, its two refinements by 1e-12 at most, in whatever order a processor sums.
    root = torch.randn(6, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, values, right = torch.linalg.svd(root, full_matrices=False)
    alpha = 1e-10
    inner = root @ root.T / alpha + torch.eye(6, dtype=torch.float64)
    factor = Factor(torch.full((20,), alpha, dtype=torch.float64), torch.linalg.cholesky(inner), root)
    rhs = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) @ root
    expected = (rhs @ right.T / (values**2 + alpha)) @ right
    found = factor.solve(rhs)
    # In the row space, where predictions at the data are made of it.
    assert_close(found @ root.T, expected @ root.T, rtol=1e-9, atol=1e-9)
    assert float((factor._by_woodbury(rhs) - expected).matmul(root.T).abs().max()) > 1e-6
