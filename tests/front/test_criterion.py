"""`fit_hyperparameters(criterion=...)`: what chooses the hyperparameters."""

import math

import pytest
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from problems import trained

from laplace_sampling import Evidence, Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.methods.method import Fit

METHODS = ["exact", "krylov", pytest.param("svrg", marks=pytest.mark.slow), "kfac", "diagonal"]


def tune(case: Case, val_loader=None, criterion: str = "auto", **settings) -> LinearisedLaplace:
    la = laplace_of(case.model, case.likelihood, num_samples=8, **settings)
    return la.fit_hyperparameters(case.batches, val_loader, criterion=criterion, progress=False)


def fit_of(la: LinearisedLaplace) -> Fit:
    assert la._fitted is not None
    assert la._fitted.fit is not None
    return la._fitted.fit


@pytest.mark.parametrize("method", METHODS)
def test_a_classification_is_self_consistent_and_needs_no_mode(method: str) -> None:
    case = make_case("classification_many_data")
    la = tune(case, method=method)
    fit = fit_of(la)
    assert fit.found.criterion == "self_consistency"
    assert fit.known_mode is None
    (step,) = la.history_
    assert step.mode_norm is None
    assert step.new_prior_precision == la.prior_precision_.tolist()
    assert la.scale_ == la.temperature_ == 1.0
    assert "mode converged" not in str(la.diagnose())
    assert la.converged_
    # The mode is there once somebody asks, and remains.
    assert la.mode_.shape == la.samples_[0].shape
    assert la._fitted.posterior.mode is la.mode_
    assert math.isfinite(float(la.log_marginal_likelihood()))


# The networks are not trained.
@pytest.mark.filterwarnings("ignore:.* are predicted no better than without inputs:laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("method", METHODS)
def test_held_out_labels_choose_precision_and_temperature(method: str) -> None:
    case, other = make_case("classification_many_data"), make_case("classification_many_data")
    val_loader = [(other.x + 0.5, other.given[1].flip(0))]
    la = tune(case, val_loader, method=method)
    assert fit_of(la).found.criterion == "validation"
    assert la.calibration_.data == "held out"
    assert la.calibration_.num_data == 25
    assert la.temperature_ >= 0.9
    assert la.calibration_.log_likelihood > la.calibration_.network_log_likelihood
    by_evidence = tune(case, val_loader, "evidence", method=method)
    assert fit_of(by_evidence).found.criterion == "evidence"
    assert by_evidence.calibration_.data == "held out"


@pytest.mark.filterwarnings("ignore:.* are predicted no better than without inputs:laplace_sampling.CalibrationWarning")
@pytest.mark.filterwarnings("ignore:`fit_hyperparameters` ended at one of:laplace_sampling.ConvergenceWarning")
def test_a_regression_is_tuned_by_its_evidence_or_by_held_out_data() -> None:
    case = make_case("regression_many_data")
    assert fit_of(tune(case)).found.criterion == "evidence"
    la = tune(case, case.batches, "validation", method="exact")
    assert fit_of(la).found.criterion == "validation"
    # A linear model that predicts its own training data best has a prior that says nothing.
    assert float(la.noise_precision_) > 0
    assert la.calibration_.scale == la.calibration_.noise == 1.0


def test_both_spaces_of_the_exact_method_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("classification")
    found = tune(case, method="exact")
    monkeypatch.setattr("laplace_sampling.methods.closed_form.space_of", lambda problem: "weights")
    other = tune(case, method="exact")
    assert type(fit_of(found)) is not type(fit_of(other))
    assert float(found.prior_precision_) == pytest.approx(float(other.prior_precision_), rel=1e-6)
    for x in case.x.split(3):
        torch.testing.assert_close(found.predict(x).covariance(), other.predict(x).covariance(), rtol=1e-5, atol=1e-8)


def labelled_digits(num: int = 60) -> tuple[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A network that is sure of the three classes of so many data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 4, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        last = torch.nn.Linear(6, 3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), last).double()
    with torch.no_grad():
        last.weight *= 30
        return model, [(x, model(x).argmax(1))]


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_labels_that_can_be_left_out_choose_by_default(method: str) -> None:
    model, loader = labelled_digits()
    la = LinearisedLaplace(model, "classification", method="stochastic" if method == "svrg" else method, num_samples=8)
    la.fit_hyperparameters(loader, progress=False)
    assert fit_of(la).found.criterion == "leave_one_out"
    assert fit_of(la).known_mode is None
    asked = LinearisedLaplace(model, "classification", method=la.settings.method, num_samples=8)
    asked.fit_hyperparameters(loader, criterion="leave_one_out", progress=False)
    assert asked.prior_precision_ == la.prior_precision_
    other = LinearisedLaplace(model, "classification", method=la.settings.method, num_samples=8)
    other.fit_hyperparameters(loader, criterion="self_consistency", progress=False)
    assert fit_of(other).found.criterion == "self_consistency"
    assert other.prior_precision_ != la.prior_precision_
    few = LinearisedLaplace(model, "classification", num_samples=8)
    few.fit_hyperparameters([(loader[0][0][:29], loader[0][1][:29])], progress=False)
    assert fit_of(few).found.criterion == "self_consistency"


def test_criteria_that_are_not_possible() -> None:
    case = make_case("classification")
    with pytest.raises(ValueError, match="'loo'"):
        tune(case, criterion="loo")
    with pytest.raises(ValueError, match='criterion="validation"'):
        tune(case, criterion="validation")
    with pytest.raises(ValueError, match="Gaussian"):
        tune(make_case("regression"), criterion="self_consistency")
    for name in ("classification", "segmentation", "poisson", "regression"):
        with pytest.raises(ValueError, match="classes"):
            tune(make_case(name), criterion="leave_one_out")
    with pytest.raises(ValueError, match="noise precision"):
        tune(case, criterion="self_consistency", prior="layerwise")


@pytest.mark.parametrize(
    ("kind", "method"),
    [*(("regression", method) for method in ("exact", "krylov", "dual", "kfac")), ("classification", "exact")],
)
def test_a_step_has_the_effective_dimension_of_its_own_precisions(kind: str, method: str) -> None:
    case = trained() if kind == "regression" else make_case("classification_many_data")
    la = LinearisedLaplace(case.model, kind, prior=IsotropicPrior(), method=method, num_samples=8)
    la.fit_hyperparameters(case.batches, criterion=Evidence(max_steps=30), progress=False, budget=None)
    for step in (la.history_[0], la.history_[-1]):
        likelihood = kind if step.noise_precision is None else Gaussian(step.noise_precision[0], learn=False)
        prior = IsotropicPrior(precision=step.prior_precision[0])
        # Kronecker factors have an effective dimension of their own; those of others are estimates of the exact one.
        same = LinearisedLaplace(case.model, likelihood, prior=prior, method="kfac" if method == "kfac" else "exact")
        same.fit(case.batches, progress=False)
        allowed = {"krylov": 0.02, "kfac": 0.3}.get(method, 1e-4)
        assert step.effective_dimension[0] == pytest.approx(float(same.effective_dimension_), rel=allowed)
