import pytest
import torch
from quadratics import exact, moderate
from torch.testing import assert_close

from laplace_sampling.solvers.dense import Dense
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
