"""Scores of the benchmark against cases worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from benchmarks.comparison import metrics
from benchmarks.comparison.predictions import Classified, Regressed, prediction

# Three data, two classes; the last is predicted wrongly.
PROBS = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
LABELS = torch.tensor([0, 1, 0])


@pytest.fixture
def classified() -> Classified:
    return Classified(PROBS.log(), PROBS.log()[None])


def test_scores_of_classes(classified: Classified) -> None:
    scores = metrics.score(classified, LABELS)
    assert_close(scores["log_likelihood"], (math.log(0.9) + math.log(0.6) + math.log(0.2)) / 3)
    # Σ_c (p_c − 1[c = y])²: 2·0.1², 2·0.4², 2·0.8²
    assert_close(scores["brier"], (2 * 0.01 + 2 * 0.16 + 2 * 0.64) / 3)
    assert_close(scores["accuracy"], 2 / 3)
    # each confidence has a bin of its own: |0.9 − 1|, |0.6 − 1|, |0.8 − 0|
    assert_close(scores["calibration_error"], (0.1 + 0.4 + 0.8) / 3)
    # the error is less confident than one of the two right ones
    assert_close(scores["error_auroc"], 0.5)
    assert_close(scores["joint_1"], scores["log_likelihood"])


def test_no_auroc_without_errors(classified: Classified) -> None:
    assert math.isnan(metrics.score(classified, torch.tensor([0, 1, 1]))["error_auroc"])


def test_other_data_are_told_by_entropy(classified: Classified) -> None:
    sure = Classified(torch.tensor([[0.999, 0.001], [0.15, 0.85]]).log(), PROBS.log()[None])
    # of the six pairs only (0.85, 0.9) is in the wrong order; a network without error bars has no other score
    assert metrics.ood_aurocs(sure, classified) == {"entropy": pytest.approx(5 / 6)}
    assert metrics.ood_aurocs(classified, classified)["entropy"] == 0.5


def test_scores_of_draws() -> None:
    # draws of the first datum agree that they do not know, those of the second are each certain of another class
    samples = torch.tensor([[[0.0, 0.0], [30.0, 0.0]], [[0.0, 0.0], [0.0, 30.0]]])
    p = Classified(torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), samples, epistemic=torch.tensor([3.0, 1.0]))
    found = metrics.detectors(p)
    assert_close(found["entropy"], torch.full((2,), math.log(2)).double())
    assert_close(found["mutual_information"], torch.tensor([0.0, math.log(2)]).double(), atol=1e-6, rtol=0)
    assert_close(found["variance"], torch.tensor([0.0, 2 * 15.0**2]))
    assert_close(found["epistemic"], torch.tensor([3.0, 1.0]))
    # the label of the second is 1, and both predict 0
    scores = metrics.score(p, torch.tensor([0, 1]))
    aurocs = [scores[f"error_auroc_{name}"] for name in ("entropy", "mutual_information", "variance", "epistemic")]
    assert aurocs == [0.5, 1.0, 1.0, 0.0]


def test_scores_of_numbers() -> None:
    mean, variance, y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])
    p = Regressed(mean, variance, mean[None], 1.0)
    scores = metrics.score(p, y)
    # both are 1 and 2 standard deviations off
    expected = -math.log(2 * math.pi) / 2 + (-0.5 - 2 - math.log(2)) / 2
    assert_close(scores["log_likelihood"], expected, atol=1e-6, rtol=0)
    assert_close(scores["rmse"], math.sqrt((1 + 16) / 2))
    assert scores["coverage"] == 0.5  # 1.645 standard deviations are 90 %
    # within 68.3 and 95.4 % central intervals: nothing up to 65 %, half from 70 to 95 %
    levels = [k / 20 for k in range(1, 20)]
    assert_close(scores["calibration_error"], sum(abs(v - 0.5 * (v > 0.683)) for v in levels) / 19, atol=1e-6, rtol=0)


def test_crps_is_the_integral() -> None:
    mean, stddev, y = 0.3, 1.7, torch.tensor([-1.0, 0.3, 4.0])
    grid = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    cdf = torch.distributions.Normal(mean, stddev).cdf(grid)
    for value in y:
        integral = torch.trapezoid((cdf - (grid >= value).double()) ** 2, grid)
        assert_close(
            float(metrics.crps(torch.tensor(mean), torch.tensor(stddev), value)), float(integral), atol=1e-4, rtol=0
        )


def test_joint_log_likelihood_of_a_group() -> None:
    # κ = 2 of two data: one group, each drawn b and 10 − b times; with equal columns the split does not matter
    ell = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]])
    assert_close(metrics.joint_log_likelihood(ell, 2), math.log((math.exp(-10) + math.exp(-30)) / 2))
    assert_close(metrics.joint_log_likelihood(ell, 1), math.log((math.exp(-1) + math.exp(-3)) / 2))


def test_joint_log_likelihood_of_a_network_alone_is_a_sum() -> None:
    ell = -torch.rand(1, 3000, generator=torch.Generator().manual_seed(0))
    # τ = 20 draws of the group: the mean of ell times 20
    expected = 20 * float(ell.mean())
    assert abs(metrics.joint_log_likelihood(ell, 3) - expected) < 0.03 * abs(expected)


def test_joint_log_likelihood_rewards_errors_that_come_together() -> None:
    # each sample is right about one half of the data: marginals equal those of a coin for each datum
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(2, 1, generator=generator) < torch.tensor([[0.0], [1.0]])
    together = torch.where(right.expand(2, 60), math.log(0.9), math.log(0.1))
    apart = torch.full((2, 60), math.log(0.5))
    assert_close(metrics.joint_log_likelihood(together, 1), metrics.joint_log_likelihood(apart, 1))
    assert metrics.joint_log_likelihood(together, 4) > metrics.joint_log_likelihood(apart, 4) + 5


def test_the_joint_log_likelihood_of_numbers_has_the_noise() -> None:
    p = Regressed(torch.zeros(2), torch.ones(2), torch.tensor([[0.0, 1.0], [2.0, 1.0]]), 4.0)
    normal = torch.distributions.Normal(p.samples, 2.0)
    assert_close(metrics.label_log_likelihoods(p, torch.tensor([1.0, 1.0])), normal.log_prob(torch.tensor(1.0)))


def test_the_joint_log_likelihood_of_a_gaussian_function_is_the_limit_of_its_mixtures() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.tensor([[1.0, 0.0], [0.8, 0.6]], dtype=torch.float64)
    mean, y = torch.tensor([0.5, -0.5], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    samples = mean + torch.randn(100_000, 2, generator=generator, dtype=torch.float64) @ root.T
    p = Regressed(mean, torch.full((2,), 3.0, dtype=torch.float64), samples, 2.0, gaussian=True)
    mixture = metrics.joint_log_likelihood(metrics.label_log_likelihoods(p, y), 2, shuffles=3)
    exact = metrics.gaussian_joint_log_likelihood(p, y, 2, shuffles=3)
    assert_close(exact, mixture, atol=0.01, rtol=0)
    normal = torch.distributions.Normal(mean, math.sqrt(3.0))
    assert_close(metrics.gaussian_joint_log_likelihood(p, y, 1), float(normal.log_prob(y).mean()))


def test_wasserstein_of_commuting_covariances() -> None:
    a, b = torch.diag(torch.tensor([4.0, 9.0])), torch.diag(torch.tensor([1.0, 16.0]))
    distance = metrics.logit_wasserstein(a[None], b[None])
    assert_close(float(distance), math.sqrt((2 - 1) ** 2 + (3 - 4) ** 2))
    # a zero covariance is a point: the square root of the trace
    assert_close(float(metrics.logit_wasserstein(a[None], 0 * a[None])), math.sqrt(13))


def test_symmetrised_divergence() -> None:
    p, q = PROBS[:1], PROBS[1:2]
    expected = 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6) + 0.4 * math.log(0.4 / 0.9) + 0.6 * math.log(6)
    assert_close(float(metrics.symmetrised_kl(p.log(), q.log())), expected)


def test_the_best_scale_is_found() -> None:
    assert abs(metrics.best_scale(lambda s: (s - math.log(3)) ** 2, 0.1, 20) - 3) < 1e-3


def test_members_become_a_mixture() -> None:
    outputs = torch.tensor([[[0.0, 2.0]], [[2.0, 0.0]]])
    p = prediction("classification", outputs)
    assert isinstance(p, Classified)
    assert_close(p.log_probs.exp(), torch.tensor([[0.5, 0.5]]))
    q = prediction("regression", torch.tensor([[[1.0]], [[3.0]]]), noise_variance=0.5)
    assert isinstance(q, Regressed)
    assert (float(q.mean), float(q.variance)) == (2.0, 1.5)
