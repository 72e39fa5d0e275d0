"""Exact fits of classes and labels in observation space, through the public class: against weight space."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from cases import Case, make_case
from flat_settings import fit_case, holds_jacobian, in_observation_space, laplace_of
from grids import covering
from problems import CLOSE, SAMPLES, many
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten

from laplace_sampling import ConvergenceWarning, Evidence, Likelihood, LinearisedLaplace
from laplace_sampling.gp.posterior import GramPosterior
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import TangentModel

# N·C is less than P.
NAMES = ["classification", "conv_batch_norm", "layer_norm", "attention", "binary", "multi_label"]


def tune(case: Case, **settings) -> LinearisedLaplace:
    tolerance = settings.pop("tolerance", 1e-9)
    la = laplace_of(case.model, case.likelihood, **{"method": "exact", "num_samples": 4, **settings})
    return la.fit_hyperparameters(case.batches, progress=False, criterion=Evidence(max_steps=200), tolerance=tolerance)


def learnable(name: str) -> Case:
    """Labels that the inputs decide in part, fewer than there are weights, for evidence with a maximum."""
    case = many(name)[0]
    outputs = 4 if name == "classification" else case.y.shape[1]
    num = {1: 20, 3: 12, 4: 12}[outputs]
    return Case(case.model, case.likelihood, case.x[:num], case.y[:num], 5)


def assert_equal(gram: LinearisedLaplace, weights: LinearisedLaplace, x: Tensor, y: Tensor) -> None:
    """Everything that can be asked."""
    assert in_observation_space(gram)
    assert holds_jacobian(weights)
    # The rows of the network are held as they are, not as the scaled matrix of weight space.
    assert isinstance(gram._fitted.fit.model.features, DenseFeatures)
    a, b = weights.predict(x), gram.predict(x)
    assert torch.equal(a.logits, b.logits)
    assert_close(b.covariance(), a.covariance(), **CLOSE)
    assert_close(b.joint_covariance(), a.joint_covariance(), **CLOSE)
    assert_close(b.stddev, a.stddev, **CLOSE)
    assert_close(b.probs_with("probit"), a.probs_with("probit"), **CLOSE)
    assert_close(b.samples, a.samples, **SAMPLES)
    assert_close(b.log_prob(y), a.log_prob(y), **SAMPLES)
    assert_close(gram.samples_, weights.samples_, **SAMPLES)
    assert_close(gram.sample(2), weights.sample(2), **SAMPLES)
    assert_close(gram.mode_, weights.mode_, **SAMPLES)
    assert_close(gram.effective_dimension_, weights.effective_dimension_, **CLOSE)
    one, other = gram.log_marginal_likelihood(), weights.log_marginal_likelihood()
    assert one.exact
    assert one.standard_error == 0
    for name in ("value", "data_fit", "complexity"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6, abs=1e-8), name
    curves, expected = gram.evidence_path(3, 13), weights.evidence_path(3, 13)
    for name in ("prior_precision", "effective_dimension", "mode_norm", "log_determinant", "data_fit"):
        assert_close(getattr(curves, name), getattr(expected, name), **CLOSE)
    assert_close(curves.log_marginal_likelihood, expected.log_marginal_likelihood, **CLOSE)
    out, without = gram.leave_one_out(), weights.leave_one_out()
    for name in ("mean", "covariance", "log_prob"):
        assert_close(getattr(out, name), getattr(without, name), **CLOSE)
    page, expected_page = gram.diagnose(), weights.diagnose()
    for name in ("effective dimension", "energy ζᵀHζ, mean", "energy ζᵀHζ, K", "‖φw̄ − f‖"):
        assert page[name].value == pytest.approx(expected_page[name].value, rel=1e-6)
        assert page[name].bounds == pytest.approx(expected_page[name].bounds, rel=1e-6)
    assert sum(page["γ of the samples"].bounds) / 2 == pytest.approx(page["effective dimension"].value)


@covering(
    rest=False,
    strength=2,
    name=NAMES,
    prior=["isotropic", "g-prior"],
    kind=["homogeneous", "affine"],
)
def test_both_spaces_agree(name: str, prior: str, kind: str, in_weight_space) -> None:
    case = make_case(name)
    settings = {"prior": prior, "linear_model": kind}
    gram = fit_case(case, **settings)
    in_weight_space()
    assert_equal(gram, fit_case(case, **settings), case.x[:3] * 1.5 + 0.2, case.y[:3])


@pytest.mark.parametrize("name", ["classification", "binary", "multi_label"])
def test_hyperparameters_agree_between_the_spaces(name: str, in_weight_space) -> None:
    case = learnable(name)
    settings = {"prior": "isotropic"}
    gram = tune(case, **settings)
    in_weight_space()
    weights = tune(case, **settings)
    assert gram.converged_
    assert weights.converged_
    assert_close(gram.prior_precision_, weights.prior_precision_, rtol=1e-6, atol=0)
    assert_equal(gram, weights, case.x[:3] * 1.5, case.y[:3])
    step, last = gram.history_[0], weights.history_[-1]
    assert step.new_prior_precision == gram.prior_precision_.tolist()
    assert step.prior_precision == gram.prior_precision_.tolist()
    assert step.noise_precision is None
    assert step.effective_dimension[0] == pytest.approx(last.effective_dimension[0], rel=1e-6)
    assert step.mode_norm[0] == pytest.approx(last.mode_norm[0], rel=1e-6)
    assert step.effective_dimension[0] / step.mode_norm[0] == pytest.approx(step.new_prior_precision[0], rel=1e-8)
    assert step.loss == pytest.approx(last.loss, rel=1e-6)
    assert step.network_loss == pytest.approx(last.network_loss)


# Choice -----------------------------------------------------------------------------------------------------------


def test_auto_works_in_observation_space_without_a_jacobian(monkeypatch) -> None:
    case = make_case("classification")

    def held(*_) -> None:
        raise AssertionError("The Jacobian is held.")

    monkeypatch.setattr(TangentModel, "dense", held)
    la = LinearisedLaplace(case.model, "classification", num_samples=4).fit(case.batches, progress=False)
    assert in_observation_space(la)
    assert "'exact': exact: a second or so of operations, in the space of the observations" in repr(la)


def test_several_prior_precisions_and_many_data_are_fitted_in_weight_space() -> None:
    for la in (
        fit_case(make_case("classification"), prior="layerwise"),
        fit_case(make_case("classification_many_data")),
    ):
        assert holds_jacobian(la)
        assert "in the space of the weights" in repr(la)


def test_too_many_labels_name_the_memory_and_the_methods() -> None:
    model = nn.Linear(200, 100)
    data = [(torch.zeros(100, 200), torch.zeros(100).long())] * 2
    message = r"12\.\d GiB"
    with pytest.raises(ValueError, match=message):
        LinearisedLaplace(model, "classification", method="exact", prior="isotropic").fit(data, progress=False)


def test_a_jacobian_that_is_not_finite() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).abs().sqrt()

    model = Root(4, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    la = LinearisedLaplace(model, "classification", method="exact", prior="isotropic")
    with pytest.raises(FloatingPointError, match="Jacobian"):
        la.fit([(torch.zeros(2, 4).double(), torch.tensor([0, 1]))], progress=False)


# Keeping it, and what may go wrong ---------------------------------------------------------------------------------


@covering(name=["classification", "binary", "multi_label"])
def test_a_loaded_posterior_is_the_same_to_the_last_bit(name: str, tmp_path) -> None:
    case = learnable(name)
    la = tune(case)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    x = case.x[:3] + 0.1
    a, b = la.predict(x), again.predict(x)
    for of in ("variance", "probs", "samples"):
        assert torch.equal(getattr(a, of), getattr(b, of))
    assert torch.equal(a.joint_covariance(), b.joint_covariance())
    assert torch.equal(a.covariance(), b.covariance())
    assert torch.equal(a.log_prob(case.y[:3]), b.log_prob(case.y[:3]))
    assert_close(again.leave_one_out().log_prob, la.leave_one_out().log_prob)
    assert float(again.log_marginal_likelihood()) == pytest.approx(float(la.log_marginal_likelihood()))
    assert_close(again.evidence_path(2, 5).mode_norm, la.evidence_path(2, 5).mode_norm)
    assert_close(again.sample(2), la.sample(2))
    again.save(tmp_path / "again.pt")
    states = [torch.load(tmp_path / f"{file}.pt", weights_only=True) for file in ("la", "again")]
    leaves, structures = zip(*map(tree_flatten, states), strict=True)
    assert structures[0] == structures[1]
    for one, other in zip(*leaves, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_bounds_are_kept_and_told() -> None:
    case = learnable("classification")
    seen: list = []
    la = LinearisedLaplace(case.model, "classification", method="exact", num_samples=4)
    with pytest.warns(ConvergenceWarning, match="precision_bounds") as record:
        la.fit_hyperparameters(
            case.batches, criterion=Evidence(precision_bounds=(500.0, 1000.0)), progress=False, callback=seen.append
        )
    assert len(record) == 1
    assert float(la.prior_precision_) in (500.0, 1000.0)
    assert "for all." in la.diagnose()["precisions at a bound"].sentence
    assert seen == la.history_
    with pytest.raises(ValueError, match="precision_bounds"):
        la.fit_hyperparameters(case.batches, criterion=Evidence(precision_bounds=(2.0, 1.0)), progress=False)


def test_a_mode_that_does_not_converge_is_told(monkeypatch) -> None:
    case = make_case("classification")
    whole = GramPosterior._mode_by_newton
    monkeypatch.setattr(GramPosterior, "_mode_by_newton", lambda self, start=None: whole(self, start, max_steps=1))
    settings = {"method": "exact", "prior_precision": 1e-3, "num_samples": 4}
    la = laplace_of(case.model, "classification", **settings)
    la.fit(case.batches, progress=False)
    with pytest.warns(ConvergenceWarning, match="log_marginal_likelihood"):
        la.log_marginal_likelihood()


def test_float32_networks_take_the_jacobian_in_float64() -> None:
    case = make_case("classification")
    expected = fit_case(case).predict(case.x)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    model.load_state_dict({name: value.float() for name, value in case.model.state_dict().items()})
    la = laplace_of(model, "classification", method="exact", prior_precision=0.7, num_samples=4)
    pred = la.fit([(case.x.float(), case.y)], progress=False).predict(case.x.float())
    assert la.converged_
    assert la.samples_.dtype == la.mode_.dtype == pred.stddev.dtype == torch.float32
    assert_close(pred.stddev.double(), expected.stddev, rtol=1e-5, atol=1e-6)
    assert_close(pred.samples.double(), expected.samples, rtol=1e-3, atol=1e-4)


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts with the rate `exp f`, as a user would write it."""

    name: str = field(default="counts", init=False)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + (y + 1).lgamma()).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() - y

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return f.exp() * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return (f / 2).exp() * u

    root_transpose = root

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        assert y.shape == output_shape


