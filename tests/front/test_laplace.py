"""Fits and predictions through the public class, against dense algebra."""

import copy

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import fitted, laplace_of, loader
from problems import noisy, trained
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import SGD, ConvergenceWarning, Evidence, Gaussian, GPrior, LinearisedLaplace
from laplace_sampling.data.batches import read
from laplace_sampling.solvers.operator import make_dense


def posterior_covariance(la: LinearisedLaplace) -> Tensor:
    """`H⁻¹` of what was fitted, dense."""
    prior = la._fitted.posterior.prior
    model = la._fitted.fit.model
    ggn = model.ggn(model.network_outputs)
    return torch.linalg.inv(make_dense(ggn) + torch.diag(prior.diagonal().double()))


# Some of these networks, which are not trained, are best explained without any effect of their weights.
@pytest.mark.filterwarnings("ignore:`fit_hyperparameters` ended at one of:laplace_sampling.ConvergenceWarning")
def test_three_lines(case: Case) -> None:
    la = LinearisedLaplace(case.model, case.likelihood)
    assert la.fit_hyperparameters(loader(case), progress=False, tolerance=1.5) is la
    pred = la.predict(case.x)
    with torch.no_grad():  # attention takes another kernel with gradients
        out = read(case.model(case.x), len(case.x))[0]
    assert torch.equal(pred.outputs, out)
    assert pred.deviations.shape == (64, *out.shape)
    assert pred.log_prob(case.given[1]).shape == (len(case.x),)
    assert la.samples_.shape == (64, la.network.num_parameters)
    assert la.mode_.shape == (la.network.num_parameters,)
    assert len(la.history_) >= 1
    assert 0 < float(la.effective_dimension_.sum()) <= min(la.network.num_parameters, pred.outputs.numel())
    assert float(la.prior_precision_) == la.history_[-1].new_prior_precision[0]


@pytest.mark.parametrize("prior", ["g-prior", "isotropic", "layerwise"])
@pytest.mark.parametrize("linear_model", ["affine", "homogeneous"])
def test_predictive_covariance_is_the_dense_one(prior: str, linear_model: str) -> None:
    case, num = make_case("classification"), 2000
    la = fitted(case, prior=prior, linear_model=linear_model, prior_precision=0.5, num_samples=num)
    J = reference.jacobian(case.model, case.x[:3]).flatten(0, 1)
    expected = J @ posterior_covariance(la) @ J.T
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / num).sqrt()
    assert ((la.predict(case.x[:3]).joint_covariance() - expected).abs() < 5 * error).all()
    # And the curvature is that at the outputs of the network.
    J = reference.jacobian(case.model, case.x)
    f = case.model(case.x).detach()
    B = reference.curvature(case.likelihood, f, case.y)
    H = reference.ggn(J, B) + torch.diag(la._fitted.posterior.prior.diagonal())
    assert_close(torch.linalg.inv(H), posterior_covariance(la), rtol=1e-4, atol=1e-6)


def test_samples_are_joint_over_inputs() -> None:
    """One weight sample, one function: row k at x does not depend on what else is asked for."""
    case = make_case("regression")
    la = fitted(case)
    together = la.predict(case.x).samples
    apart = torch.cat([la.predict(x[None]).samples for x in case.x], dim=1)
    assert_close(together, apart)
    assert_close(la.predict(case.x, num_samples=5).samples, together[:5])


@pytest.mark.parametrize("method", ["exact", "sgd"])
def test_the_same_seed_gives_the_same_samples_whatever_the_batch_size(method: str) -> None:
    case = make_case("classification_many_data")
    solver = SGD(epochs=1, min_steps=10, mode_epochs=2, batch_size=7, tolerance=0.9) if method == "sgd" else None
    settings = {"method": method, "solver": solver, "num_samples": 4}

    def run(batch_size: int, seed: int = 0, **kwargs) -> LinearisedLaplace:
        la = laplace_of(case.model, "classification", seed=seed, **settings)
        options = {"criterion": Evidence(max_steps=3), "tolerance": 1.0, "progress": False}
        return la.fit_hyperparameters(loader(case, batch_size, **kwargs), **options)

    first = run(10)
    for other in (run(4), run(25), run(10, shuffle=True)):
        assert_close(other.samples_, first.samples_, rtol=1e-6, atol=1e-8)
        assert_close(other.prior_precision_, first.prior_precision_, rtol=1e-8, atol=0)
    assert not torch.allclose(run(10, seed=1).samples_, first.samples_)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(run(10).samples_, first.samples_)
    finally:
        torch.set_default_dtype(torch.float32)


def test_new_samples_are_new_and_of_the_posterior() -> None:
    case = make_case("classification_many_data")
    la = fitted(case)
    first, second = la.sample(3000), la.sample(3)
    assert second.shape == (3, la.network.num_parameters)
    assert not torch.allclose(first[:3], second)
    assert not torch.allclose(first[:3], la.samples_[:3])
    white = first @ torch.linalg.cholesky(torch.linalg.inv(posterior_covariance(la)))
    error = white.T @ white / 3000 - torch.eye(white.shape[1]).double()
    assert (error.abs() < 5 * (2 / 3000) ** 0.5).all()


