import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from laplace_sampling import Bernoulli, Gaussian, Poisson, Prediction
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.plots import plot_most_unsure, plot_prediction_sets, plot_rejection
from laplace_sampling.predictions.prediction import make_prediction


def predicted(likelihood: Likelihood, *shape: int) -> Prediction:
    generator = torch.Generator().manual_seed(1)
    outputs = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    deviations = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    return make_prediction(outputs, deviations, likelihood)


def labels_of(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(2))


def accuracies(right: np.ndarray, order: np.ndarray) -> list[float]:
    """Of the best one, the best two, and so on."""
    return [float(np.mean(right[order[:num]])) for num in range(1, len(right) + 1)]


@pytest.mark.parametrize("binary", [False, True])
def test_accuracy_of_what_is_kept(binary: bool) -> None:
    pred, y = (predicted(Bernoulli(), 30, 2), labels_of(2, 30, 2).double()) if binary else (None, None)
    if pred is None or y is None:
        pred, y = predicted(Categorical(ignore_index=9), 40, 3), labels_of(3, 40)
        y[4] = 9
    ax = plot_rejection(pred, y)
    p = pred.probs.numpy()
    if binary:
        right, top = ((p > 0.5) == y.numpy()).ravel(), np.maximum(p, 1 - p).ravel()
    else:
        given = y.numpy() != 9
        right, top = (p.argmax(1) == y.numpy())[given], p.max(1)[given]
    num = len(right)
    lines = {line.get_color(): line for line in ax.lines if len(line.get_xdata()) == num}
    best, ours = lines.values()
    for line, order in ((ours, np.argsort(-top)), (best, np.argsort(~right, kind="stable"))):
        assert_allclose(line.get_ydata(), accuracies(right, order))
        assert_allclose(line.get_xdata(), 1 - np.arange(1, num + 1) / num, atol=1e-12)
    mean = np.mean(accuracies(right, np.argsort(-top)))
    assert f"predictions, mean {mean:.3f}" in [text.get_text() for text in ax.texts]


def test_errors_of_a_regression_in_the_order_of_the_variance() -> None:
    preds = {"one": predicted(Gaussian(), 20, 2), "other": predicted(Gaussian(), 20, 2)}
    y = preds["one"].outputs + torch.randn(20, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y[3, 1] = float("nan")
    ax = plot_rejection(preds, y)
    given = ~y.isnan()
    squares = ((y - preds["one"].outputs) ** 2)[given].numpy()
    order = np.argsort((preds["one"].deviations ** 2).mean(0)[given].numpy())
    curves = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 39]
    assert len(curves) == 2
    assert_allclose(curves[0], np.sqrt(accuracies(squares, order)))
    assert {text.get_text().split(",")[0] for text in ax.texts} == {"one", "other"}


def test_sizes_of_sets_and_how_often_they_have_the_label() -> None:
    pred, y = predicted(Categorical(class_dim=-1), 20, 3, 4), labels_of(4, 20, 3)
    ax = plot_prediction_sets(pred, y, level=0.8)
    sets = pred.prediction_set(0.8).numpy()
    sizes, right = sets.sum(-1).ravel(), np.take_along_axis(sets, y.numpy()[..., None], -1).ravel()
    found = np.unique(sizes)
    assert len(found) > 1
    assert_allclose([bar.get_x() + bar.get_width() / 2 for bar in ax.patches], found)
    assert_allclose([bar.get_height() for bar in ax.patches], [np.mean(sizes == size) for size in found])
    assert [text.get_text() for text in ax.texts] == [f"{right[sizes == size].mean():.2f}" for size in found]
    assert f"mean size {sizes.mean():.3g}, {right.mean():.3f} contain" in ax.get_title()
    assert not plot_prediction_sets(predicted(Bernoulli(), 20, 2)).texts


def test_the_most_unsure_images_and_what_is_predicted_of_them() -> None:
    pred, y = predicted(Categorical(), 20, 3), labels_of(3, 20)
    images = torch.rand(20, 3, 5, 4, generator=torch.Generator().manual_seed(3))
    first = plot_most_unsure(pred, images, y, score="entropy", num=7)
    axes = first.figure.axes
    order = pred.entropy.argsort(descending=True)[:7]
    assert len(axes) == 7
    for ax, datum in zip(axes, order.tolist(), strict=True):
        picture = images[datum].movedim(0, -1).numpy()
        drawn = ax.images[0].get_array()
        assert_allclose(drawn, (picture - picture.min()) / (picture.max() - picture.min()), rtol=1e-5)
        top, chosen = pred.probs[datum].max(0)
        wrong = int(chosen) != int(y[datum])
        assert ax.get_title() == f"{int(chosen)}: {float(top):.2f}" + (f" ({int(y[datum])})" if wrong else "")
        assert (ax.title.get_color() == "black") != wrong
    numbers = predicted(Gaussian(), 4, 1)
    ax = plot_most_unsure(numbers, torch.zeros(4, 2, 2), num=1)
    worst = int(numbers.epistemic.argmax())
    stddev = float(numbers.observation_variance[worst].sqrt())
    assert ax.get_title() == f"{float(numbers.outputs[worst]):.3g} ± {stddev:.2g}"


def test_images_with_a_class_for_each_pixel_are_ordered_by_the_mean_over_pixels() -> None:
    pred = predicted(Categorical(class_dim=1), 9, 3, 4, 5)
    images = torch.rand(9, 4, 5, generator=torch.Generator().manual_seed(3))
    for score in ("epistemic", "entropy"):
        first = plot_most_unsure(pred, images, score=score, num=9)
        order = getattr(pred, score).mean((1, 2)).argsort(descending=True)
        for ax, datum in zip(first.figure.axes, order.tolist(), strict=True):
            picture = images[datum].numpy()
            drawn = (picture - picture.min()) / (picture.max() - picture.min())
            assert_allclose(ax.images[0].get_array(), drawn, rtol=1e-5)
            assert not ax.get_title()


def test_what_cannot_be_drawn_is_refused() -> None:
    pred, y = predicted(Categorical(), 5, 3), labels_of(3, 5)
    soft = torch.full((5, 3), 1 / 3)
    for draw in (plot_rejection, plot_prediction_sets):
        with pytest.raises(ValueError, match="probabilities"):
            draw(pred, soft)
        with pytest.raises(TypeError, match="CountPrediction"):
            draw(predicted(Poisson(), 5, 1), y)
        with pytest.raises(ValueError, match="4 targets"):
            draw(pred, y[:4])
    with pytest.raises(TypeError, match="together"):
        plot_rejection({"one": pred, "other": predicted(Gaussian(), 5, 1)}, y)
    with pytest.raises(ValueError, match="level"):
        plot_prediction_sets(pred, y, level=1.5)
    for images in (torch.zeros(4, 2, 2), torch.zeros(5, 2, 2, 2), torch.zeros(5, 4)):
        with pytest.raises(ValueError, match="images"):
            plot_most_unsure(pred, images)
    for score in ("surprise", "probs"):
        with pytest.raises(ValueError, match=score):
            plot_most_unsure(pred, torch.zeros(5, 2, 2), score=score)
    with pytest.raises(ValueError, match="labels"):
        plot_most_unsure(pred, torch.zeros(5, 2, 2), y[:3])
    with pytest.raises(ValueError, match="num"):
        plot_most_unsure(pred, torch.zeros(5, 2, 2), num=0)
    with pytest.raises(TypeError, match="Tensor"):
        plot_most_unsure(y, torch.zeros(5, 2, 2))
