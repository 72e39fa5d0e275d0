"""The noise of residuals, and fits of measurements that ask for a noise."""

import inverse
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Data, Gaussian, LinearisedLaplace, residual_precision


def image() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, its input, sums of its image along lines as a matrix, and noisy sums."""
    model, z = inverse.picture(8)
    T = torch.as_tensor(inverse.radon(8, 5).toarray())
    T[:2] = 0  # of cells that see nothing
    y = inverse.noisy(model(z).detach().flatten(1) @ T.mT)
    return model, z, T, y


def test_the_noise_of_residuals_is_a_mean_over_the_targets_that_count() -> None:
    model, z, T, y = image()
    y[0, 3] = torch.nan
    error = (model(z).detach().flatten(1) @ T.mT - y)[0]
    seen = T.any(1) & ~y[0].isnan()
    assert_close(1 / residual_precision(model, [(z, y)], observe=T), float(error[seen].square().mean()))


def test_the_noise_of_residuals_of_batches_and_of_variances() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=g).double(), torch.randn(30, 2, generator=g).double()
    model, R = nn.Linear(3, 2).double(), torch.rand(30, generator=g).double() + 0.1
    squares = (model(x).detach() - y).square()
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    assert_close(1 / residual_precision(model, batches), float(squares.mean()))
    found = residual_precision(model, batches, data=Data(noise_variances=R))
    assert_close(1 / found, float((squares / R[:, None]).mean()))
    model.train()
    assert residual_precision(model, [(x, y)]) == pytest.approx(1 / float(squares.mean()))
    assert model.training


def test_a_network_that_explains_its_targets_says_nothing_of_the_noise() -> None:
    x, model = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), nn.Linear(3, 1)
    with pytest.raises(ValueError, match="not trained on"):
        residual_precision(model, [(x, model(x).detach())])


def test_measurements_have_no_default_noise() -> None:
    model, z, T, y = image()
    la = LinearisedLaplace(model, Gaussian(observe=T), num_samples=2)
    for fit in (la.fit, la.fit_hyperparameters, la.plan):
        with pytest.raises(ValueError, match="residual_precision"):
            fit([(z, y)])


@pytest.mark.parametrize("method", ["exact", "dual"])
def test_the_noise_of_measurements_is_kept(method: str) -> None:
    """The residuals of a fit with γ of c measurements say little of the noise: `(c − γ)/Σr²` was a third of it."""
    model, z, T, y = image()
    b = residual_precision(model, [(z, y)], observe=T)
    la = LinearisedLaplace(model, Gaussian(b, observe=T), method=method, num_samples=2)
    la.fit_hyperparameters([(z, y)], progress=False)
    assert float(la.noise_precision_) == b
    # The network is the true one, and its noise .1: within three standard errors of a mean square.
    seen = int(T.any(1).sum())
    assert abs(100 / b - 1) < 3 * (2 / seen) ** 0.5
