"""Exact fits of regressions in both spaces, through the public class."""

import copy
import warnings
from functools import partial

import pytest
import reference
import torch
from cases import make_case
from flat_settings import fit_case, holds_jacobian, in_observation_space, laplace_of
from grids import covering
from problems import CLOSE, SAMPLES, trained
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Evidence, Gaussian, IsotropicPrior, LinearisedLaplace

REGRESSIONS = ["regression", "regression_per_output", "regression_flat", "image_regression"]


@covering(
    rest=False,
    strength=2,
    name=REGRESSIONS,
    prior=["isotropic", "g-prior", "layerwise"],
    kind=["affine", "homogeneous"],
)
def test_all_spaces_agree(name: str, prior: str, kind: str, in_weight_space) -> None:
    case = make_case(name)
    settings = {"prior": prior, "linear_model": kind}
    gram, dual = (fit_case(case, method, **settings) for method in ("exact", "dual"))
    in_weight_space()
    weights = fit_case(case, "exact", **settings)
    small = gram._fitted.fit.model.offset.numel() < gram.network.num_parameters
    assert in_observation_space(gram) == (small and prior != "layerwise")
    assert holds_jacobian(weights)
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
    la = fit_case(case, "exact")
    J = reference.jacobian(case.model, case.x)
    B = reference.curvature(case.likelihood, la._fitted.fit.model.network_outputs, case.y)
    H = reference.ggn(J, B) + torch.diag(la._fitted.posterior.prior.diagonal())
    flat = J.flatten(0, 1)
    expected = flat @ torch.linalg.solve(H, flat.T)
    pred = la.predict(case.x)
    assert_close(pred.joint_covariance(), expected, **CLOSE)
    assert_close(pred.variance.flatten(), expected.diagonal(), **CLOSE)
    assert_close(pred.covariance()[1], expected.unflatten(0, (len(J), -1)).unflatten(2, (len(J), -1))[1, :, 1], **CLOSE)
    if name == "classification":
        assert_close(pred.probs_with("bridge").sum(-1), torch.ones(len(J)).double())


@pytest.mark.parametrize("kind", ["affine", "homogeneous"])
@pytest.mark.parametrize("learn", [True, False])
def test_the_precision_is_of_largest_evidence_to_rounding(learn: bool, kind: str) -> None:
    case = trained()
    likelihood = Gaussian(20.0, learn=learn)
    settings = {"prior": "isotropic", "linear_model": kind, "num_samples": 4}
    la = laplace_of(case.model, likelihood, method="exact", **settings)
    seen: list = []
    la.fit_hyperparameters(case.batches, progress=False, callback=seen.append)
    assert in_observation_space(la)
    assert seen == la.history_
    assert la.converged_
    alpha, b = float(la.prior_precision_), float(la.noise_precision_)
    assert (b == 20.0) == (not learn)
    best = float(la.log_marginal_likelihood())
    for factor in (0.99, 1.01):
        near = laplace_of(
            case.model, "regression", method="exact", prior_precision=alpha * factor, noise_precision=b, **settings
        ).fit(case.batches, progress=False)
        assert float(near.log_marginal_likelihood()) < best


def test_exact_hyperparameters_agree_between_the_spaces(in_weight_space) -> None:
    case = trained()
    fits = []
    for _ in range(2):
        la = LinearisedLaplace(case.model, "regression", method="exact", prior="isotropic", num_samples=4)
        fits.append(la.fit_hyperparameters(case.batches, progress=False))
        in_weight_space()
    gram, weights = fits
    assert in_observation_space(gram)
    assert holds_jacobian(weights)
    assert_close(gram.prior_precision_, weights.prior_precision_, rtol=1e-6, atol=0)
    assert_close(gram.noise_precision_, weights.noise_precision_, rtol=1e-6, atol=0)
    assert_close(gram.effective_dimension_, weights.effective_dimension_, **CLOSE)
    assert_close(gram.samples_, weights.samples_, **SAMPLES)


def test_print_tells_the_space_and_why() -> None:
    case = trained()
    text = repr(fit_case(case, "exact"))
    assert "'exact': as asked for, in the space of the observations (P = 37 weights, N·C = 24 observations; the" in text
    assert "the rows of Φ are held" in text
    assert "in the space of the weights (P = 3 weights" in repr(fit_case(make_case("regression_many_data"), "exact"))


def test_float32_networks_in_observation_space() -> None:
    case = trained()
    expected = fit_case(case, "exact", prior="isotropic").predict(case.x)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    model.load_state_dict({name: value.float() for name, value in case.model.state_dict().items()})
    data = [(case.x.float(), case.y.float())]
    for method in ("exact", "dual"):
        la = laplace_of(model, case.likelihood, method=method, prior_precision=0.7, num_samples=4)
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


