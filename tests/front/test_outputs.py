"""Outputs of any shape and every likelihood, from fit to prediction, against dense references."""

import math
from collections import UserDict

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import LogNormal, Normal
from torch.testing import assert_close

from laplace_sampling import (
    Categorical,
    ClassificationPrediction,
    CountPrediction,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticPrediction,
    LinearisedLaplace,
    MultiTaskPrediction,
    Poisson,
    Prediction,
    RegressionPrediction,
    from_loss,
)
from laplace_sampling.predictions.prediction import SampledPrediction

NEW = ["segmentation", "token_labels", "poisson", "heteroscedastic", "multi_task", "from_loss"]


def fit(case: Case, **settings) -> LinearisedLaplace:
    la = laplace_of(case.model, case.given[0], prior="isotropic", prior_precision=1.3, **settings)
    return la.fit([(case.x, case.given[1])], progress=False)


@pytest.mark.parametrize("method", ["exact", "krylov"])
@pytest.mark.parametrize("name", NEW)
def test_posteriors_equal_dense_ones(name: str, method: str) -> None:
    case = make_case(name)
    la = fit(case, method=method, num_samples=3)
    J, A = reference.jacobian(case.model, case.x), torch.full((la.network.num_parameters,), 1.3).double()
    f = la.network(case.x).reshape(len(case.x), -1)
    theta = reference.mode(
        case.likelihood, J, torch.zeros_like(f), case.y, A, steps=60 if name == "heteroscedastic" else 12
    )
    assert_close(la.mode_, theta, rtol=2e-2, atol=2e-2 * float(theta.abs().max()))
    H = reference.ggn(J, reference.curvature(case.likelihood, f, case.y)) + torch.diag(A)
    expected = torch.linalg.inv(H)
    model = la._fitted.fit.model
    ours = model.ggn(model.network_outputs)
    M = torch.cat(list(ours.root_rows())).double()
    assert_close(M.T @ M + torch.diag(A), H, rtol=0.05, atol=0.05 * float(H.diagonal().max()))
    if method == "exact":
        pred = la.predict(case.x)
        rows = J.flatten(0, 1)
        assert_close(pred.joint_covariance(), rows @ expected @ rows.T, rtol=1e-3, atol=1e-3)
        evidence = -sum(reference.loss(case.likelihood, (J @ theta)[n], case.y[n]) for n in range(len(f)))
        evidence = evidence - 0.5 * (A * theta**2).sum() - 0.5 * (torch.logdet(H) - A.log().sum())
        assert float(la.log_marginal_likelihood().value) == pytest.approx(float(evidence), abs=2e-3)


@pytest.mark.parametrize("name", NEW)
def test_methods_agree(name: str) -> None:
    case = make_case(name)
    exact, krylov = (fit(case, method=method, num_samples=5) for method in ("exact", "krylov"))
    scale = float(exact.samples_.std())
    assert float((krylov.samples_ - exact.samples_).std()) < 0.03 * scale
    y = case.given[1]
    found, expected = (la.predict(case.x).joint_log_prob(y) for la in (krylov, exact))
    assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:`fit_hyperparameters`:laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize("name", NEW)
def test_saved_posteriors_predict_the_same(name: str, tmp_path) -> None:
    case = make_case(name)
    la = LinearisedLaplace(case.model, case.given[0], num_samples=4)
    la.fit_hyperparameters([(case.x, case.given[1])], progress=False, tolerance=1.0)
    la.save(tmp_path / "la.pt")
    given = case.given[0] if name == "from_loss" else None
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", case.model, likelihood=given)
    found, expected = loaded.predict(case.x), la.predict(case.x)
    assert type(found) is type(expected)
    assert torch.equal(found.variance, expected.variance)
    assert torch.equal(found.log_prob(case.given[1]), expected.log_prob(case.given[1]))
    assert repr(loaded.settings.likelihood) == repr(la.settings.likelihood)


# Predictions -------------------------------------------------------------------------------------------------


