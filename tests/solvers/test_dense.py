import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.solver import Quadratic


def problem(num_data: int = 300, outputs: int = 2, size: int = 8, rows: int = 3, scale: float = 1.0) -> Quadratic:
    """A quadratic of moderate condition; `scale` multiplies the whole objective."""
    g = torch.Generator().manual_seed(0)
    features = torch.randn(num_data, outputs, size, generator=g, dtype=torch.float64)
    features *= torch.linspace(0.3, 1, size, dtype=torch.float64)
    ggn = GGN(DenseFeatures(features), Gaussian(scale), torch.zeros(num_data, outputs, dtype=torch.float64))
    precision = scale * (1 + 20 * torch.rand(size, generator=g, dtype=torch.float64))
    centre, linear = torch.randn(2, rows, size, generator=g, dtype=torch.float64)
    return Quadratic(ggn, precision, centre, scale * 30 * linear)


def exact(p: Quadratic) -> Tensor:
    H = make_dense(p.operator) + torch.diag(p.precision)
    return torch.linalg.solve(H, (p.linear + p.precision * p.centre).T).T


@pytest.mark.parametrize("shape", [(30, 2, 8), (3, 2, 20)], ids=["primal", "dual"])
def test_dense_solves_both_ways(shape: tuple[int, int, int]) -> None:
    p = problem(*shape)
    solution = Dense().solve(p)
    M = make_dense(p.operator)
    H = M + torch.diag(p.precision)
    assert_close(solution.value, exact(p))
    assert_close(solution.delta, exact(p) - p.centre)
    assert_close(solution.leverage[0], torch.linalg.solve(H, M).diagonal())
    assert solution.converged
    assert solution.exact
    assert float(solution.residual.max()) < 1e-10
