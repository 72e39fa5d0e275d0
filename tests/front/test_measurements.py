"""Measurements of the outputs, against dense algebra."""

import copy
import pickle
import warnings
from typing import Any

import inverse
import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import in_observation_space, laplace_of
from problems import CLOSE
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Dual, Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.gp.linear_operators import to_linear_operator
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.methods.plan import Auto
from laplace_sampling.methods.problem import Budget


def measured() -> tuple[Case, Tensor, Tensor]:
    """An image network, five measurements of each image, and their matrix."""
    case, g = make_case("image_regression"), torch.Generator().manual_seed(0)
    T = torch.randn(5, 18, generator=g).double()
    y = case.model(case.x).detach().flatten(1) @ T.T + 0.5 * torch.randn(4, 5, generator=g).double()
    return case, T, y


@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("exact", "matrix"),
        ("exact", "operator"),
        ("exact", "functions"),
        pytest.param("dual", "functions", marks=pytest.mark.slow),
        ("krylov", "functions"),
    ],
)
def test_measurements_are_those_of_dense_algebra(method: str, form: str) -> None:
    case, T, y = measured()
    given = {"matrix": T, "operator": to_linear_operator(T), "functions": (lambda f: T @ f, lambda u: T.T @ u)}[form]
    likelihood = Gaussian(4.0, observe=given)
    la = laplace_of(case.model, likelihood, method=method, prior_precision=0.7, num_samples=2000)
    la.fit([(case.x, y)], tolerance=1e-6, progress=False)
    J = reference.jacobian(case.model, case.x)
    features = torch.einsum("mc,ncp->nmp", T, J).flatten(0, 1)
    H = 4 * features.T @ features + 0.7 * torch.eye(J.shape[2]).double()
    pred, flat = la.predict(case.x), J.flatten(0, 1)
    expected = flat @ torch.linalg.solve(H, flat.T)
    assert pred.mean.shape == (4, 2, 3, 3)
    observed = la.predict(case.x, observed=True)
    assert_close(observed.mean, case.model(case.x).detach().flatten(1) @ T.T)
    assert_close(observed.samples, pred.samples.flatten(2) @ T.T)
    of_measurements = features @ torch.linalg.solve(H, features.T)
    if method == "exact":
        assert_close(pred.joint_covariance(), expected, **CLOSE)
        assert_close(observed.joint_covariance(), of_measurements, **CLOSE)
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / 2000).sqrt()
    drawn = pred.deviations.flatten(1)
    assert ((drawn.T @ drawn / 2000 - expected).abs() < 5.5 * error).all()
    assert observed.log_prob(y).shape == (4,)
    with pytest.raises(ValueError, match="observed=True"):
        pred.log_prob(case.y)


@pytest.mark.filterwarnings("ignore:.*the samples of the posterior are off")  # of a network in float32 without noise
@pytest.mark.parametrize(("noise_precision", "precision"), [(1e3, torch.float32), (1e9, torch.float64)])
def test_rows_are_in_the_precision_of_the_network_where_the_noise_allows(
    noise_precision: float, precision: torch.dtype
) -> None:
    """There standard deviations are those of rows in float64; without noise to speak of, rows are in float64."""
    case, T, y = measured()
    found = []
    for dtype in (torch.float32, torch.float64):
        likelihood = Gaussian(noise_precision, observe=T.to(dtype))
        la = laplace_of(
            copy.deepcopy(case.model).to(dtype), likelihood, method="exact", prior_precision=0.7, num_samples=50
        )
        la.fit([(case.x.to(dtype), y.to(dtype))], progress=False)
        features = la._fitted.fit.model.features  # pyright: ignore
        assert isinstance(features, DenseFeatures)
        assert features.precision == (precision if dtype == torch.float32 else dtype)
        assert features.dtype == torch.float64
        found.append(la.predict(case.x.to(dtype)).joint_covariance().double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-4


def test_hyperparameters_from_measurements_and_a_reload(tmp_path) -> None:
    case, T, y = measured()
    la = laplace_of(case.model, Gaussian(1.0, observe=T, learn=True), method="exact", num_samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters([(case.x, y)], progress=False)
    assert in_observation_space(la)
    assert la.leave_one_out().log_prob.shape == (4,)
    la.save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match="observe=T"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model, likelihood=Gaussian(observe=T))
    assert torch.equal(again.predict(case.x).joint_covariance(), la.predict(case.x).joint_covariance())


def test_measurements_that_do_not_fit() -> None:
    case, T, y = measured()
    for bad, data, message in (
        (T[:, :7], y, "columns"),
        (T, y[:, :3], "measurements"),
    ):
        with pytest.raises(ValueError, match=message):
            laplace_of(case.model, Gaussian(1.0, observe=bad)).fit([(case.x, data)], progress=False)
    la = LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="observed=True"):
        la.predict(case.x, observed=True)
    state = la.state_dict()
    with pytest.raises(ValueError, match="`observe`"):
        laplace_of(case.model, "regression", observe=T).load_state_dict(state)


def one_image(side: int = 16, num_angles: int = 5) -> tuple[inverse.Picture, Tensor, Any, Tensor]:
    """A network, its input, sums of its image along lines as a sparse matrix, and noisy sums."""
    model, z = inverse.picture(side)
    T = inverse.radon(side, num_angles)
    y = inverse.noisy(model(z).detach().flatten(1) @ torch.as_tensor(T.toarray()).mT)
    return model, z, T, y


