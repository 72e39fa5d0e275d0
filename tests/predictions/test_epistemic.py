"""One number for what the data do not say of a datum."""

import pytest
import torch
from cases import make_case
from flat_settings import fit_case
from torch.testing import assert_close

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.predictions.prediction import ClassificationPrediction


def test_of_classes_it_is_the_formula() -> None:
    case = make_case("classification")
    pred = fit_case(case, "exact", num_samples=16).predict(case.x)
    entropy = -(pred.probs * pred.probs.log()).sum(-1)
    for n in range(len(case.x)):
        f, top = pred.logits[n], int(pred.logits[n].argmax())
        others = [c for c in range(4) if c != top]
        variance = sum(((pred.samples[:, n, top] - pred.samples[:, n, c] - f[top] + f[c]) ** 2).mean() for c in others)
        size = sum(1 + (f[top] - f[c]) ** 2 for c in others)
        assert_close(pred.epistemic[n], entropy[n].exp() * variance / size)


@pytest.mark.parametrize("name", ["segmentation", "token_labels", "binary", "multi_label"])
def test_it_has_the_shape_of_the_entropy(name: str) -> None:
    case = make_case(name)
    pred = fit_case(case, "exact").predict(case.x)
    assert pred.epistemic.shape == pred.entropy.shape
    assert (pred.epistemic > 0).all()
    if name == "binary":
        ratio = (pred.deviations**2).mean(0)
        assert_close(pred.epistemic, pred.entropy.exp() * ratio / (1 + pred.logits**2))


def test_it_does_not_depend_on_the_size_of_features() -> None:
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
def test_of_numbers_it_is_the_standard_deviation_of_the_function(name: str) -> None:
    case = make_case(name)
    pred = fit_case(case, "exact").predict(case.x)
    assert_close(pred.epistemic, pred.stddev.reshape(len(case.x), -1).norm(dim=1))
