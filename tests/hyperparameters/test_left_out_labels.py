"""The rule that lets error bars cost as much as errors on left-out training labels warrant."""

import math
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from laplace_sampling.hyperparameters import rules
from laplace_sampling.hyperparameters.covariance_path import CovariancePath, FactoredPath
from laplace_sampling.hyperparameters.rules import LeftOutLabels, SelfConsistency, has_left_out_labels
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.likelihoods.weighted import weighted
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import ungrouped

BOUNDS = (1e-8, 1e12)
C, P = 3, 30
# Of the rule, where a test does not say another.
A_ERROR = 0.2


def problem(
    likelihood: Likelihood | None = None, *, num: int = 120, confidence: float = 6.0, noise: float = 0.0
) -> tuple[LinearModel, CovariancePath]:
    """A network that is sure of all its training labels, some of which are noise; features that tell classes apart."""
    likelihood = likelihood or Categorical()
    classes = isinstance(likelihood, Categorical)
    outputs = C if classes else 1
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(num, outputs, P, generator=generator, dtype=torch.float64)
    scores = J @ torch.randn(P, generator=generator, dtype=torch.float64)
    # Features of a class lie together, as those of a trained network do.
    labels = scores.argmax(1) if classes else (scores[:, 0] > 0).long()
    J = 0.3 * J + torch.randn(max(2, outputs), outputs, P, generator=generator, dtype=torch.float64)[labels]
    other = torch.randint(max(2, outputs), (num,), generator=generator)
    labels = torch.where(torch.rand(num, generator=generator) < noise, other, labels)
    f = torch.eye(C, dtype=torch.float64)[labels] if classes else 2.0 * labels[:, None].double() - 1
    y = labels if classes else labels[:, None].double()
    model = LinearModel(DenseFeatures(J), torch.zeros_like(f), confidence * f, y, likelihood)
    return model, path_of(model)


def path_of(model: LinearModel) -> CovariancePath:
    prior = ungrouped(torch.ones(P, dtype=torch.float64), 1.0)
    return FactoredPath(model.ggn(model.network_outputs).dense_curvature(), prior)


def select(model: LinearModel, path: CovariancePath, **settings: Any) -> float:
    # Without a lower bound by the evidence.
    return LeftOutLabels(**settings).select(model, path, BOUNDS, 0, 1e12).alpha


def lost_at(model: LinearModel, path: CovariancePath, alpha: float, num: int = 4000) -> float:
    """Nats a label that error bars cost, by other draws than those of the rule."""
    (V,) = path.covariances(model.features, torch.tensor([alpha], dtype=torch.float64))
    f, y = model.network_outputs, model.likelihood.unweighted_targets(model.targets)
    z = reference.normal(V, num, torch.Generator().manual_seed(1))

    def log_prob(f: Tensor) -> Tensor:
        if f.shape[-1] == 1:
            return torch.nn.functional.logsigmoid(f * (2 * y - 1))[..., 0]
        return f.log_softmax(-1).gather(-1, y.expand(f.shape[:-1])[..., None].long())[..., 0]

    return float((log_prob(f) - log_prob(f + z).logsumexp(0) + math.log(num)).mean())


def refitted_errors(model: LinearModel, direction: Tensor) -> float:
    """The part of labels that ridge regression on all other data predicts wrongly."""
    J = model.features.rows(torch.arange(model.features.num_data))
    rows, y = torch.einsum("c,ncp->np", direction, J), model.targets.flatten().long()
    ridge = 0.01 * float(rows.square().sum(1).mean())
    onehot = torch.eye(max(2, J.shape[1]), dtype=torch.float64)[y]
    mean, wrong = onehot.mean(0), 0
    for i in range(len(y)):
        others = torch.arange(len(y)) != i
        X = rows[others]
        w = torch.linalg.solve(X.T @ X + ridge * torch.eye(P, dtype=torch.float64), X.T @ (onehot - mean)[others])
        wrong += int((rows[i] @ w + mean).argmax() != y[i])
    return wrong / len(y)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_errors_are_those_of_regressions_without_each_datum(likelihood: Likelihood) -> None:
    model, path = problem(likelihood, noise=0.3)
    direction = rules.Draws(1, 0, rules.Stream.LEFT_OUT_LABELS).prior(model.features.num_outputs)[0].double()
    direction = direction - direction.mean() if len(direction) > 1 else direction
    wrong = refitted_errors(model, direction)
    assert 0.1 < wrong < 0.5
    rule = LeftOutLabels(standard_errors=1.5)
    chance = math.sqrt(wrong * (1 - wrong) / 120)
    assert rule._errors(model, path.prior, torch.arange(120), 0) == pytest.approx(wrong - 1.5 * chance)
    # Errors that the network makes itself are not counted twice: here of a tenth of the labels.
    f = model.network_outputs.clone()
    f[::10] = -f[::10]
    own = 12 / 120
    other = rule._errors(replace(model, network_outputs=f), path.prior, torch.arange(120), 0)
    assert other == pytest.approx(wrong - own - 1.5 * chance)
    assert LeftOutLabels(standard_errors=50.0)._errors(model, path.prior, torch.arange(120), 0) == 0.5 / 120


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_error_bars_cost_what_errors_warrant(likelihood: Likelihood, noise: float) -> None:
    model, path = problem(likelihood, noise=noise)
    warranted = A_ERROR * LeftOutLabels()._errors(model, path.prior, torch.arange(120), 0)
    alpha = select(model, path)
    assert lost_at(model, path, 2 * alpha) < warranted < lost_at(model, path, alpha / 2)
    # The rule has 32 pairs of draws.
    assert lost_at(model, path, alpha) == pytest.approx(warranted, rel=0.25)


