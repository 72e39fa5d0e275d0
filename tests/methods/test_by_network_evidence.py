"""The evidence of a network chooses the precisions of factored regressions: brute force and dense algebra."""

import math

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Factored, Gaussian, IsotropicPrior, LinearisedLaplace


def problem(num: int = 40) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 3, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    y = y + 0.3 * torch.randn(num, 2, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimiser = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()
    return network.eval(), x, y


NETWORK, X, Y = problem()


def log_evidence(la: LinearisedLaplace, alpha: float, noise: float) -> float:
    """With `M̂` of the fit, and the weights and residuals of the network; dense, up to a constant."""
    assert la._fitted is not None
    fit = la._fitted.fit
    assert fit is not None
    unit = fit.curvature.eigenvalues().double() / float(la.noise_precision_)
    squares, norm = float((NETWORK(X).detach() - Y).square().sum()), float(la.network.weights.square().sum())
    determinant = float((noise / alpha * unit).log1p().sum())
    return 0.5 * (Y.numel() * math.log(noise) - noise * squares - alpha * norm - determinant)


def fitted(likelihood: str | Gaussian = "regression", method: str | Factored = "kfac", **options: object):
    la = LinearisedLaplace(NETWORK, likelihood, method=method, num_samples=4)
    return la.fit_hyperparameters([(X, Y)], progress=False, **options)


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
@pytest.mark.parametrize("start", [1.0, 100.0])
def test_both_precisions_maximise_the_evidence(kind: str, start: float) -> None:
    la = fitted(Gaussian(start), kind)
    found = math.log(float(la.prior_precision_)), math.log(float(la.noise_precision_))
    best = minimize(lambda u: -log_evidence(la, *map(math.exp, u)), (0.0, 0.0), method="Nelder-Mead").x
    assert_close(torch.tensor(found), torch.tensor(best, dtype=torch.float64).float(), atol=5e-3, rtol=0)


def test_a_noise_that_is_given_stays() -> None:
    la = fitted(Gaussian(5.0, learn=False))
    assert float(la.noise_precision_) == 5.0
    best = minimize(lambda u: -log_evidence(la, math.exp(u[0]), 5.0), (0.0,), method="Nelder-Mead").x
    assert math.log(float(la.prior_precision_)) == pytest.approx(float(best[0]), abs=5e-3)


def test_no_mode_is_searched_for_until_it_is_asked_for() -> None:
    la = fitted()
    assert la._fitted is not None
    assert la._fitted.posterior.mode is None
    assert [step.mode_norm for step in la.history_] == [None]
    assert la.history_[0].effective_dimension == pytest.approx(la.effective_dimension_.tolist(), rel=1e-6)
    # Gradients of the Kronecker factors, 40 data with 2 outputs, twice; a mode takes passes of all data.
    assert la.network.products["jvp"] <= 2 * len(X)
    assert la.converged_
    assert la.mode_.shape == la.network.weights.shape


def test_samples_are_those_of_a_fit_at_these_precisions() -> None:
    la = fitted()
    given = Gaussian(float(la.noise_precision_), learn=False)
    prior = IsotropicPrior(precision=float(la.prior_precision_))
    again = LinearisedLaplace(NETWORK, given, prior=prior, method="kfac", num_samples=4)
    again.fit([(X, Y)], progress=False)
    assert_close(again.samples_, la.samples_, rtol=1e-6, atol=1e-9)
    assert_close(again.effective_dimension_, la.effective_dimension_, rtol=1e-6, atol=0)


def test_the_evidence_with_a_mode_is_still_there() -> None:
    la = fitted(criterion="evidence")
    assert la.history_[-1].mode_norm is not None
