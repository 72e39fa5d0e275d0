"""What all plots have in common."""

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes

from laplace_sampling import Gaussian, plots
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.plots.drawing import label_ends
from laplace_sampling.predictions.prediction import make_prediction


def regression():
    return make_prediction(torch.randn(6, 1), torch.randn(4, 6, 1), Gaussian())


def classification():
    return make_prediction(torch.randn(6, 3), torch.randn(4, 6, 3), Categorical())


PLOTS: dict[str, Callable[..., Axes]] = {
    "plot_error_bars": lambda ax, tuned: plots.plot_error_bars(regression(), ax=ax),
    "plot_evaluation": lambda ax, tuned: plots.plot_evaluation(
        SimpleNamespace(table={"network": {"rmse": 1.0}, "laplace": {"rmse": 0.5}}), ax
    ),
    "plot_evidence": lambda ax, tuned: plots.plot_evidence(tuned(), ax, num=3),
    "plot_history": lambda ax, tuned: plots.plot_history(tuned(), ax),
    "plot_most_unsure": lambda ax, tuned: plots.plot_most_unsure(classification(), torch.randn(6, 1, 4, 4), ax=ax),
    "plot_ood": lambda ax, tuned: plots.plot_ood(regression(), regression(), ax=ax),
    "plot_prediction_sets": lambda ax, tuned: plots.plot_prediction_sets(classification(), ax=ax),
    "plot_rejection": lambda ax, tuned: plots.plot_rejection(classification(), torch.arange(6) % 3, ax),
    "plot_reliability": lambda ax, tuned: plots.plot_reliability(
        classification(), torch.zeros(6, dtype=torch.long), ax
    ),
}


def test_these_are_all() -> None:
    assert set(PLOTS) == {name for name in vars(plots) if name.startswith("plot_")}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn_on_the_given_axes_or_on_new_ones(name: str, tuned) -> None:
    _, (first, second) = plt.subplots(1, 2)
    assert PLOTS[name](second, tuned) is second
    assert second.has_data()
    assert not first.has_data()
    new = PLOTS[name](None, tuned)
    assert new.figure not in (first.figure, None)
    assert new.get_xlabel() or new.get_ylabel() or new.get_title()
    new.figure.draw_without_rendering()


@pytest.mark.parametrize("name", PLOTS)
def test_several_axes_are_refused(name: str, tuned) -> None:
    axes = plt.subplots(1, 2)[1]
    with pytest.raises(TypeError, match="Axes"):
        PLOTS[name](axes, tuned)


@pytest.mark.parametrize("name", PLOTS)
def test_without_matplotlib_a_plot_says_what_to_install(name: str, tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="matplotlib"):
        PLOTS[name](None, tuned)


@pytest.mark.parametrize("name", PLOTS)
def test_panels_stay_inside_the_place_of_axes_that_have_no_grid(name: str, tuned) -> None:
    figure = plt.figure()
    given = figure.add_axes((0.1, 0.2, 0.5, 0.4))
    assert PLOTS[name](given, tuned) is given
    for ax in figure.axes:
        box = ax.get_position(original=True)
        assert 0.1 - 1e-9 <= box.x0 < box.x1 <= 0.6 + 1e-9
        assert 0.2 - 1e-9 <= box.y0 < box.y1 <= 0.6 + 1e-9


def test_words_beside_lines_do_not_overlap() -> None:
    ax = plt.subplots()[1]
    ax.plot([0, 1], [0, 1])
    label_ends(ax, [(0.5, "a", "red"), (0.501, "b", "blue"), (0.9, "c", "green")])
    ax.figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 2 for low, high in itertools.pairwise(boxes))
    assert all(box.x0 > ax.bbox.x1 for box in boxes)
    # Far from the others a word stays where its line ends.
    heights = {text.get_text(): text.get_window_extent() for text in ax.texts}
    middle = (heights["c"].y0 + heights["c"].y1) / 2
    assert abs(middle - ax.transData.transform((0, 0.9))[1]) < 8