def test_more_errors_more_nats_and_fewer_standard_errors_give_wider_error_bars() -> None:
    clean, noisy = problem(), problem(noise=0.3)
    assert select(*noisy) < 0.3 * select(*clean)
    assert select(*noisy, an_error=0.4) < select(*noisy)
    assert select(*noisy, standard_errors=0.0) < select(*noisy)


def test_the_evidence_of_the_trained_weights_is_a_lower_bound() -> None:
    model, path = problem(noise=0.3)
    alpha = 100 * select(model, path)
    norm = path.effective_dimension(alpha) / alpha
    assert LeftOutLabels().select(model, path, BOUNDS, 0, norm).alpha == pytest.approx(alpha, rel=0.01)


def test_weights_count_and_ignored_labels_do_not() -> None:
    model, path = problem(noise=0.3)
    alpha = select(model, path)
    twice, y = weighted(model.likelihood, model.targets, torch.full((120,), 2.0, dtype=torch.float64))
    heavy = replace(model, likelihood=twice, targets=y)
    # Twice the data at twice the precision are the same posterior, and a label costs as much.
    assert select(heavy, path) == pytest.approx(alpha)
    some = torch.arange(120) >= 40
    ignored = replace(model, targets=model.targets.where(some, -100))
    few = LeftOutLabels()._errors(ignored, path.prior, torch.arange(120)[some], 0)
    used = LeftOutLabels(in_order=True).share_used(ignored, path.prior, 0)
    z = torch.randn(8, 120, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lost = used(z[:, some], torch.arange(120)[some])
    other = LeftOutLabels().share_used(model, path.prior, 0)
    warranted = LeftOutLabels()._errors(model, path.prior, torch.arange(120), 0)
    assert lost == pytest.approx(other(z[:, some], torch.arange(120)[some]) * warranted / few)


def test_sums_of_columns_keep_the_kernel_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = problem(num=12)
    draws = rules.Draws
    monkeypatch.setattr(rules, "Draws", lambda num, seed, stream: draws(num, 0, stream))
    exact = rules._kernel(model.features, path.prior, torch.arange(12), 0)
    some, runs = torch.arange(12), range(400)
    found = torch.stack([rules._kernel(model.features, path.prior, some, s, 16) for s in runs])
    error = (found.mean(0) - exact) / (found.std(0) / 20)
    # 78 means of 400 within four standard errors each.
    assert float(error.abs().max()) < 4
    assert float(found.std(0).min()) > 0


def test_which_data_have_labels_to_leave_out() -> None:
    assert has_left_out_labels(Categorical(), 100, 10)
    assert not has_left_out_labels(Categorical(), 99, 10)
    assert has_left_out_labels(Bernoulli(), 20, 1)
    assert not has_left_out_labels(Bernoulli(), 20, 2)
    assert not has_left_out_labels(Categorical(), 10**6, 101)
    assert not has_left_out_labels(Categorical(shape=(4, 5)), 1000, 20)
    assert not has_left_out_labels(Poisson(), 1000, 1)


def test_its_products_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = problem()
    rule, other, cost = LeftOutLabels(), SelfConsistency(), Cost(jvp=2.0, vjp=3.0, gradient=4.0)
    search, plain = rule.cost(model.features), other.cost(model.features)
    assert search.fixed_vjps == 120
    assert search.operations(cost) == plain.operations(cost) + 120 * 3
    assert search.data_within(120, cost, search.operations(cost)) == 120
    assert search.data_within(120, cost, 360 + 0.8 * plain.operations(cost)) == 96
    found = rule.select(model, path, BOUNDS, 0, 1e12)
    used = LeftOutLabels(in_order=True).share_used(model, path.prior, 0)
    monkeypatch.setattr(LeftOutLabels, "num_vjps", lambda *arguments: 0)
    monkeypatch.setattr(LeftOutLabels, "share_used", lambda *arguments: used)
    without = rule.select(model, path, BOUNDS, 0, 1e12)
    # A pass is a JVP and a VJP of all data.
    assert found.history[0].passes - without.history[0].passes == pytest.approx(120 / 240, abs=1e-9)


def test_no_precision_that_costs_so_little_takes_the_largest_and_says_so() -> None:
    model, path = problem(noise=0.3)
    found = LeftOutLabels().select(model, path, (1e-8, select(model, path) / 100), 0, 1e12)
    assert "labels" in found.problems[0]