def test_a_likelihood_of_ones_own(in_weight_space, tmp_path) -> None:
    base = make_case("binary")
    y = torch.tensor([0.0, 2, 1, 4, 0, 1, 3]).double()[:, None]
    case = Case(base.model, Poisson(), base.x, y, 3)
    gram = fit_case(case)
    gram.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model, Poisson())
    assert torch.equal(again.predict(case.x).variance, gram.predict(case.x).variance)
    in_weight_space()
    weights = fit_case(case)
    assert in_observation_space(gram)
    assert holds_jacobian(weights)
    assert_close(gram.samples_, weights.samples_, **SAMPLES)
    assert_close(gram.predict(case.x).variance, weights.predict(case.x).variance, **CLOSE)
    assert float(gram.log_marginal_likelihood()) == pytest.approx(float(weights.log_marginal_likelihood()), rel=1e-6)
    assert_close(gram.evidence_path(2, 5).mode_norm, weights.evidence_path(2, 5).mode_norm, **CLOSE)
    assert_close(gram.leave_one_out().log_prob, weights.leave_one_out().log_prob, **CLOSE)


# Memory -----------------------------------------------------------------------------------------------------------

_PEAK = """
import os, torch
from torch import nn
from laplace_sampling import IsotropicPrior, LinearisedLaplace
from laplace_sampling.methods.closed_form import Exact
from laplace_sampling.methods.closed_form import ObservationSpaceFit
from laplace_sampling.gp import posterior as gram
for function in (gram.gram.__wrapped__, gram.cross_gram, gram.gram_blocks):
    function.__kwdefaults__["block_bytes"] = 2**22
torch.manual_seed(0)
# Threads that wait for each other take minutes where other tests run side by side.
torch.set_num_threads(1)
def fit(n, at):
    net = nn.Sequential(nn.Linear(3, 310), nn.Tanh(), nn.Linear(310, 4)).double()
    x = torch.randn(n, 3).double()
    data = list(zip(x.split(50), net(4 * x).detach().argmax(1).split(50)))
    # Memory for four matrices and a block, not for the rows of the Jacobian as well.
    settings = dict(method=Exact(max_memory=8e7), prior=IsotropicPrior(precision=5.0), num_samples=4)
    la = LinearisedLaplace(net, "classification", **settings)
    la.fit(data, progress=False) if at == "mode" else la.fit_hyperparameters(data, criterion="evidence", progress=False)
    assert isinstance(la._fitted.fit, ObservationSpaceFit)
    la.log_marginal_likelihood(), la.leave_one_out(), la.predict(x[:5]).covariance()
# What a search imports is no matrix.
fit(40, "mode"), fit(40, "network")
before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
for at in ("mode", "network"):
    fit(300, at)
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(peak[0].split()[1]) * 1024 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_peak_memory_is_at_most_four_gram_matrices_and_a_block() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _PEAK]
    # What is freed goes back to the system at once, as it does anyway for matrices above 32 MiB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for line in result.stdout.split():
        grams = (float(line) - 2**22) / (8 * 1200**2)
        print(f"peak: {grams:.2f} Gram matrices and a block")
        assert grams < 4
