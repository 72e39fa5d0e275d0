"""Draws from priors as functions: their covariance is the kernel."""

from typing import Any

import pytest
import torch
from gaussian_processes import KERNELS, inputs, kernels, with_lengthscale

from laplace_sampling.kernels import TanimotoKernel
from laplace_sampling.kernels.kernel_rows import kernel_matrix
from laplace_sampling.kernels.prior_draws import Expansion, PriorDraws


@pytest.mark.parametrize("name", KERNELS)
def test_covariances_of_draws_are_the_kernel(name: str) -> None:
    """4,096 draws, of 64 sets of features, entry by entry within four standard errors."""
    kernel, x = KERNELS[name]().double(), inputs(12)
    draws = torch.cat([PriorDraws(kernel, x.shape[1], 64, seed, num_features=200)(x) for seed in range(64)])
    wanted = kernel_matrix(kernel, x, x).detach()
    products = draws.detach()[:, :, None] * draws.detach()[:, None, :]
    # Draws of one set of features have it in common.
    means = products.reshape(64, 64, 12, 12).mean(1)
    error = means.std(0) / 8
    assert bool(((means.mean(0) - wanted).abs() <= 4 * error).all())


def test_features_of_a_matern_kernel_of_many_dimensions() -> None:
    """One χ² a frequency: with one for each dimension the error would be .4 at any number of features."""
    x = torch.rand(300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = with_lengthscale(kernels.MaternKernel(nu=1.5), 1.0).double()
    wanted = kernel(x).to_dense().detach()
    for count in (1000, 10_000):
        (term,) = Expansion(8, count, torch.Generator().manual_seed(1)).of(kernel, torch.arange(8))
        assert term.frequencies is not None
        angles = x @ term.frequencies.T
        found = (angles.cos() @ angles.cos().T + angles.sin() @ angles.sin().T) / count
        assert float((found - wanted).norm() / wanted.norm()) <= 5 / count**0.5


def test_draws_are_functions() -> None:
    """The same at every call, whatever comes with an input, and differentiable."""
    kernel, x = KERNELS["network and rest"]().double(), inputs(30)
    draws = PriorDraws(kernel, x.shape[1], 3, 0)
    torch.testing.assert_close(draws(x[5:7]), draws(x)[:, 5:7])
    assert torch.autograd.gradcheck(lambda first: draws(torch.cat([first, x[:1, 3:]], 1)), x[:1, :3].requires_grad_())


def test_other_kernels_are_refused_with_the_list() -> None:
    class Own(kernels.RBFKernel):
        pass

    for kernel, what in ((Own(), "Own"), (kernels.CosineKernel() + kernels.RBFKernel(), "CosineKernel")):
        with pytest.raises(NotImplementedError, match=f"{what} cannot be drawn.*MaternKernel.*RBFKernel"):
            PriorDraws(kernel, 3, 1, 0)
    with pytest.raises(NotImplementedError, match="add the kernels"):
        PriorDraws(KERNELS["tangent"]() * kernels.RBFKernel(), 20, 1, 0)


def test_the_tanimoto_kernel() -> None:
    kernel: Any = TanimotoKernel()
    x = inputs(20)[:, 4:]
    x[3] = x[4] = 0
    bits = (x > 0).double()
    for rows in (x, bits):
        low, high = torch.minimum(rows[:, None], rows), torch.maximum(rows[:, None], rows)
        wanted = low.sum(-1) / high.sum(-1)
        wanted[3:5, 3:5] = 1
        torch.testing.assert_close(kernel(rows).to_dense(), wanted)
        torch.testing.assert_close(kernel(rows[:7], rows[2:]).to_dense(), wanted[:7, 2:])
        torch.testing.assert_close(kernel(rows, diag=True), torch.ones(20, dtype=torch.float64))
