import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve

from laplace_sampling import Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson, Prediction
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.plots import plot_reliability
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.prediction import make_prediction


def predicted(likelihood: Likelihood, *shape: int, **options) -> Prediction:
    generator = torch.Generator().manual_seed(1)
    outputs = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    deviations = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    return make_prediction(outputs, deviations, likelihood, **options)


def labels_of(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(2))


def calibration_error(probability: torch.Tensor, right: torch.Tensor, num_bins: int) -> float:
    """The expected calibration error: differences of share and mean probability, by the data of each bin."""
    bins = np.minimum((probability.numpy() * num_bins).astype(int), num_bins - 1)
    differences = np.bincount(bins, right.double().numpy() - probability.numpy(), num_bins)
    return float(np.abs(differences).sum()) / len(probability)


def drawn_by(ax) -> list[np.ndarray]:
    """The points of each prediction."""
    return [container.lines[0].get_xydata() for container in ax.containers if hasattr(container, "has_yerr")]


def legend_of(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("num_bins", [5, 15])
def test_classes_are_compared_in_bins_of_the_largest_probability(num_bins: int) -> None:
    pred, y = predicted(Categorical(), 200, 4), labels_of(4, 200)
    ax = plot_reliability(pred, y, num_bins=num_bins)
    largest, chosen = pred.probs.max(1)
    accuracy, confidence = calibration_curve(chosen == y, largest, n_bins=num_bins)
    assert_allclose(drawn_by(ax)[0], np.stack([confidence, accuracy], 1))
    assert_allclose(ax.lines[0].get_xydata(), [[0, 0], [1, 1]])
    error = calibration_error(largest, chosen == y, num_bins)
    assert legend_of(ax) == ["share of labels", f"predictions, ECE {error:.3f}"]
    shares, edges = np.histogram(largest, num_bins, (0, 1))
    assert [text.get_text() for text in ax.texts] == [str(count) for count in shares if count]
    bars = ax.collections[0].get_segments()
    for bar, count, share in zip(bars, shares[shares > 0], accuracy, strict=True):
        interval = binomtest(round(share * count), int(count)).proportion_ci(0.95, "wilson")
        assert_allclose(bar[:, 1], [interval.low, interval.high], atol=1e-9)
    assert_allclose([bar.get_height() for bar in ax.patches], shares / 200)
    assert_allclose([bar.get_x() for bar in ax.patches], edges[:-1])
    assert_allclose([bar.get_width() for bar in ax.patches], 1 / num_bins)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("probability of the predicted class", "share of right labels")


@pytest.mark.parametrize("shape", [(200,), (200, 1), (80, 3)])
def test_labels_of_zero_and_one_are_compared_with_the_probability_of_one(shape: tuple[int, ...]) -> None:
    pred, y = predicted(Bernoulli(), *shape), labels_of(2, *shape).double()
    ax = plot_reliability(pred, y, num_bins=10)
    share, confidence = calibration_curve(y.flatten(), pred.probs.flatten(), n_bins=10)
    assert_allclose(drawn_by(ax)[0], np.stack([confidence, share], 1))
    error = calibration_error(pred.probs.flatten(), y.flatten(), 10)
    assert legend_of(ax)[1] == f"predictions, ECE {error:.3f}"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predicted probability of label 1", "share of label 1")


@pytest.mark.parametrize("class_dim", [1, -1])
def test_positions_count_each_and_labels_to_ignore_not_at_all(class_dim: int) -> None:
    pred = predicted(Categorical(class_dim=class_dim, ignore_index=7), 30, *((4, 6) if class_dim == 1 else (6, 4)))
    y = labels_of(4, 30, 6)
    y[:, 2] = 7
    probs = pred.probs.movedim(class_dim, -1)[y != 7]
    accuracy, confidence = calibration_curve(probs.argmax(-1) == y[y != 7], probs.amax(-1), n_bins=15)
    ax = plot_reliability(pred, y)
    assert_allclose(drawn_by(ax)[0], np.stack([confidence, accuracy], 1))
    assert_allclose(sum(bar.get_height() for bar in ax.patches), 1)
    with pytest.raises(ValueError, match="ignore_index"):
        plot_reliability(pred, torch.full_like(y, 7))


def test_certain_predictions_are_in_the_last_bin() -> None:
    outputs = torch.tensor([[800.0, 0.0], [0.0, 800.0]], dtype=torch.float64)
    pred = make_prediction(outputs, torch.zeros(2, 2, 2, dtype=torch.float64), Categorical())
    ax = plot_reliability(pred, torch.tensor([0, 0]), num_bins=3)
    assert_allclose(drawn_by(ax)[0], [[1, 0.5]])
    assert_allclose([bar.get_height() for bar in ax.patches], [0, 0, 1])


def test_several_models_are_drawn_together() -> None:
    preds, y = {"one": predicted(Categorical(), 50, 4), "other": predicted(Categorical(), 50, 4)}, labels_of(4, 50)
    preds["other"] = make_prediction(0.1 * preds["one"].outputs, preds["one"].deviations, Categorical())
    ax = plot_reliability(preds, y, num_bins=5)
    for pred, points in zip(preds.values(), drawn_by(ax), strict=True):
        largest, chosen = pred.probs.max(1)
        accuracy, confidence = calibration_curve(chosen == y, largest, n_bins=5)
        assert_allclose(points, np.stack([confidence, accuracy], 1))
    assert [name.split(",")[0] for name in legend_of(ax)] == ["one", "other"]
    assert not ax.patches


def coverages(mean, variance, y, num_bins: int) -> tuple[list[float], list[float]]:
    """By the probability of a normal error that is smaller than each."""
    inside = torch.special.erf((y - mean).abs() / (2 * variance).sqrt()).flatten()
    levels = [number / (num_bins + 1) for number in range(1, num_bins + 1)]
    return levels, [float((inside <= level).double().mean()) for level in levels]


@pytest.mark.parametrize("num_bins", [4, 15])
@pytest.mark.parametrize("likelihood", [Gaussian(4.0), HeteroscedasticGaussian()], ids=["equal", "heteroscedastic"])
def test_intervals_of_a_regression_are_compared_with_the_targets(likelihood: Likelihood, num_bins: int) -> None:
    pred = predicted(likelihood, 60, 2)
    mean = pred.outputs if isinstance(likelihood, Gaussian) else pred.outputs[:, :1]
    generator = torch.Generator().manual_seed(3)
    y = mean + torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    variance = (pred.deviations**2).mean(0)
    if isinstance(likelihood, Gaussian):
        variance = variance + 0.25
    else:
        variance = variance[:, :1] + (pred.outputs[:, 1:] + variance[:, 1:] / 2).exp()
    levels, shares = coverages(mean, variance, y, num_bins)
    ax = plot_reliability(pred, y, num_bins=num_bins)
    assert_allclose(ax.lines[1].get_xydata(), np.stack([levels, shares], 1))
    distance = sum(abs(share - level) for share, level in zip(shares, levels, strict=True)) / num_bins
    assert legend_of(ax) == [f"intervals, mean distance {distance:.3f}"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("probability of the interval", "share of targets inside")


def test_conformal_intervals_are_those_that_are_judged() -> None:
    # Scores of three data: below a probability of 1/2 the first, then the second, then the third and infinity.
    scores = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    conformal = SplitConformal(scores, torch.tensor([3]), num_samples=8)
    pred = predicted(Gaussian(), 40, 1, conformal=conformal)
    generator = torch.Generator().manual_seed(3)
    y = pred.outputs + 2 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    ratio = (y - pred.outputs).abs() / ((pred.deviations**2).mean(0) + 1).sqrt()
    shares = [float((ratio <= math.ceil(4 * level)).double().mean()) for level in (0.2, 0.4, 0.6)] + [1.0]
    assert_allclose(plot_reliability(pred, y, num_bins=4).lines[1].get_ydata(), shares)


def test_what_cannot_be_drawn_is_refused() -> None:
    pred, y = predicted(Categorical(), 5, 3), labels_of(3, 5)
    with pytest.raises(ValueError, match="4 targets"):
        plot_reliability(pred, y[:4])
    with pytest.raises(ValueError, match="shape"):
        plot_reliability(predicted(Gaussian(), 5, 1), torch.zeros(5))
    with pytest.raises(TypeError, match="CountPrediction"):
        plot_reliability(predicted(Poisson(), 5, 1), torch.ones(5, 1))
    with pytest.raises(TypeError, match=r"\bdict\b"):
        plot_reliability({}, y)
    with pytest.raises(TypeError, match="Tensor"):
        plot_reliability({"one": pred, "other": y}, y)
    with pytest.raises(TypeError, match="together"):
        plot_reliability({"one": pred, "other": predicted(Gaussian(), 5, 1)}, y)
    with pytest.raises(ValueError, match="num_bins"):
        plot_reliability(pred, y, num_bins=0)
