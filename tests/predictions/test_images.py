"""Log-likelihoods of images, by pixel and by patch."""

import math

import inverse
import pytest
import reference
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace, RegressionPrediction

# Rows, and columns, of the patches of an image of 7 × 7 by three.
PARTS = [range(3), range(3, 7)]


def dense(error: Tensor, covariance: Tensor, pixel_noise: float, half: bool) -> float:
    """The mean over the pixels of one channel `[7, 7]`, patch by patch."""
    numbers, total = torch.arange(49).reshape(7, 7), 0.0
    for rows in PARTS:
        for columns in PARTS:
            some = numbers[list(rows)][:, list(columns)].flatten()
            S = covariance[some][:, some]
            S = (S + S.diag().diag()) / 2 if half else S
            S = S + pixel_noise * torch.eye(len(S)).double()
            total += float(MultivariateNormal(torch.zeros(len(S)).double(), S).log_prob(error.flatten()[some]))
    return total / 49


def test_patches_of_an_exact_fit_are_those_of_dense_algebra() -> None:
    model, z = inverse.picture(7)
    T = inverse.radon(7, 4)
    D = torch.as_tensor(T.toarray())
    y = inverse.noisy(model(z).detach().flatten(1) @ D.mT)
    la = LinearisedLaplace(
        model, Gaussian(50.0, observe=T), prior=IsotropicPrior(0.7), method="exact", num_samples=64
    ).fit([(z, y)], progress=False)
    pred, J = la.predict(z), reference.jacobian(model, z)[0]
    F = D @ J
    S = J @ torch.linalg.solve(50 * F.mT @ F + 0.7 * torch.eye(J.shape[1]).double(), J.mT)
    truth = inverse.noisy(pred.mean)
    error = (truth - pred.mean)[0, 0]
    assert_close(float(pred.log_likelihood(truth, (3, 3), 1e-4)), dense(error, S, 1e-4, half=False), rtol=1e-6, atol=0)
    variance = S.diagonal() + 1e-4
    by_pixel = -0.5 * (error.flatten() ** 2 / variance + (2 * math.pi * variance).log()).mean()
    assert_close(pred.log_likelihood(truth, pixel_noise=1e-4), by_pixel[None], rtol=1e-6, atol=0)
    assert_close(pred.log_likelihood(truth, (1, 1), 1e-4), by_pixel[None], rtol=1e-6, atol=0)
    whole = MultivariateNormal(torch.zeros(49).double(), S + 1e-4 * torch.eye(49).double()).log_prob(error.flatten())
    assert_close(pred.log_likelihood(truth, (10, 10), 1e-4), whole[None] / 49, rtol=1e-6, atol=0)


def drawn(num: int, side: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """A mean, deviations and their covariance: neighbours are correlated."""
    g = torch.Generator().manual_seed(0)
    axis = torch.arange(side).double()
    kernel = (-(axis[:, None] - axis).abs() / 2).exp()
    S = torch.kron(kernel, kernel) * 0.04
    root = torch.linalg.cholesky(S)
    mean = torch.rand(1, 1, side, side, generator=g).double()
    white = torch.randn(num, side**2, generator=g).double()
    return mean, (white @ root.mT).reshape(num, 1, 1, side, side), S


def test_the_log_likelihood_by_samples_is_within_its_standard_error_of_the_exact_one() -> None:
    mean, deviations, S = drawn(40_000)
    truth = inverse.noisy(mean)
    found = float(RegressionPrediction(mean, deviations, Gaussian()).log_likelihood(truth, (3, 3), 1e-4))
    expected = dense((truth - mean)[0, 0], S, 1e-4, half=True)
    groups = [RegressionPrediction(mean, part, Gaussian()) for part in deviations.split(2000)]
    each = torch.cat([pred.log_likelihood(truth, (3, 3), 1e-4) for pred in groups])
    error = float(each.std()) / len(each) ** 0.5
    assert error < 0.005
    assert abs(found - expected) < 3 * error


def test_missing_pixels_channels_and_several_images() -> None:
    mean, deviations, _ = drawn(200)
    truth = inverse.noisy(mean)
    missing = truth.clone()
    missing[..., 5] = math.nan
    both = RegressionPrediction(mean.expand(2, 1, 7, 7), deviations.expand(-1, 2, -1, -1, -1), Gaussian())
    alone = RegressionPrediction(*(t[..., [0, 1, 2, 3, 4, 6]] for t in (mean, deviations)), Gaussian()).log_likelihood(
        truth[..., [0, 1, 2, 3, 4, 6]], (7, 6)
    )
    for patch in ((7, 7), None):
        values = both.log_likelihood(torch.cat([truth, missing]), patch)
        single = RegressionPrediction(mean, deviations, Gaussian()).log_likelihood(truth, patch)
        assert_close(values[:1], single)
        if patch:
            assert_close(values[1:], alone)
    # Channels of a patch are joint: of two that are alike, the second says nothing new.
    coloured = RegressionPrediction(mean.expand(1, 2, 7, 7), deviations.expand(-1, -1, 2, -1, -1), Gaussian())
    joint = coloured.log_likelihood(truth.expand(1, 2, 7, 7), (7, 7), 1e-4)
    assert joint > coloured.log_likelihood(truth.expand(1, 2, 7, 7), pixel_noise=1e-4) + 0.05


def test_more_pixels_than_samples_and_pixels_that_do_not_vary() -> None:
    mean, deviations, _ = drawn(4)
    truth = inverse.noisy(mean)
    assert RegressionPrediction(mean, deviations, Gaussian()).log_likelihood(truth, (7, 7)).isfinite()
    deviations[..., 0] = 0
    pred = RegressionPrediction(mean, deviations, Gaussian())
    for patch in (None, (3, 3)):
        with pytest.raises(ValueError, match="pixel_noise"):
            pred.log_likelihood(truth, patch)
        assert pred.log_likelihood(truth, patch, 1e-6).isfinite()
    for bad, patch, noise, message in (
        (truth[0], None, 0.0, "shape"),
        (truth, (0, 3), 0.0, "whole number"),
        (truth, None, -1.0, "variance"),
    ):
        with pytest.raises(ValueError, match=message):
            pred.log_likelihood(bad, patch, noise)
