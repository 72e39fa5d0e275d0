"""Observation space through the public class: exact and dual fits, unequal noise, measurements, leave-one-out."""

import warnings
from functools import partial

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from laplace_sampling.methods.plan import make_plan
from problems import trained
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import ConvergenceWarning, DualCG, Gaussian, LeaveOneOut, LinearisedLaplace
from laplace_sampling.gp.linear_operators import to_linear_operator
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.methods import tasks

CLOSE = {"rtol": 1e-6, "atol": 1e-8}
SAMPLES = {"rtol": 1e-5, "atol": 1e-7}
REGRESSIONS = ["regression", "regression_per_output", "regression_flat", "image_regression"]
# Noise and prior of one size, so that the posterior is neither of them.
FIXED = {"prior_precision": 0.7, "num_samples": 4}


def fit(case: Case, method: str, **settings) -> LinearisedLaplace:
    data = settings.pop("data", case.batches)
    R = settings.pop("noise_variances", None)
    la = laplace_of(case.model, settings.pop("likelihood", case.likelihood), method=method, **settings)
    return la.fit(data, noise_variances=R, tolerance=1e-9, progress=False)


@pytest.fixture
def in_weight_space(monkeypatch):
    """Make the exact method work in weight space."""
    return lambda: monkeypatch.setattr(tasks, "make_plan", lambda *a, **kw: make_plan(*a, **{**kw, "gram": False}))


# Agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["affine", "homogeneous"])
@pytest.mark.parametrize("prior", ["isotropic", "g-prior", "layerwise"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_all_spaces_agree(name: str, prior: str, kind: str, in_weight_space) -> None:
    case = make_case(name)
    settings = {**FIXED, "prior": prior, "linear_model": kind}
    gram, dual = (fit(case, method, **settings) for method in ("exact", "dual"))
    in_weight_space()
    weights = fit(case, "exact", **settings)
    small = gram._fitted.fit.model.offset.numel() < gram.network.num_parameters
    assert in_observation_space(gram) == (small and prior != "layerwise")
    assert in_weights_space(weights)
    x = case.x[:3] * 1.5 + 0.2
    a, b, c = (la.predict(x) for la in (weights, gram, dual))
    for pred, la in ((b, gram), (c, dual)):
        assert torch.equal(pred.mean, a.mean)
        assert_close(pred.samples, a.samples, **SAMPLES)
        assert_close(la.samples_, weights.samples_, **SAMPLES)
        assert_close(la.mode_, weights.mode_, **SAMPLES)
        assert_close(la.sample(2), weights.sample(2), **SAMPLES)
        weights._fitted.num_draws -= 1
        one, other = la.log_marginal_likelihood(), weights.log_marginal_likelihood()
        assert one.exact
        assert one.standard_error == 0
        assert_close(float(one), float(other), **CLOSE)
        curves, expected = la.evidence_path(2, 5), weights.evidence_path(2, 5)
        for field in ("effective_dimension", "log_marginal_likelihood", "mode_norm", "data_fit"):
            assert_close(getattr(curves, field), getattr(expected, field), **CLOSE)
    assert_close(gram.effective_dimension_, weights.effective_dimension_, **CLOSE)
    assert_close(b.covariance(), a.covariance(), **CLOSE)
    assert_close(b.joint_covariance(), a.joint_covariance(), **CLOSE)
    assert_close(b.stddev, a.stddev, **CLOSE)
    assert_close(b.log_prob(case.y[:3]), a.log_prob(case.y[:3]), **CLOSE)
    one, other = gram.leave_one_out(), weights.leave_one_out()
    assert_close(one.log_prob, other.log_prob, **CLOSE)
    assert_close(one.mean, other.mean, **CLOSE)
    assert_close(one.covariance, other.covariance, **CLOSE)


@pytest.mark.parametrize("name", ["regression", "classification", "image_regression", "regression_many_data"])
def test_exact_covariances_are_those_of_dense_algebra_without_sampling_noise(name: str) -> None:
    case = make_case(name)
    la = fit(case, "exact", **FIXED)
    J = reference.jacobian(case.model, case.x)
    B = reference.curvature(case.likelihood, la._fitted.fit.mode_outputs, case.y)
    H = reference.ggn(J, B) + torch.diag(la._fitted.posterior.prior.diagonal())
    flat = J.flatten(0, 1)
    expected = flat @ torch.linalg.solve(H, flat.T)
    pred = la.predict(case.x)
    assert_close(pred.joint_covariance(), expected, **CLOSE)
    assert_close(pred.variance.flatten(), expected.diagonal(), **CLOSE)
    assert_close(pred.covariance()[1], expected.unflatten(0, (len(J), -1)).unflatten(2, (len(J), -1))[1, :, 1], **CLOSE)
    if name == "classification":
        assert_close(pred.probs_with("bridge").sum(-1), torch.ones(len(J)).double())


@pytest.mark.parametrize("hessian_at", ["network", "mode"])
@pytest.mark.parametrize("kind", ["affine", "homogeneous"])
@pytest.mark.parametrize("learn", [True, False])
def test_hyperparameters_are_of_largest_evidence_to_rounding(learn: bool, kind: str, hessian_at: str) -> None:
    case = trained()
    likelihood = Gaussian(20.0, learn=learn)
    settings = {"prior": "isotropic", "linear_model": kind, "hessian_at": hessian_at, "num_samples": 4}
    settings["noise_at"] = "mode"
    la = laplace_of(case.model, likelihood, method="exact", **settings)
    seen: list = []
    la.fit_hyperparameters(case.batches, progress=False, callback=seen.append)
    assert in_observation_space(la)
    assert seen == la.history_
    assert la.converged_
    alpha, b = float(la.prior_precision_), float(la.noise_precision_)
    assert (b == 20.0) == (not learn)
    best = float(la.log_marginal_likelihood())
    for change in ((0.01, 0), (-0.01, 0), *(((0, 0.01), (0, -0.01)) if learn else ())):
        near = laplace_of(
            case.model,
            "regression",
            method="exact",
            prior_precision=alpha * torch.tensor(change[0]).exp().item(),
            noise_precision=b * torch.tensor(change[1]).exp().item(),
            **settings,
        ).fit(case.batches, progress=False)
        assert float(near.log_marginal_likelihood()) < best
    assert la.log_marginal_likelihood().balance == pytest.approx(1, abs=1e-9) or not learn


def test_exact_hyperparameters_agree_between_the_spaces(in_weight_space) -> None:
    case = trained()
    fits = []
    for _ in range(2):
        la = LinearisedLaplace(case.model, "regression", method="exact", prior="isotropic", num_samples=4)
        fits.append(la.fit_hyperparameters(case.batches, progress=False))
        in_weight_space()
    gram, weights = fits
    assert in_observation_space(gram)
    assert in_weights_space(weights)
    assert_close(gram.prior_precision_, weights.prior_precision_, rtol=1e-6, atol=0)
    assert_close(gram.noise_precision_, weights.noise_precision_, rtol=1e-6, atol=0)
    assert_close(gram.effective_dimension_, weights.effective_dimension_, **CLOSE)
    assert_close(gram.samples_, weights.samples_, **SAMPLES)


def test_noise_of_each_output_is_learnt_in_observation_space() -> None:
    case = make_case("regression_per_output")
    settings = {"method": "exact", "prior": "isotropic", "noise_at": "mode", "num_samples": 4}
    la = laplace_of(case.model, Gaussian(torch.ones(3)), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the network is not trained
        la.fit_hyperparameters(case.batches, progress=False)
    assert in_observation_space(la)
    b = la.noise_precision_
    assert b.shape == (3,)
    assert len(set(b.tolist())) == 3
    best = float(la.log_marginal_likelihood())
    alpha = float(la.prior_precision_)
    for c in range(3):
        for factor in (0.98, 1.02):
            near = b.clone()
            near[c] *= factor
            other = laplace_of(
                case.model, Gaussian(near), method="exact", prior="isotropic", prior_precision=alpha, num_samples=4
            )
            assert float(other.fit(case.batches, progress=False).log_marginal_likelihood()) < best


def test_em_in_the_dual_comes_close_to_the_optimum() -> None:
    case = trained()
    settings = {"prior": "isotropic", "num_samples": 4, "noise_precision": 10.0, "noise_at": "mode"}
    exact = laplace_of(case.model, "regression", method="exact", **settings)
    exact.fit_hyperparameters(case.batches, progress=False)
    dual = laplace_of(case.model, "regression", method="dual", **settings)
    dual.fit_hyperparameters(case.batches, progress=False, max_steps=5, num_samples=64)
    assert dual.converged_
    # γ from 64 samples has a relative standard error of at most √(2/64γ)
    gamma = float(exact.effective_dimension_)
    allowed = 6 * (2 / (64 * gamma)) ** 0.5
    assert abs(float((dual.prior_precision_ / exact.prior_precision_).log())) < allowed
    assert abs(float((dual.noise_precision_ / exact.noise_precision_).log())) < allowed
    assert dual.samples_.shape == exact.samples_.shape
    assert dual.samples_.dtype == exact.samples_.dtype
    assert "'dual': as asked for" in repr(dual)
    # The search starts where the leading part of the kernel has its optimum; here that is all of it.
    assert dual.history_[0].prior_precision[0] == pytest.approx(float(exact.prior_precision_), rel=1e-3)
    assert dual.history_[0].noise_precision[0] == pytest.approx(float(exact.noise_precision_), rel=1e-3)
    fixed = LinearisedLaplace(case.model, Gaussian(10.0, learn=False), method="dual", prior="isotropic", num_samples=4)
    fixed.fit_hyperparameters(case.batches, progress=False, max_steps=20)
    assert fixed.noise_precision_ == 10.0


def test_a_poor_preconditioner_of_the_dual_costs_no_accuracy() -> None:
    case = trained()
    settings = {"method": "dual", "prior": "isotropic", "num_samples": 4}
    poor, whole = (
        laplace_of(case.model, "regression", solver=DualCG(rank=rank), **settings).fit_hyperparameters(
            case.batches, progress=False, max_steps=5
        )
        for rank in (4, 24)
    )
    assert poor.converged_
    assert_close(poor.prior_precision_, whole.prior_precision_, rtol=0.06, atol=0)  # EM stops at 0.03 in log α


def test_print_tells_the_space_and_why() -> None:
    case = trained()
    text = repr(fit(case, "exact", **FIXED))
    assert "'exact': as asked for, in the space of the observations (P = 37 weights, N·C = 24 observations)" in text
    assert "in the space of the weights (P = 3 weights" in repr(fit(make_case("regression_many_data"), "exact"))


def test_float32_networks_in_observation_space() -> None:
    case = trained()
    expected = fit(case, "exact", prior="isotropic", **FIXED).predict(case.x)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    model.load_state_dict({name: value.float() for name, value in case.model.state_dict().items()})
    data = [(case.x.float(), case.y.float())]
    for method in ("exact", "dual"):
        la = laplace_of(model, case.likelihood, method=method, prior="isotropic", **FIXED)
        la.fit(data, progress=False)
        pred = la.predict(case.x.float())
        assert la.converged_
        assert la.samples_.dtype == pred.stddev.dtype == pred.log_prob(case.y.float()).dtype == torch.float32
        assert_close(pred.samples.double(), expected.samples, rtol=1e-2, atol=1e-2)
        if method == "exact":
            # The Jacobian is that of the network in float64.
            assert_close(pred.stddev.double(), expected.stddev, rtol=1e-6, atol=1e-6)
        assert model[0].weight.dtype == torch.float32


class OwnDtype(nn.Linear):
    """Computes in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float(), self.bias.float())


def test_a_network_that_computes_in_float32_only_is_taken_as_it_is() -> None:
    x = torch.linspace(-1, 1, 5)[:, None].repeat(1, 8)
    la = LinearisedLaplace(OwnDtype(8, 1), "regression", method="exact", prior="isotropic").fit([(x, x[:, :1])])
    assert "in the space of the observations" in repr(la)
    plain = nn.Linear(8, 1).double()
    plain.load_state_dict({name: value.double() for name, value in la.network.module.state_dict().items()})
    other = LinearisedLaplace(plain, "regression", method="exact", prior="isotropic").fit(
        [(x.double(), x[:, :1].double())]
    )
    assert_close(la.predict(x).stddev.double(), other.predict(x.double()).stddev, rtol=1e-3, atol=1e-4)


# Choice -----------------------------------------------------------------------------------------------------------


def test_auto_takes_observation_space_where_it_is_cheaper() -> None:
    def features(num_data: int, size: int) -> DenseFeatures:
        return DenseFeatures(torch.zeros(1, 1, 1).expand(num_data, 1, size))

    plan = make_plan("auto", features(900, 10**6), 16, 4e9, gram=True, dual=True)
    assert plan.in_observation_space
    assert "a matrix of 900 rows is cheap, in the space of the observations" in plan.reason
    assert not make_plan("auto", features(900, 10**6), 16, 4e9).in_observation_space
    assert make_plan("auto", features(900, 500), 16, 4e9, gram=True, dual=True).holds_jacobian
    # Memory for samples, but for no Krylov basis.
    size = 10**6
    little = 4 * size * (16 + 60)
    plan = make_plan("auto", features(10_000, size), 16, little, gram=True, dual=True)
    assert plan.method == "dual"
    assert "memory holds no Krylov basis of weights, but vectors of N·C = 10000 observations" in plan.reason
    assert make_plan("auto", features(10_000, size), 16, little, gram=True).method == "krylov"


def test_auto_is_exact_on_small_regressions() -> None:
    la = fit(trained(), "auto")
    assert in_observation_space(la)


# Noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "dual", "krylov"])
@pytest.mark.parametrize("name", ["regression", "regression_per_output", "regression_many_data"])
@pytest.mark.parametrize("per_output", [False, True])
def test_noise_variances_of_each_datum_are_those_of_dense_algebra(name: str, method: str, per_output: bool) -> None:
    case = make_case(name)
    R = torch.rand(case.y.shape if per_output else case.y.shape[:1], generator=torch.Generator().manual_seed(1)) + 0.5
    la = fit(case, method, noise_variances=R, prior="isotropic", **FIXED)
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
    plain, shuffled = (fit(case, method, noise_variances=R, data=data, **FIXED) for data in (case.batches, loader))
    assert_close(shuffled.samples_, plain.samples_, rtol=1e-6, atol=1e-8)
    assert_close(float(shuffled.log_marginal_likelihood()), float(plain.log_marginal_likelihood()))


def test_known_and_learnt_noise_variances() -> None:
    case = trained()
    R = torch.linspace(0.02, 0.08, len(case.y)).double()
    settings = {"method": "exact", "prior": "isotropic", "noise_at": "mode", "num_samples": 4}
    known = laplace_of(case.model, Gaussian(1.0, learn=False), **settings)
    known.fit_hyperparameters(case.batches, noise_variances=R, progress=False)
    assert known.noise_precision_ == 1.0
    seen: list = []
    learnt = laplace_of(case.model, "regression", **settings)
    learnt.fit_hyperparameters(case.batches, noise_variances=10 * R, progress=False, callback=seen.append)
    tenth = laplace_of(case.model, "regression", **settings)
    tenth.fit_hyperparameters(case.batches, noise_variances=R, progress=False)
    # Units of the given variances are divided out by the common factor.
    assert_close(learnt.noise_precision_, 10 * tenth.noise_precision_, rtol=1e-6, atol=0)
    assert_close(float(learnt.log_marginal_likelihood()), float(tenth.log_marginal_likelihood()), **CLOSE)
    assert float(tenth.log_marginal_likelihood()) >= float(known.log_marginal_likelihood())
    assert seen == learnt.history_
    assert learnt.history_[0].loss == pytest.approx(tenth.history_[0].loss)
    assert learnt.history_[0].network_loss == pytest.approx(tenth.history_[0].network_loss)
    pred = known.predict(case.x, noise_variances=R)
    assert_close(pred.noise_variance, R[:, None])
    total = torch.distributions.Normal(pred.mean, (pred.variance + R[:, None]).sqrt())
    assert_close(pred.log_prob(case.y), total.log_prob(case.y)[:, 0])
    assert_close(known.predict(case.x).noise_variance, torch.tensor(1.0).double())


def test_noise_variances_that_do_not_fit() -> None:
    case = trained()
    la = LinearisedLaplace(case.model, "regression")
    with pytest.raises(ValueError, match=r"one entry a datum, \[24\], or one an output, \[24, 1\].*have shape \[3\]"):
        la.fit(case.batches, noise_variances=torch.ones(3), progress=False)
    with pytest.raises(ValueError, match="`noise_variances` must be positive and finite"):
        la.fit_hyperparameters(case.batches, noise_variances=torch.zeros(24), progress=False)
    classes = make_case("classification")
    la = LinearisedLaplace(classes.model, "classification")
    with pytest.raises(ValueError, match="`noise_variances` are of a regression, but the likelihood is 'class"):
        la.fit(classes.batches, noise_variances=torch.ones(8), progress=False)
    la.fit(classes.batches, progress=False)
    with pytest.raises(ValueError, match="and `noise_variances` a regression"):
        la.predict(classes.x, noise_variances=torch.ones(8))


# Leave-one-out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "regression_per_output"])
@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_leave_one_out_is_a_fit_without_the_datum(name: str, heteroscedastic: bool) -> None:
    case = make_case(name)
    num = len(case.y)
    R = torch.linspace(0.5, 2, num).double() if heteroscedastic else torch.ones(num).double()
    settings = {**FIXED, "prior": "isotropic", "linear_model": "homogeneous"}
    la = fit(case, "exact", noise_variances=R if heteroscedastic else None, **settings)
    found = la.leave_one_out()
    assert isinstance(found, LeaveOneOut)
    assert found.log_prob.shape == (num,)
    J = reference.jacobian(case.model, case.x)
    for i in (0, num - 1):
        rest = [j for j in range(num) if j != i]
        without = laplace_of(case.model, case.likelihood, method="exact", **settings)
        without.fit([(case.x[rest], case.y[rest])], noise_variances=R[rest], progress=False)
        noise = (R[i] / torch.as_tensor(case.likelihood.noise_precision)).expand(J.shape[1])
        covariance = without.predict(case.x[i : i + 1]).covariance()[0] + torch.diag(noise)
        mean = J[i] @ without.mode_
        assert_close(found.mean[i], mean, **SAMPLES)
        assert_close(found.covariance[i], covariance, **SAMPLES)
        expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(case.y[i].reshape(-1))
        assert_close(found.log_prob[i], expected, **SAMPLES)


def test_leave_one_out_of_classes_and_where_it_is_not_known(tmp_path) -> None:
    case = make_case("classification")
    found = fit(case, "exact", **FIXED).leave_one_out()
    assert found.log_prob.shape == (8,)
    assert (found.log_prob < 0).all()
    la = fit(case, "krylov", **FIXED)
    with pytest.raises(
        ValueError, match='needs the covariances of the exact method, but the fit is by method="krylov"'
    ):
        la.leave_one_out()
    with pytest.raises(ValueError, match='but the fit is by method="dual": use method="exact"'):
        fit(trained(), "dual", **FIXED).leave_one_out()


# Measurements -----------------------------------------------------------------------------------------------------


def measured() -> tuple[Case, Tensor, Tensor]:
    """An image network, five measurements of each image, and their matrix."""
    case, g = make_case("image_regression"), torch.Generator().manual_seed(0)
    T = torch.randn(5, 18, generator=g).double()
    y = case.model(case.x).detach().flatten(1) @ T.T + 0.5 * torch.randn(4, 5, generator=g).double()
    return case, T, y


@pytest.mark.parametrize("method", ["exact", "dual", "krylov"])
@pytest.mark.parametrize("form", ["matrix", "operator", "functions"])
def test_measurements_are_those_of_dense_algebra(method: str, form: str) -> None:
    case, T, y = measured()
    given = {"matrix": T, "operator": to_linear_operator(T), "functions": (lambda f: T @ f, lambda u: T.T @ u)}[form]
    la = laplace_of(
        case.model, Gaussian(4.0), method=method, prior="isotropic", observe=given, **{**FIXED, "num_samples": 2000}
    )
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
    with pytest.raises(ValueError, match=r"noise is that of the measurements.*observed=True"):
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
    with pytest.raises(ValueError, match=r"was fitted to measurements .*: give T as `observe=T`"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model, observe=T)
    assert torch.equal(again.predict(case.x).joint_covariance(), la.predict(case.x).joint_covariance())


def test_measurements_that_do_not_fit() -> None:
    case, T, y = measured()
    for bad, data, message in (
        (T[:, :7], y, "`observe=T` has 7 columns, but the model gives 18 outputs a datum"),
        (T, y[:, :3], r"must be measurements of shape \[4, 5\], but have shape \[4, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            laplace_of(case.model, "regression", observe=bad).fit([(case.x, data)], progress=False)
    with pytest.raises(ValueError, match=r"observe=T.*is for regression .*the likelihood is 'classification'"):
        laplace_of(make_case("classification").model, "classification", observe=T)
    la = LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match=r"`predict\(observed=True\)` needs `observe=T` in the constructor"):
        la.predict(case.x, observed=True)
    state = la.state_dict()
    with pytest.raises(ValueError, match=r"not fitted to measurements .*: leave out `observe`"):
        laplace_of(case.model, "regression", observe=T).load_state_dict(state)


# Keeping it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "classification", "image_regression"])
@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_a_loaded_exact_posterior_is_as_exact(name: str, heteroscedastic: bool, tmp_path) -> None:
    case = make_case(name)
    if heteroscedastic and not isinstance(case.likelihood, Gaussian):
        return
    R = torch.linspace(0.5, 2, len(case.y)).double() if heteroscedastic else None
    la = fit(case, "exact", noise_variances=R, **FIXED)
    la.save(tmp_path / "la.pt")
    assert all(isinstance(value, Tensor) for value in torch.load(tmp_path / "la.pt", weights_only=True).values())
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    x = case.x[:3] + 0.1
    assert torch.equal(again.predict(x).joint_covariance(), la.predict(x).joint_covariance())
    assert torch.equal(again.predict(x).variance, la.predict(x).variance)
    assert torch.equal(again.predict(x).log_prob(case.y[:3]), la.predict(x).log_prob(case.y[:3]))
    assert again.state_dict().keys() == la.state_dict().keys()
    if in_observation_space(la):  # the training data are part of it
        assert_close(again.leave_one_out().log_prob, la.leave_one_out().log_prob)
        assert float(again.log_marginal_likelihood()) == pytest.approx(float(la.log_marginal_likelihood()))
        assert_close(again.sample(2), la.sample(2))


def test_solver_settings_of_the_dual_survive_a_reload(tmp_path) -> None:
    case = trained()
    settings = DualCG(rank=5, tolerance=1e-6, max_iterations=77)
    la = fit(case, "dual", solver=settings, **FIXED)
    assert la._fitted.fit.solver.rank == 5
    assert la._fitted.fit.solver.held is not None
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert again.solver == settings
    assert torch.equal(again.predict(case.x).samples, la.predict(case.x).samples)


def test_settings_of_the_dual_that_are_not_given_are_chosen() -> None:
    case = trained()
    plain, given = (fit(case, "dual", solver=s, **FIXED)._fitted.fit.solver for s in (None, DualCG(max_iterations=500)))
    assert given.rank == plain.rank == len(case.x)
    assert given.accuracy == plain.accuracy
    tight = fit(case, "dual", solver=DualCG(tolerance=1e-9, rank=0), **FIXED)
    assert tight._fitted.fit.solver.rank == 0
    exact = fit(case, "exact", **FIXED)
    assert_close(tight.samples_, exact.samples_, rtol=1e-7, atol=1e-9)


def test_covariances_asked_for_after_the_network_changed() -> None:
    case = trained()
    pred = fit(case, "exact", **FIXED).predict(case.x)
    with torch.no_grad():
        case.model[0].weight += 1
    with pytest.raises(ValueError, match=r"`predict`: the weights or buffers of the model are not those of the fit"):
        _ = pred.variance


# Errors and diagnosis ---------------------------------------------------------------------------------------------


def test_a_gram_matrix_that_is_too_large_says_what_to_use() -> None:
    model = nn.Linear(200, 100)
    data = [(torch.zeros(100, 200), torch.zeros(100, 100))] * 2
    message = r'would need about 12.\d GiB for 200 data, 100 outputs and 20100 weights, more than the 8.0 GiB .*"dual"'
    with pytest.raises(ValueError, match=message):
        LinearisedLaplace(model, "regression", method="exact", prior="isotropic").fit(data, progress=False)
    case = trained()
    with pytest.raises(ValueError, match=r'method="exact" would need about .* use method="dual"'):
        laplace_of(case.model, "regression", method="exact", max_memory=1e4).fit(case.batches, progress=False)


def test_the_dual_is_for_gaussian_likelihoods() -> None:
    with pytest.raises(ValueError, match=r'method="dual" is for regression .*; use method="exact"'):
        LinearisedLaplace(make_case("classification").model, "classification", method="dual")


@pytest.mark.parametrize("call", ["fit", "fit_hyperparameters"])
def test_a_dual_solve_that_does_not_converge_names_its_residual(call: str) -> None:
    case = trained()
    solver = DualCG(rank=0, max_iterations=1, max_refinements=0)
    la = laplace_of(case.model, case.likelihood, method="dual", solver=solver, prior_precision=1e-3)
    with pytest.warns(
        ConvergenceWarning, match=r"not converged: residual [\d.e+]+ at most, above the tolerance"
    ) as record:
        getattr(la, call)(case.batches, progress=False, **({"max_steps": 2} if call == "fit_hyperparameters" else {}))
    assert len(record) == 1
    assert record[0].filename == __file__
    assert "`solver=DualCG(rank=..., max_iterations=...)`" in str(record[0].message)
    assert la.converged_ is False
    assert not la.diagnose().ok
    with pytest.warns(ConvergenceWarning, match="The samples have not converged: residual"):
        la.sample(2)


@pytest.mark.parametrize("num_data", [24, 60])
@pytest.mark.parametrize("method", ["exact", "dual", "krylov"])
def test_fits_with_learnt_noise_are_diagnosed(method: str, num_data: int) -> None:
    case = trained(num_data)
    la = laplace_of(case.model, "regression", method=method, prior="isotropic", noise_precision=20.0)
    la.fit_hyperparameters(case.batches, progress=False, max_steps=100)
    diagnosis = la.diagnose()
    assert diagnosis.method == method
    assert not [p.what for p in diagnosis.problems if p.serious]
    assert "Verdict: nothing is wrong" in str(diagnosis)
    if method == "exact":
        assert in_observation_space(la) == (num_data == 24)
        assert diagnosis.gamma_reference == pytest.approx(float(la.effective_dimension_))
        assert diagnosis.data_test.independent


def test_bounds_are_kept_in_observation_space() -> None:
    case = trained()
    la = LinearisedLaplace(case.model, "regression", method="exact", prior="isotropic", num_samples=4)
    with pytest.warns(ConvergenceWarning, match=r"ended at one of noise_bounds=\(0.1, 2.0\)") as record:
        la.fit_hyperparameters(case.batches, noise_bounds=(0.1, 2.0), progress=False)
    assert len(record) == 1
    assert float(la.noise_precision_) == 2.0
    assert la.diagnose().at_bounds == ("noise",)
    run = partial(la.fit_hyperparameters, case.batches, progress=False)
    with pytest.raises(ValueError, match=r"`noise_bounds` must be positive and in order, but is \(2.0, 1.0\)"):
        run(noise_bounds=(2.0, 1.0))
    with pytest.warns(ConvergenceWarning, match=r"ended at one of precision_bounds=\(500.0, 1000.0\)"):
        run(precision_bounds=(500.0, 1000.0))
    assert float(la.prior_precision_) in (500.0, 1000.0)