def test_g_prior_is_invariant_to_the_scale_before_a_layer_norm() -> None:
    case = make_case("layer_norm")
    case.model[1].eps = 0.0  # exactly invariant only without it
    variances = {}
    for prior in ("g-prior", "isotropic"):
        for factor in (1.0, 0.1, 10.0):
            scaled = copy.deepcopy(case.model)
            with torch.no_grad():
                scaled[0].weight *= factor
                scaled[0].bias *= factor
            assert_close(scaled(case.x), case.model(case.x))
            la = LinearisedLaplace(scaled, "classification", prior=prior).fit(loader(case), progress=False)
            J = reference.jacobian(scaled, case.x).flatten(0, 1)
            variances[prior, factor] = (J @ posterior_covariance(la) * J).sum(1)
    for factor in (0.1, 10.0):
        assert_close(variances["g-prior", factor], variances["g-prior", 1.0], rtol=1e-6, atol=0)
        assert not torch.allclose(variances["isotropic", factor], variances["isotropic", 1.0], rtol=0.1)


def test_prior_noise_and_starting_values_are_used() -> None:
    case = make_case("regression")
    la = fitted(case, prior=GPrior(floor=0.5), prior_precision=3.0)
    assert la.prior_precision_.tolist() == [3.0]
    assert la.noise_precision_ == 2.5
    assert la._fitted.posterior.prior.num_floored > 0
    named = laplace_of(case.model, "regression", noise_precision=7.0).fit(loader(case), progress=False)
    assert named.noise_precision_ == 7.0
    assert_close(named.predict(case.x).noise_variance, torch.tensor(1 / 7.0).double())
    assert fitted(make_case("classification")).noise_precision_ is None


def test_the_posterior_is_drawn_at_the_tuned_hyperparameters() -> None:
    case, num = noisy(60)[0], 2000
    la = laplace_of(case.model, "regression", num_samples=num, noise_precision=50.0, prior="isotropic")
    la.fit_hyperparameters(loader(case), progress=False, criterion=Evidence(max_steps=200))
    alpha, b = float(la.prior_precision_), float(la.noise_precision_)
    assert alpha == la.history_[-1].new_prior_precision[0]
    assert la.history_[-1].noise_precision == [b]
    assert b < 25
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    expected = J @ torch.linalg.inv(b * J.T @ J + alpha * torch.eye(J.shape[1]).double()) @ J.T
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / num).sqrt()
    assert ((la.predict(case.x).joint_covariance() - expected).abs() < 5 * error).all()


@pytest.mark.parametrize("num_data", [1, 2, 12])
@pytest.mark.parametrize("method", ["exact", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
# The network is not trained: whether its error bars leave anything of what it knows is a matter of rounding.
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_very_few_data_and_samples_do_not_blow_up(num_data: int, method: str) -> None:
    case = make_case("regression_many_data")
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    solver = SGD(epochs=2, min_steps=30, mode_epochs=4, finish_passes=20) if method == "sgd" else None
    la = laplace_of(
        model, "regression", prior="layerwise", method=method, noise_precision=100.0, solver=solver, num_samples=4
    )
    data = [(case.x[:num_data], case.y[:num_data])]
    la.fit_hyperparameters(data, criterion=Evidence(num_samples=4, max_steps=4), progress=False)
    assert all(0 < g <= la.network.num_parameters for step in la.history_ for g in step.effective_dimension)
    assert la.predict(case.x).stddev.isfinite().all()
    if num_data > 2 and method == "sgd":  # fewer are interpolated, without noise
        assert 1e-9 < float(la.noise_precision_) < 1e6


def test_targets_that_are_zero_end_at_a_bound_and_not_in_an_error() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, Gaussian(1.0, learn=False), method="krylov", linear_model="homogeneous")
    with pytest.warns(ConvergenceWarning, match="upper"):
        la.fit_hyperparameters([(case.x, torch.zeros_like(case.given[1]))], progress=False)


def test_float32_networks() -> None:
    case = make_case("conv_batch_norm")
    model = copy.deepcopy(case.model).float()
    la = LinearisedLaplace(model, "classification")
    la.fit([(case.x.float(), case.y)], progress=False)
    double = fitted(case)
    pred = la.predict(case.x.float())
    assert pred.samples.dtype == la.samples_.dtype == torch.float32
    assert_close(pred.stddev.double(), double.predict(case.x).stddev, rtol=1e-3, atol=1e-4)


def test_evidence_is_balanced_at_its_optimum() -> None:
    case = trained(40)
    la = laplace_of(case.model, "regression", method="krylov")
    evidence = la.fit_hyperparameters(case.batches, progress=False).log_marginal_likelihood()
    b, outputs = float(la.noise_precision_), case.model(case.x).detach()
    norm, num = float(la.prior_precision_) * float(la.mode_.square().sum()), case.y.numel()
    assert b * float((outputs - case.y).square().sum()) + norm == pytest.approx(num, rel=0.05)
    assert evidence.data_fit + evidence.complexity == pytest.approx(-float(evidence))
    curves = la.evidence_path(decades=1, num=41)
    assert int(curves.log_marginal_likelihood.argmax()) in (19, 20, 21)
    assert curves.at == pytest.approx(float(la.prior_precision_))


@pytest.mark.parametrize("method", ["exact", "krylov", "dual"])
def test_noise_explains_what_the_network_leaves(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(80, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 1).double()  # off the minimum of its loss
    with torch.no_grad():
        model.weight.fill_(0.8)
        model.bias.zero_()
    settings = {"prior": "isotropic", "method": method}
    la = laplace_of(model, "regression", **settings)
    la.fit_hyperparameters([(x, y)], criterion=Evidence(max_steps=30, num_samples=64), progress=False)
    left = (la.noise_precision_ * (y - model(x).detach()).square().sum()).item()
    # γ of EM's samples has a noise of its own.
    assert left == pytest.approx(80 - float(la.effective_dimension_.sum()), abs=1e-6 if method == "exact" else 2.0)
