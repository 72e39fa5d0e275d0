"""Noise of each datum, against dense algebra."""

import pytest
import reference
import torch
from cases import make_case
from flat_settings import fit_case, laplace_of
from problems import CLOSE, SAMPLES, trained
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Data, Gaussian


@pytest.mark.parametrize("method", ["exact", "dual", "krylov"])
@pytest.mark.parametrize("name", ["regression", "regression_per_output", "regression_many_data"])
@pytest.mark.parametrize("per_output", [False, True])
def test_noise_variances_of_each_datum_are_those_of_dense_algebra(name: str, method: str, per_output: bool) -> None:
    case = make_case(name)
    R = torch.rand(case.y.shape if per_output else case.y.shape[:1], generator=torch.Generator().manual_seed(1)) + 0.5
    la = fit_case(case, method, noise_variances=R, prior="isotropic")
    J = reference.jacobian(case.model, case.x)
    noise = R.double().reshape(len(R), -1).expand(J.shape[:2]) / torch.as_tensor(case.likelihood.noise_precision)
    H = torch.einsum("ncp,nc,ncq->pq", J, 1 / noise, J) + 0.7 * torch.eye(J.shape[2]).double()
    offset = case.model(case.x).detach().reshape(noise.shape) - J @ la.network.weights
    residual = case.y.reshape(noise.shape) - offset
    assert_close(la.mode_, torch.linalg.solve(H, torch.einsum("ncp,nc->p", J, residual / noise)), **SAMPLES)
    flat = J.flatten(0, 1)
    targets = torch.distributions.MultivariateNormal(
        offset.flatten(), flat @ flat.T / 0.7 + torch.diag(noise.flatten())
    )
    evidence = la.log_marginal_likelihood()
    assert_close(
        float(evidence), float(targets.log_prob(case.y.reshape(-1))), rtol=1e-4 if method == "krylov" else 1e-6, atol=0
    )
    assert_close(evidence.value, -evidence.data_fit - evidence.complexity)
    assert_close(
        la.evidence_path(1, 3).log_marginal_likelihood[1], torch.tensor(float(evidence)).double(), rtol=1e-3, atol=0
    )
    if method == "exact":
        assert_close(la.predict(case.x).joint_covariance(), flat @ torch.linalg.solve(H, flat.T), **CLOSE)


@pytest.mark.parametrize("method", ["exact", "dual"])
def test_a_shuffled_loader_keeps_the_order_of_noise_variances(method: str) -> None:
    case = trained()
    R = torch.linspace(0.5, 2, len(case.y)).double()
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=7, shuffle=True)
    plain, shuffled = (fit_case(case, method, noise_variances=R, data=data) for data in (case.batches, loader))
    assert_close(shuffled.samples_, plain.samples_, rtol=1e-6, atol=1e-8)
    assert_close(float(shuffled.log_marginal_likelihood()), float(plain.log_marginal_likelihood()))


def test_known_and_learnt_noise_variances() -> None:
    case = trained()
    R = torch.linspace(0.02, 0.08, len(case.y)).double()
    settings = {"method": "exact", "prior": "isotropic", "num_samples": 4}
    known = laplace_of(case.model, Gaussian(1.0, learn=False), **settings)
    known.fit_hyperparameters(case.batches, data=Data(noise_variances=R), progress=False)
    assert known.noise_precision_ == 1.0
    seen: list = []
    learnt = laplace_of(case.model, "regression", **settings)
    learnt.fit_hyperparameters(case.batches, data=Data(noise_variances=10 * R), progress=False, callback=seen.append)
    tenth = laplace_of(case.model, "regression", **settings)
    tenth.fit_hyperparameters(case.batches, data=Data(noise_variances=R), progress=False)
    # Units of the given variances are divided out by the common factor.
    assert_close(learnt.noise_precision_, 10 * tenth.noise_precision_, rtol=1e-6, atol=0)
    assert_close(float(learnt.log_marginal_likelihood()), float(tenth.log_marginal_likelihood()), **CLOSE)
    assert seen == learnt.history_
    assert learnt.history_[0].loss == pytest.approx(tenth.history_[0].loss)
    assert learnt.history_[0].network_loss == pytest.approx(tenth.history_[0].network_loss)
    pred = known.predict(case.x, noise_variances=R)
    assert_close(pred.noise_variance, R[:, None])
    total = torch.distributions.Normal(pred.mean, (pred.variance + R[:, None]).sqrt())
    assert_close(pred.log_prob(case.y), total.log_prob(case.y)[:, 0])
    assert_close(known.predict(case.x).noise_variance, torch.tensor(1.0).double())