def test_dual_samples_of_an_image_are_those_of_dense_algebra() -> None:
    """Matheron's rule with the draws of the fit, `ζ = θ⁰ + A⁻¹FᵀS⁻¹(ε − Fθ⁰)`, `F = TJ` and `S = FA⁻¹Fᵀ + I/b`."""
    model, z, T, y = one_image()
    a, b, num = 0.7, 30.0, 3
    la = LinearisedLaplace(
        model, Gaussian(b, observe=T), prior=IsotropicPrior(a), method=Dual(accuracy=1e-9), num_samples=num
    )
    la.fit([(z, y)], progress=False)
    J, D = reference.jacobian(model, z)[0], torch.as_tensor(T.toarray())
    D = D[D.any(1)]  # some cells beside the corners see nothing
    F, draws = D @ J, Draws(num, 0, Stream.SAMPLES)
    start = draws.prior(J.shape[1]).double() / a**0.5
    noise = draws.noise(len(D))(torch.arange(1))[:, 0].double() / b**0.5
    S = F @ F.mT / a + torch.eye(len(D)).double() / b
    expected = start + torch.linalg.solve(S, (noise - start @ F.mT).mT).mT @ F / a
    assert_close(la.samples_, expected, rtol=1e-6, atol=1e-6)
    assert_close(la.predict(z).deviations.flatten(1), expected @ J.mT, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["auto", "dual"])
def test_a_default_fit_of_measurements(method: str) -> None:
    """An epoch is a gradient of each measurement, so that the default budget pays for these methods."""
    model, z, T, y = one_image(8, 5)
    la = LinearisedLaplace(model, Gaussian(50.0, observe=T), method=method, num_samples=32)
    la.fit_hyperparameters([(z, y)], progress=False)
    exact = LinearisedLaplace(model, Gaussian(50.0, observe=T), method="exact", num_samples=32)
    exact.fit_hyperparameters([(z, y)], budget=None, progress=False)
    assert_close(la.prior_precision_, exact.prior_precision_, rtol=0.02, atol=0)
    assert_close(la.predict(z).deviations, exact.predict(z).deviations, rtol=0.02, atol=0.02)
    told = str(la)
    assert la.diagnose().epochs < 20
    assert ("rows of TΦ are held" if method == "auto" else "conjugate gradients in observation space") in told, told


def test_conjugate_gradients_take_over_where_memory_does_not_hold_the_gram_matrix() -> None:
    model, z, T, y = one_image(16, 12)
    for max_memory, method in ((4e6, "exact"), (2.2e6, "dual")):
        la = LinearisedLaplace(model, Gaussian(50.0, observe=T), method=Auto(max_memory=max_memory), num_samples=4)
        la.fit([(z, y)], progress=False)
        assert f"'{method}'" in str(la), str(la)


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
def test_a_budget_is_of_epochs_of_measurements_and_no_method_is_one_that_refuses_them(monkeypatch) -> None:
    monkeypatch.setattr(Budget, "FREE", 0.0)
    model, z, T, y = one_image(8, 5)
    for method in ("auto", "dual", "krylov"):
        for budget in (20.0, 0.5):
            la = LinearisedLaplace(model, Gaussian(50.0, observe=T), method=method, num_samples=4)
            la.fit_hyperparameters([(z, y)], budget=budget, progress=False)
            assert bool(la.predict(z).stddev.isfinite().all())
            assert '"kfac"' not in str(la.plan([(z, y)], budget=budget))
    # The unit: gradients of as many data as there are measurements.
    plan, of_data = la.plan([(z, y)]), LinearisedLaplace(model, "regression").plan([(z, model(z).detach())])
    assert_close(plan.epoch, of_data.epoch * 38, rtol=0.1, atol=0)
    many = la.plan([(z.expand(50, -1, -1, -1), y.expand(50, -1))])
    assert_close(many.epoch, of_data.epoch * 50, rtol=0.1, atol=0)


def test_the_standard_deviation_of_many_pixels_is_that_of_the_samples_and_covariances_are_exact() -> None:
    model, z, T, y = one_image(8, 5)
    la = LinearisedLaplace(model, Gaussian(50.0, observe=T), num_samples=32).fit([(z, y)], progress=False)
    before, pred = la.network.products["vjp"], la.predict(z)
    assert_close(pred.stddev, pred.deviations.square().mean(0).sqrt())
    products = la.network.products
    assert products["vjp"] - before <= 32 * 2  # the samples', once
    J, D = reference.jacobian(model, z)[0], torch.as_tensor(T.toarray())
    F = D @ J
    H = 50 * F.mT @ F + torch.eye(J.shape[1]).double()
    exact = J @ torch.linalg.solve(H, J.mT)
    assert_close(pred.joint_covariance(), exact, **CLOSE)
    assert_close(pred.covariance()[0], exact, **CLOSE)
    few = LinearisedLaplace(model, Gaussian(50.0, observe=T), num_samples=64).fit([(z, y)], progress=False)
    assert_close(few.predict(z).variance.flatten(), exact.diagonal(), **CLOSE)
    copied, again = pickle.loads(pickle.dumps((pred, la)))
    assert torch.equal(copied.stddev, pred.stddev)
    assert_close(again.predict(z).joint_covariance(), exact, **CLOSE)
