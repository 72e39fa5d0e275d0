"""Measurements of the outputs, against dense algebra."""

import warnings

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import in_observation_space, laplace_of
from problems import CLOSE
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Gaussian, LinearisedLaplace
from laplace_sampling.gp.linear_operators import to_linear_operator


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


def test_hyperparameters_from_measurements_and_a_reload(tmp_path) -> None:
    case, T, y = measured()
    la = laplace_of(case.model, "regression", method="exact", observe=T, num_samples=4)
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
            laplace_of(case.model, "regression", observe=bad).fit([(case.x, data)], progress=False)
    la = LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="observed=True"):
        la.predict(case.x, observed=True)
    state = la.state_dict()
    with pytest.raises(ValueError, match="`observe`"):
        laplace_of(case.model, "regression", observe=T).load_state_dict(state)
