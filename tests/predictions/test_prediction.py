import math
from dataclasses import replace

import pytest
import torch
from cases import make_case
from flat_settings import fit_case
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.data import batches
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.predictions.prediction import ClassificationPrediction, RegressionPrediction


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regression(noise=2.0, shape=(5, 3), num: int = 7) -> RegressionPrediction:
    return RegressionPrediction(randn(*shape), 0.3 * randn(num, *shape, seed=1), Gaussian(noise))


def classification(num: int = 9, likelihood=None, classes: int = 4) -> ClassificationPrediction:
    return ClassificationPrediction(randn(5, classes), randn(num, 5, classes, seed=1), likelihood or Categorical())


@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (5,), (5, 2, 3, 3)])
@pytest.mark.parametrize("noise", [2.0, "per_output"])
def test_regression_moments(shape: tuple[int, ...], noise) -> None:
    outputs = math.prod(shape[1:])
    b = torch.arange(1.0, outputs + 1) if noise == "per_output" else torch.tensor(noise)
    pred = regression(b, shape)
    assert pred.mean.shape == pred.variance.shape == pred.stddev.shape == shape
    assert_close(pred.samples, pred.mean + pred.deviations)
    assert_close(pred.stddev**2, pred.variance)
    covariance, joint = pred.covariance(), pred.joint_covariance()
    assert_close(covariance.diagonal(dim1=1, dim2=2).reshape(shape), pred.variance)
    flat = pred.deviations.reshape(7, -1)
    assert_close(joint, flat.T @ flat / 7)
    for n in range(5):
        block = slice(n * outputs, (n + 1) * outputs)
        assert_close(joint[block, block], covariance[n])
    noise_covariance = torch.diag((1 / b.double()).expand(outputs))
    dense = torch.distributions.MultivariateNormal(pred.mean.reshape(5, -1), covariance + noise_covariance)
    y = randn(*shape, seed=4)
    assert_close(pred.log_prob(y), dense.log_prob(y.reshape(5, -1)))
    assert_close(pred.distribution().variance.reshape(shape), pred.variance + pred.noise_variance)


@pytest.mark.parametrize("shape", [(5, 1), (5,)])
def test_the_density_of_one_output_takes_no_factorisation(shape: tuple[int, ...]) -> None:
    pred = regression(shape=shape)
    infinite = replace(pred, sampled=pred.deviations * math.inf)
    assert infinite.log_prob(randn(*shape, seed=4)).tolist() == [-math.inf] * 5


def test_regression_targets_are_checked() -> None:
    with pytest.raises(ValueError, match="shape"):
        regression(shape=(5, 1)).log_prob(torch.zeros(5))


def mirrored(pred: ClassificationPrediction) -> torch.Tensor:
    return torch.cat([pred.samples, 2 * pred.logits - pred.samples])


def test_links_agree_with_their_formulas() -> None:
    pred = classification()
    f, S = pred.logits, pred.deviations
    assert_close(pred.probs, ((f + S).softmax(-1) + (f - S).softmax(-1)).mean(0) / 2)
    variance = (S**2).mean(0)
    assert_close(pred.probs_with("probit"), (f / (1 + math.pi * variance / 8).sqrt()).softmax(-1))
    # The Laplace bridge from dense covariances (Hobbhahn et al. 2022).
    cov = torch.einsum("knc,knd->ncd", S, S) / len(S)
    total = cov.sum((1, 2))
    mean = f - cov.sum(2) * f.sum(1, keepdim=True) / total[:, None]
    var = (cov - torch.einsum("nc,nd->ncd", cov.sum(2), cov.sum(1)) / total[:, None, None]).diagonal(dim1=1, dim2=2)
    alpha = (1 - 2 / 4 + mean.exp() / 16 * (-mean).exp().sum(1, keepdim=True)) / var
    assert_close(pred.probs_with("bridge"), alpha / alpha.sum(1, keepdim=True))


@pytest.mark.parametrize("link", ["mc", "probit", "bridge"])
def test_probabilities_sum_to_one_and_without_spread_are_the_networks(link: str) -> None:
    pred = classification()
    assert_close(pred.probs_with(link).sum(-1), torch.ones(5, dtype=torch.float64))
    narrow = ClassificationPrediction(pred.logits, 1e-6 * pred.deviations, Categorical())
    if link != "bridge":  # a Dirichlet of equal variances has the softmax as its mean only for two classes
        assert_close(narrow.probs_with(link), pred.logits.softmax(-1), rtol=1e-4, atol=1e-6)


def test_probit_is_close_to_the_integral_for_a_sigmoid() -> None:
    logits, num = torch.tensor([[-2.0], [0.5], [3.0]]).double(), 200_000
    pred = ClassificationPrediction(logits, 1.5 * randn(num, 3, 1), Bernoulli())
    assert_close(pred.probs_with("probit"), pred.probs, rtol=0, atol=0.02)


def test_bernoulli_probabilities() -> None:
    pred = classification(likelihood=Bernoulli())
    assert_close(pred.probs, mirrored(pred).sigmoid().mean(0))
    assert pred.entropy.shape == (5, 4)
    y = (randn(5, 4, seed=3) > 0).double()
    each = torch.distributions.Bernoulli(logits=mirrored(pred)).log_prob(y).sum(-1)
    assert_close(pred.log_prob(y), each.exp().mean(0).log())
    with pytest.raises(ValueError, match="bridge"):
        pred.probs_with("bridge")


