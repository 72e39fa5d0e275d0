import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.metrics import roc_auc_score, roc_curve

from laplace_sampling import Gaussian, Prediction
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.plots import plot_ood
from laplace_sampling.predictions.prediction import make_prediction


def classification(num: int, size: float, positions: tuple[int, ...] = ()) -> Prediction:
    generator = torch.Generator().manual_seed(num)
    outputs = torch.randn(num, 3, *positions, generator=generator, dtype=torch.float64)
    deviations = size * torch.randn(8, num, 3, *positions, generator=generator, dtype=torch.float64)
    return make_prediction(outputs, deviations, Categorical())


def regression(stddev: list[float]) -> Prediction:
    deviations = torch.tensor(stddev, dtype=torch.float64)[None, :, None]
    return make_prediction(torch.zeros(len(stddev), 1, dtype=torch.float64), deviations, Gaussian())


@pytest.mark.parametrize("score", ["epistemic", "entropy", "mutual_information"])
@pytest.mark.parametrize("positions", [(), (2, 2)])
def test_the_curve_beside_the_histograms_is_the_roc_curve(score: str, positions: tuple[int, ...]) -> None:
    inside, outside = classification(40, 0.5, positions), classification(30, 1.5, positions)
    ax = plot_ood(inside, outside, score)
    scores = [getattr(pred, score).flatten() for pred in (inside, outside)]
    labels = [0] * len(scores[0]) + [1] * len(scores[1])
    first, curve = ax.figure.axes
    assert first is ax
    false, true, _ = roc_curve(labels, torch.cat(scores), drop_intermediate=False)
    assert_allclose(curve.lines[1].get_xydata(), np.stack([false, true], 1))
    fpr95 = false[np.argmax(true >= 0.95)]
    assert_allclose(curve.lines[2].get_xydata(), [[fpr95, true[np.argmax(true >= 0.95)]]])
    auroc = roc_auc_score(labels, torch.cat(scores))
    assert [text.get_text() for text in curve.texts] == [f"AUROC {auroc:.3f}\nFPR95 {fpr95:.3f}"]
    times = 4 if positions else 1
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == [f"inside, {40 * times}", f"outside, {30 * times}"]
    assert ax.get_xlabel() == "score: " + score.replace("_", " ")


def test_ties_count_half() -> None:
    curve = plot_ood(regression([1.0, 2.0]), regression([2.0, 3.0])).figure.axes[1]
    # Of four pairs three are larger and one is equal; half of those inside reach what all from outside do.
    assert curve.texts[0].get_text() == "AUROC 0.875\nFPR95 0.500"


@pytest.mark.parametrize("log", [True, False])
def test_both_histograms_are_shares_in_the_same_bins(log: bool) -> None:
    """On an even axis where a score is zero."""
    low, high = [0.1 if log else 0.0, 0.1, 0.2, 0.9], [0.5, 3.0, 10.0]
    ax = plot_ood(regression(low), regression(high), num_bins=4)
    edges = np.geomspace(0.1, 10, 5) if log else np.linspace(0, 10, 5)
    shares = ([0.75, 0.25, 0, 0], [0, 1 / 3, 1 / 3, 1 / 3]) if log else ([1, 0, 0, 0], [1 / 3, 1 / 3, 0, 1 / 3])
    for drawn, expected in zip(ax.patches, shares, strict=True):
        assert_allclose(drawn.get_data().edges, edges)
        assert_allclose(drawn.get_data().values, expected)
    assert ax.get_xscale() == ("log" if log else "linear")


@pytest.mark.parametrize("size", [2.0, 0.0])
def test_equal_scores_have_bins(size: float) -> None:
    ax = plot_ood(regression([size]), regression([size]))
    assert_allclose([patch.get_data().values.sum() for patch in ax.patches], 1)


def test_what_cannot_be_drawn_is_refused() -> None:
    pred = regression([1.0, 2.0])
    with pytest.raises(TypeError, match="outside="):
        plot_ood(pred, torch.ones(3))
    message = "RegressionPrediction"
    for score in ("surprise", "entropy", "noise_variance", "interval", 3):
        with pytest.raises(ValueError, match=message):
            plot_ood(pred, pred, score)
    with pytest.raises(ValueError, match="NaN"):
        plot_ood(pred, regression([float("nan")]))
    with pytest.raises(ValueError, match="num_bins"):
        plot_ood(pred, pred, num_bins=0)
