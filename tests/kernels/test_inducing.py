"""Posteriors of inducing points, against dense algebra and against the exact posterior."""

from typing import Any

import pytest
import torch
from gaussian_processes import KERNELS, Model, inputs, model
from torch import Tensor

from laplace_sampling.kernels import condition
from laplace_sampling.kernels.kernel_rows import kernel_matrix


def dense(gp: Model, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """`B y` and the covariance of `f(·) − B(f(X) + ε)`, `B = k(·, Z)(K_ZX S⁻¹ K_XZ + K_ZZ)⁻¹ K_ZX S⁻¹`."""
    (data,), y = gp.train_inputs, gp.train_targets
    noise = gp.likelihood.noise.detach().expand(len(data))
    with torch.no_grad():
        K, cross, new = (kernel_matrix(gp.covar_module, a, b) for a, b in ((data, data), (x, data), (x, x)))
        of_data, of_points, of_new = (kernel_matrix(gp.covar_module, z, other) for other in (data, z, x))
        B = of_new.T @ torch.linalg.lstsq(of_data / noise @ of_data.T + of_points, of_data / noise, driver="gelsd")[0]
        return 0.3 + B @ (y - 0.3), new - B @ cross.T - cross @ B.T + B @ (K + torch.diag(noise)) @ B.T


@pytest.mark.parametrize("name", ["matern-3/2", "network and rest", "of tasks"])
def test_mean_and_variance(name: str) -> None:
    """The mean to rounding; variances of 16 sets of features within four standard errors."""
    gp, x, z = model(KERNELS[name](), n=80), inputs(8, seed=5), inputs(20, seed=6)
    wanted, covariance = dense(gp, x, z)
    posteriors = [condition(gp, 64, inducing=z, seed=1000 * seed) for seed in range(16)]
    torch.testing.assert_close(posteriors[0].mean(x), wanted, rtol=1e-5, atol=1e-5)
    variances = torch.stack([posterior.variance(x) for posterior in posteriors])
    assert bool(((variances.mean(0) - covariance.diagonal()).abs() <= 4 * variances.std(0) / 16**0.5).all())


@pytest.mark.parametrize("name", KERNELS)
def test_all_data_as_points_give_the_exact_posterior(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and samples, with the same draws, also in blocks of rows."""
    gp, x = model(KERNELS[name](), n=100), inputs(20, seed=5)
    monkeypatch.setattr("laplace_sampling.kernels.inducing.NUMBERS_TOGETHER", 100 * 30)
    exact = condition(gp, 4, solver="exact")
    for inducing in (100, gp.train_inputs[0]):
        found = condition(gp, 4, inducing=inducing)
        torch.testing.assert_close(found.mean(x), exact.mean(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.samples(x), exact.samples(x), rtol=1e-5, atol=1e-5)
    assert found.solver == "inducing"
    assert found.passes == 1


def test_more_points_are_nearer() -> None:
    gp, x = model(KERNELS["matern-5/2"](), n=300, noise=0.01), inputs(50, seed=5)
    exact = condition(gp, 4, solver="exact").samples(x)
    errors = [float((condition(gp, 4, inducing=m).samples(x) - exact).norm()) for m in (5, 30, 200)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.02 * errors[0]


def test_more_data_paths_and_noise_of_each_datum() -> None:
    n, z, x = 100, inputs(15, seed=6), inputs(12, seed=5)
    noise = torch.logspace(-1, 1, n + 5, dtype=torch.float64)
    gp = model(KERNELS["rbf"](), n + 5, noise)
    (data,), y = gp.train_inputs, gp.train_targets
    first = Model(data[:n], y[:n], gp.covar_module, noise[:n]).double().eval()
    posterior = condition(first, 3, inducing=z)
    torch.testing.assert_close(posterior.mean(x), dense(first, x, z)[0], rtol=1e-5, atol=1e-5)
    extended = posterior.extended(data[n:], y[n:], noise[n:])
    torch.testing.assert_close(extended.mean(x), dense(gp, x, z)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(posterior.sample_paths()(x), posterior.samples(x))
    own = posterior.sample_paths()(x.reshape(3, 4, 20))
    torch.testing.assert_close(own, torch.stack([posterior.samples(x)[k, 4 * k : 4 * k + 4] for k in range(3)]))


def test_points_that_are_none() -> None:
    gp = model(KERNELS["rbf"]())
    cases: tuple[tuple[Any, str], ...] = (
        (0, "at least 1"),
        (inputs(0), "at least one"),
        (torch.full((3, 20), torch.nan), "no NaN"),
    )
    for inducing, message in cases:
        with pytest.raises(ValueError, match=message):
            condition(gp, inducing=inducing)
    with pytest.raises(ValueError, match="takes no solver"):
        condition(gp, inducing=10, solver="cg")