def test_uncertainties_and_log_probabilities() -> None:
    pred = classification()
    y = torch.tensor([0, 3, 1, 1, 2])
    p = mirrored(pred).softmax(-1)
    entropy = -(p.mean(0) * p.mean(0).log()).sum(-1)
    assert_close(pred.entropy, entropy)
    assert_close(pred.mutual_information, entropy + (p * p.log()).sum(-1).mean(0))
    assert (pred.mutual_information >= 0).all()
    chosen = p[:, torch.arange(5), y]
    assert_close(pred.log_prob(y), chosen.mean(0).log())
    assert_close(pred.log_prob(y), pred.probs[torch.arange(5), y].log())
    assert_close(pred.joint_log_prob(y), chosen.prod(1).mean().log())
    # Jensen: joint differs from the sum of marginals, but not without spread.
    single = ClassificationPrediction(pred.logits, 0 * pred.deviations[:1], Categorical())
    assert_close(single.joint_log_prob(y), single.log_prob(y).sum())


def test_mirror_images_take_most_of_the_noise_of_few_samples() -> None:
    """A spread of 0.3: what is left of the variance is of second order, here below a tenth over 400 repeats."""
    f, many = 2 * randn(1, 4), 0.3 * randn(400, 16, 1, 4, seed=1)
    probs = torch.stack([ClassificationPrediction(f, S, Categorical()).probs for S in many])
    plain = torch.stack([(f + S).softmax(-1).mean(0) for S in many])
    assert bool((probs.var(0) < 0.1 * plain.var(0)).all())
    assert bool(((probs.mean(0) - plain.mean(0)).abs() < 4 * (plain.var(0) / 400).sqrt()).all())


def test_extreme_logits_do_not_overflow() -> None:
    pred = ClassificationPrediction(1e3 * randn(5, 4), randn(9, 5, 4, seed=1), Categorical())
    assert pred.log_prob(torch.zeros(5).long()).isfinite().all()
    assert pred.entropy.isfinite().all()
    binary = ClassificationPrediction(1e3 * randn(5, 4), randn(9, 5, 4, seed=1), Bernoulli())
    assert binary.log_prob(torch.zeros(5, 4)).isfinite().all()


def test_unknown_link_and_wrong_labels() -> None:
    with pytest.raises(ValueError, match="gibbs"):
        classification().probs_with("gibbs")
    with pytest.raises(TypeError, match=r"y\.long"):
        classification().log_prob(torch.zeros(5))


@pytest.mark.parametrize("name", ["regression", "classification", "binary", "poisson", "heteroscedastic", "multi_task"])
def test_targets_of_other_data_are_refused(name: str) -> None:
    case = make_case(name)
    likelihood, y = case.given
    la = LinearisedLaplace(case.model, likelihood, num_samples=3).fit([(case.x, y)], progress=False)
    prediction = la.predict(case.x)
    some = batches.take(y, slice(3))
    with pytest.raises(ValueError, match="3 targets"):
        prediction.log_prob(some)
    without_numbers = batches.batched(y)[1]([t.to("meta") for t in batches.batched(y)[0]])
    with pytest.raises(ValueError, match="meta"):
        prediction.log_prob(without_numbers)
    with pytest.raises(TypeError, match=r"[Tt]argets"):
        prediction.log_prob({head: None for head in y} if isinstance(y, dict) else None)
    arrays = batches.batched(y)[1]([t.numpy() for t in batches.batched(y)[0]])
    assert torch.equal(prediction.log_prob(arrays), prediction.log_prob(y))


def test_epistemic_of_classes_is_the_formula() -> None:
    case = make_case("classification")
    pred = fit_case(case, "exact", num_samples=16).predict(case.x)
    entropy = -(pred.probs * pred.probs.log()).sum(-1)
    for n in range(len(case.x)):
        f, top = pred.logits[n], int(pred.logits[n].argmax())
        others = [c for c in range(4) if c != top]
        V = pred.covariance()[n]
        variance = sum(V[top, top] + V[c, c] - 2 * V[top, c] for c in others)
        size = sum(1 + (f[top] - f[c]) ** 2 for c in others)
        assert_close(pred.epistemic[n], entropy[n].exp() * variance / size)


@pytest.mark.parametrize("name", ["segmentation", "token_labels", "binary", "multi_label"])
def test_epistemic_has_the_shape_of_the_entropy(name: str) -> None:
    case = make_case(name)
    pred = fit_case(case, "exact").predict(case.x)
    assert pred.epistemic.shape == pred.entropy.shape
    assert (pred.epistemic > 0).all()
    if name == "binary":
        assert_close(pred.epistemic, pred.entropy.exp() * pred.variance / (1 + pred.logits**2))


def test_epistemic_does_not_depend_on_the_size_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    f = 20 * torch.randn(50, 5, generator=generator, dtype=torch.float64)
    d = 2 * torch.randn(32, 50, 5, generator=generator, dtype=torch.float64)

    def of(scale: float) -> ClassificationPrediction:
        return ClassificationPrediction(scale * f, scale * d, Categorical())

    change = (of(2.0).epistemic / of(1.0).epistemic).log().abs()
    # Entropies change, the ratio hardly does; the variance of the logits is four times as large.
    assert float(change.median()) < 0.1
    # A mean of the logits, to which a softmax is blind, has no effect.
    shifted = ClassificationPrediction(f + 3, d + torch.randn(32, 50, 1, generator=generator), Categorical())
    assert_close(shifted.epistemic, of(1.0).epistemic)


@pytest.mark.parametrize("name", ["regression", "image_regression", "poisson", "heteroscedastic"])
def test_epistemic_of_numbers_is_the_standard_deviation_of_the_function(name: str) -> None:
    case = make_case(name)
    pred = fit_case(case, "exact").predict(case.x)
    assert_close(pred.epistemic, pred.stddev.reshape(len(case.x), -1).norm(dim=1))