def draws(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_classes_on_any_axis() -> None:
    """A prediction with the classes on axis 1 is that of each position by itself."""
    outputs, deviations, labels = draws(2, 3, 4, 5), draws(6, 2, 3, 4, 5), torch.arange(40).reshape(2, 4, 5) % 3
    pred = ClassificationPrediction(outputs, deviations, Categorical())
    flat = ClassificationPrediction(
        outputs.movedim(1, -1).reshape(-1, 3), deviations.movedim(2, -1).reshape(6, -1, 3), Categorical()
    )
    last = ClassificationPrediction(outputs.movedim(1, -1), deviations.movedim(2, -1), Categorical(class_dim=-1))
    for link in ("mc", "probit", "bridge"):
        expected = flat.probs_with(link).reshape(2, 4, 5, 3)
        assert_close(last.probs_with(link), expected)
        assert_close(pred.probs_with(link), expected.movedim(-1, 1))
    for name in ("entropy", "mutual_information"):
        assert_close(getattr(pred, name), getattr(flat, name).reshape(2, 4, 5))
        assert_close(getattr(last, name), getattr(pred, name))
    assert_close(pred.log_prob(labels), last.log_prob(labels))
    total = Classes(logits=mirrored(pred).movedim(2, -1)).log_prob(labels).sum((2, 3))
    assert_close(pred.log_prob(labels), total.logsumexp(0) - torch.tensor(12.0).double().log())
    ignored = labels.clone()
    ignored[:, 1:] = -100
    total = Classes(logits=mirrored(pred).movedim(2, -1)).log_prob(labels)[:, :, 0].sum(2)
    assert_close(pred.log_prob(ignored), total.logsumexp(0) - torch.tensor(12.0).double().log())


def mirrored(pred: Prediction | RegressionPrediction) -> torch.Tensor:
    return torch.cat([pred.outputs + pred.deviations, pred.outputs - pred.deviations])


def test_counts() -> None:
    outputs, deviations, y = draws(3, 2), 0.3 * draws(200_000, 3, 2), torch.tensor([[0, 2], [1, 5], [3, 0]])
    pred = CountPrediction(outputs, deviations, Poisson())
    rate = LogNormal(outputs, deviations.square().mean(0).sqrt())
    assert_close(pred.mean, rate.mean)
    assert_close(pred.observation_variance, rate.mean + rate.variance)
    counts = torch.poisson(pred.samples.exp(), generator=torch.Generator().manual_seed(1))
    assert_close(counts.mean(0), pred.mean, rtol=0.02, atol=0.02)
    assert_close(counts.var(0), pred.observation_variance, rtol=0.03, atol=0.03)
    each = torch.distributions.Poisson(mirrored(pred).exp()).log_prob(y).sum(-1)
    assert_close(pred.log_prob(y), each.exp().mean(0).log())


def test_means_and_log_variances() -> None:
    outputs, deviations, y = draws(3, 4), 0.3 * draws(200_000, 3, 4), draws(3, 2)
    pred = HeteroscedasticPrediction(outputs, deviations, HeteroscedasticGaussian())
    mean, log_variance = (outputs + deviations).chunk(2, -1)
    assert torch.equal(pred.mean, outputs[:, :2])
    assert torch.equal(pred.samples, mean)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    observed = mean + (log_variance / 2).exp() * noise
    assert_close(pred.noise_variance, log_variance.exp().mean(0), rtol=0.02, atol=0)
    assert_close(observed.var(0), pred.observation_variance, rtol=0.03, atol=0)
    assert_close(pred.stddev, mean.std(0), rtol=0.01, atol=0)
    mean, log_variance = mirrored(pred).chunk(2, -1)
    each = Normal(mean, (log_variance / 2).exp()).log_prob(y).sum(-1)
    assert_close(pred.log_prob(y), each.exp().mean(0).log())


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_heads_are_predicted_by_their_likelihoods(method: str) -> None:
    case = make_case("multi_task")
    pred = fit(case, method=method, num_samples=200).predict(case.x)
    assert isinstance(pred, MultiTaskPrediction)
    assert set(pred) == {"kind", "value", "count"}
    assert len(pred) == 3
    kinds = {"kind": ClassificationPrediction, "value": RegressionPrediction, "count": CountPrediction}
    with torch.no_grad():
        heads = case.model(case.x)
    columns = {"kind": slice(0, 3), "value": slice(3, 5), "count": slice(5, 6)}
    joint = pred.joint_covariance().reshape(6, 6, 6, 6)
    for name, kind in kinds.items():
        head = pred[name]
        assert type(head) is kind
        assert torch.equal(head.outputs, heads[name])
        assert_close(head.variance.reshape(6, -1), pred.variance[:, columns[name]])
        assert_close(head.covariance(), pred.covariance()[:, columns[name], columns[name]])
        part = joint[:, columns[name]][..., columns[name]]
        assert_close(head.joint_covariance(), part.reshape(head.outputs.numel(), -1))
    y = case.given[1]
    parts = [Classes(logits=mirrored(pred["kind"])).log_prob(y["kind"])]
    parts.append(Normal(mirrored(pred["value"]), 0.5**0.5).log_prob(y["value"]).sum(-1))
    parts.append(torch.distributions.Poisson(mirrored(pred["count"]).exp()).log_prob(y["count"]))
    each = sum(parts)
    assert_close(pred.joint_log_prob(y), each.sum(1).logsumexp(0) - math.log(400))
    densities = each.exp()
    if method == "krylov":
        assert_close(pred.log_prob(y), densities.mean(0).log())
    # Otherwise from draws of the outputs of each datum, not of samples.
    error = densities.unflatten(0, (2, -1)).mean(0).std(0) / densities.mean(0) / 200**0.5
    assert ((pred.log_prob(y) - densities.mean(0).log()).abs() < 4 * error).all()


def test_image_regressions_have_the_shape_of_the_image() -> None:
    case = make_case("image_regression")
    pred = fit(case, num_samples=3).predict(case.x)
    assert pred.samples.shape == (3, 4, 2, 3, 3)
    assert pred.stddev.shape == (4, 2, 3, 3)
    assert_close(pred.observation_variance, pred.variance + 0.5)


def test_a_fully_convolutional_network_predicts_other_sizes() -> None:
    case = make_case("segmentation")
    pred = fit(case, num_samples=3).predict(draws(2, 1, 6, 5))
    assert pred.probs.shape == (2, 3, 6, 5)
    assert_close(pred.probs.sum(1), torch.ones(2, 6, 5).double())


# Own losses --------------------------------------------------------------------------------------------------


def test_a_likelihood_from_a_loss_is_the_one_that_is_written_out() -> None:
    case = make_case("poisson")
    own = from_loss(lambda f, y: (f.exp() - y * f + torch.lgamma(y + 1)).sum())
    written = fit(case, method="exact", num_samples=3)
    case.given = own, case.given[1].double()
    found = fit(case, method="exact", num_samples=3)
    assert_close(found.mode_, written.mode_)
    assert_close(found.predict(case.x).variance, written.predict(case.x).variance)
    assert_close(found.log_marginal_likelihood().value, written.log_marginal_likelihood().value)
    pred = found.predict(case.x)
    assert type(pred) is SampledPrediction
    assert_close(pred.log_prob(case.given[1]), written.predict(case.x).log_prob(case.given[1]), rtol=0.2, atol=0.2)


# Several heads -----------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A dictionary with a head called `logits`."""

    def __init__(self, kind: type = dict) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(2, 3), nn.Linear(2, 1), kind

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.kind(logits=self.a(x), depth=self.b(x))


def test_a_head_may_be_called_logits() -> None:
    case = make_case("multi_task")
    y = {"logits": case.given[1]["kind"], "depth": case.given[1]["value"][:, :1]}
    heads = {"logits": "classification", "depth": Gaussian(2.0, learn=False)}
    pred = LinearisedLaplace(Two().double(), heads).fit([(case.x, y)], progress=False).predict(case.x)
    assert pred["logits"].outputs.shape == (6, 3)
    assert pred["depth"].outputs.shape == (6, 1)
    with pytest.raises(ValueError, match="'depth'"):
        LinearisedLaplace(Two().double(), "classification").fit([(case.x, y["logits"])], progress=False)
    other = LinearisedLaplace(Two(UserDict).double(), "classification")  # an object with `logits`, as of Hugging Face
    assert other.fit([(case.x, y["logits"])], progress=False).predict(case.x).probs.shape == (6, 3)
