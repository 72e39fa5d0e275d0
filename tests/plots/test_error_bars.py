import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import norm
from torch import Tensor

from laplace_sampling import Gaussian, Poisson, Prediction
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.plots import plot_error_bars
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.prediction import make_prediction

X = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


def predicted(likelihood: Likelihood, *shape: int, **options) -> Prediction:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
    deviations = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    return make_prediction(outputs, deviations, likelihood, **options)


def ends(pred: Prediction, level: float, noise: float, column: int = 0) -> tuple[Tensor, Tensor]:
    """Half the widths of both intervals, of the observation and of the function."""
    variance = (pred.deviations.flatten(2)[:, :, column] ** 2).mean(0)
    quantile = norm.ppf((1 + level) / 2)
    return quantile * (variance + noise).sqrt(), quantile * variance.sqrt()


def band_of(collection, x: Tensor) -> np.ndarray:
    """Lower and upper ends at each `x`."""
    points = collection.get_paths()[0].vertices
    at = [points[np.isclose(points[:, 0], float(value))][:, 1] for value in x]
    return np.array([[heights.min(), heights.max()] for heights in at])


@pytest.mark.parametrize("x", [X, X[:, None], X.numpy(), X.tolist()], ids=["[N]", "[N, 1]", "array", "list"])
@pytest.mark.parametrize("level", [0.95, 0.5])
def test_bands_over_the_inputs(x, level: float) -> None:
    pred = predicted(Gaussian(4.0), 4, 1)
    y = torch.arange(4.0)[:, None]
    ax = plot_error_bars(pred, x, y, level=level, num_samples=2)
    mean = pred.outputs[:, 0]
    for band, half in zip(ax.collections, ends(pred, level, 0.25), strict=True):
        assert_allclose(band_of(band, X), torch.stack([mean - half, mean + half], 1))
    first, second, line, targets = ax.lines
    order = X.argsort()
    for drawn, values in zip((line, first, second), (pred.outputs, *pred.samples[:2]), strict=True):
        assert_allclose(drawn.get_xydata(), torch.stack([X, values[:, 0]], 1)[order])
    assert_allclose(targets.get_xydata(), torch.stack([X, y[:, 0]], 1))
    share = f"{100 * level:.0f} %"
    names = {f"observation, {share}", f"function, {share}", "joint sample", "mean"}
    assert {text.get_text() for text in ax.texts} == names
    assert ax.get_legend() is None
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "y")


def test_bars_in_the_order_of_the_mean() -> None:
    pred = predicted(Gaussian(4.0), 6, 1)
    y = torch.arange(6.0)[:, None]
    ax = plot_error_bars(pred, y=y)
    mean, halves = pred.outputs[:, 0], ends(pred, 0.95, 0.25)
    order = mean.argsort()
    for bars, half in zip(ax.collections, halves, strict=True):
        drawn = sorted(bars.get_segments(), key=lambda segment: segment[0, 0])
        low, high = (mean - half)[order], (mean + half)[order]
        for place, segment in enumerate(drawn):
            assert_allclose(segment, [[place, low[place]], [place, high[place]]])
    for line, values in zip(ax.lines, (mean, y[:, 0]), strict=True):
        drawn = line.get_xydata()
        assert_allclose(drawn[drawn[:, 0].argsort()], torch.stack([torch.arange(6), values[order]], 1))
    assert ax.get_xlabel() == "data, by mean"
    names = ["observation, 95 %", "function, 95 %", "mean", "targets"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == names


def test_one_of_several_outputs() -> None:
    pred = predicted(Gaussian(torch.tensor([1.0, 4.0, 9.0, 16.0])), 4, 2, 2)
    y = torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(2))
    ax = plot_error_bars(pred, X, y, output=3, num_samples=1)
    assert_allclose(ax.lines[0].get_ydata(), pred.samples[0, :, 1, 1][X.argsort()])
    assert_allclose(ax.lines[1].get_ydata(), pred.outputs[:, 1, 1][X.argsort()])
    assert_allclose(ax.lines[2].get_ydata(), y[:, 1, 1])
    mean, half = pred.outputs[:, 1, 1], ends(pred, 0.95, 1 / 16, column=3)[0]
    assert_allclose(band_of(ax.collections[0], X), torch.stack([mean - half, mean + half], 1))
    with pytest.raises(ValueError, match="output=0"):
        plot_error_bars(pred)
    with pytest.raises(ValueError, match="output=4"):
        plot_error_bars(pred, output=4)
    with pytest.raises(ValueError, match="output=-1"):
        plot_error_bars(pred, output=-1)


def test_conformal_intervals_are_those_of_observations() -> None:
    conformal = SplitConformal(torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.tensor([2]), num_samples=8)
    pred = predicted(Gaussian(4.0), 4, 1, conformal=conformal)
    ax = plot_error_bars(pred, X, level=0.6)
    mean, variance = pred.outputs[:, 0], (pred.deviations[:, :, 0] ** 2).mean(0)
    for band, half in zip(ax.collections, (3 * (variance + 0.25).sqrt(), norm.ppf(0.8) * variance.sqrt()), strict=True):
        assert_allclose(band_of(band, X), torch.stack([mean - half, mean + half], 1))


def test_what_cannot_be_drawn_is_refused() -> None:
    pred = predicted(Gaussian(), 4, 1)
    with pytest.raises(TypeError, match="CountPrediction"):
        plot_error_bars(predicted(Poisson(), 4, 1))
    with pytest.raises(ValueError, match=r"x=.*shape"):
        plot_error_bars(pred, torch.zeros(4, 2))
    with pytest.raises(TypeError, match="abcd"):
        plot_error_bars(pred, "abcd")
    with pytest.raises(ValueError, match="targets"):
        plot_error_bars(pred, X, torch.zeros(4))
    with pytest.raises(ValueError, match=r"num_samples=\.\.\."):
        plot_error_bars(pred, X, num_samples=0.5)
    with pytest.raises(ValueError, match="level"):
        plot_error_bars(pred, level=2)
    measurements = predicted(Gaussian(), 4, 1, has_noise=False)
    with pytest.raises(ValueError, match="observed=True"):
        plot_error_bars(measurements)