@pytest.mark.parametrize("num_data", [20, 60])  # in the space of observations, and of weights
def test_float32_networks_are_exact_where_float32_is_not(num_data: int) -> None:
    case = trained(num_data)
    single = copy.deepcopy(case.model).float()
    data, new = (case.x.float(), case.y.float()), torch.linspace(-2, 2, 30)[:, None]
    settings = {"method": "exact", "prior": IsotropicPrior(precision=1e-6), "num_samples": 8}
    likelihood = Gaussian(1e9, learn=False)
    # The same numbers in float64, which has six digits left; it tells where there are fewer.
    double = LinearisedLaplace(copy.deepcopy(single).double(), likelihood, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        double.fit([tuple(part.double() for part in data)], progress=False)
    la = LinearisedLaplace(single, likelihood, **settings)
    with pytest.warns(ConvergenceWarning, match="float32") as record:
        la.fit([data], progress=False)
    assert len(record) == 1
    assert_close(la.predict(new).stddev.double(), double.predict(new.double()).stddev, rtol=1e-3, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        la = LinearisedLaplace(single, Gaussian(20.0, learn=False), method="exact", num_samples=8)
        la.fit([data], progress=False)


def test_a_network_that_computes_in_float32_only_is_taken_as_it_is() -> None:
    x = torch.linspace(-1, 1, 5)[:, None].repeat(1, 8)
    la = LinearisedLaplace(OwnDtype(8, 1), "regression", method="exact", prior="isotropic").fit([(x, x[:, :1])])
    assert "in the space of the observations" in repr(la)
    plain = nn.Linear(8, 1).double()
    plain.load_state_dict({name: value.double() for name, value in la.network.source.state_dict().items()})
    other = LinearisedLaplace(plain, "regression", method="exact", prior="isotropic").fit(
        [(x.double(), x[:, :1].double())]
    )
    assert_close(la.predict(x).stddev.double(), other.predict(x.double()).stddev, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "classification", "image_regression"])
@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_a_loaded_exact_posterior_is_as_exact(name: str, heteroscedastic: bool, tmp_path) -> None:
    case = make_case(name)
    if heteroscedastic and not isinstance(case.likelihood, Gaussian):
        return
    R = torch.linspace(0.5, 2, len(case.y)).double() if heteroscedastic else None
    la = fit_case(case, "exact", noise_variances=R)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    x = case.x[:3] + 0.1
    for ask in (lambda p: p.joint_covariance(), lambda p: p.variance, lambda p: p.log_prob(case.y[:3])):
        assert_close(ask(again.predict(x)), ask(la.predict(x)), rtol=1e-10, atol=0)
    assert again.state_dict().keys() == la.state_dict().keys()
    if in_observation_space(la):  # the training data are part of it
        assert_close(again.leave_one_out().log_prob, la.leave_one_out().log_prob)
        assert float(again.log_marginal_likelihood()) == pytest.approx(float(la.log_marginal_likelihood()))
        assert_close(again.sample(2), la.sample(2))


def test_covariances_asked_for_after_the_network_changed() -> None:
    case = trained()
    la = fit_case(case, "exact")
    pred, expected = (la.predict(case.x) for _ in range(2))
    expected = expected.variance
    with torch.no_grad():
        case.model[0].weight += 1
    assert_close(pred.variance, expected)


def test_a_gram_matrix_that_is_too_large_says_what_to_use() -> None:
    model = nn.Linear(200, 100)
    data = [(torch.zeros(100, 200), torch.zeros(100, 100))] * 2
    message = r"12\.\d GiB"
    with pytest.raises(ValueError, match=message):
        LinearisedLaplace(model, "regression", method="exact", prior="isotropic").fit(data, progress=False)
    case = trained()
    with pytest.raises(ValueError, match="dual"):
        laplace_of(case.model, "regression", method="exact", max_memory=1e4).fit(case.batches, progress=False)


# At a bound error bars may be worse than none, as they are here.
@pytest.mark.filterwarnings("ignore:Error bars make predictions worse")
def test_bounds_are_kept_in_observation_space() -> None:
    case = trained()
    la = LinearisedLaplace(case.model, "regression", method="exact", prior="isotropic", num_samples=4)
    with pytest.warns(ConvergenceWarning, match="noise_bounds") as record:
        la.fit_hyperparameters(case.batches, criterion=Evidence(noise_bounds=(0.1, 2.0)), progress=False)
    assert len([warning for warning in record if warning.category is ConvergenceWarning]) == 1
    assert float(la.noise_precision_) == 2.0
    assert "for noise." in la.diagnose()["precisions at a bound"].sentence
    run = partial(la.fit_hyperparameters, case.batches, progress=False)
    with pytest.raises(ValueError, match="noise_bounds"):
        run(criterion=Evidence(noise_bounds=(2.0, 1.0)))
    with pytest.warns(ConvergenceWarning, match="precision_bounds"):
        run(criterion=Evidence(precision_bounds=(500.0, 1000.0)))
    assert float(la.prior_precision_) in (500.0, 1000.0)


def test_variances_that_float64_does_not_carry_are_said() -> None:
    case = trained()
    la = laplace_of(case.model, "regression", method="exact", prior_precision=1e-6, noise_precision=1e12)
    with pytest.warns(ConvergenceWarning, match="float64"):
        la.fit(case.batches, progress=False)
    assert not la.converged_
    la = laplace_of(case.model, "regression", method="exact", prior_precision=1e-6, noise_precision=1.0)
    assert la.fit(case.batches, progress=False).converged_
