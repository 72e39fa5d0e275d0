import sys
from dataclasses import replace

import matplotlib as mpl
import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from numpy.testing import assert_allclose

from laplace_sampling import LinearisedLaplace, plot_evidence

mpl.use("Agg")


def fitted(method: str, **settings) -> LinearisedLaplace:
    case = make_case("regression_many_data")
    return laplace_of(case.model, "regression", method=method, **settings).fit(case.batches, progress=False)


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_the_curves_are_those_of_the_evidence_path(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    la = fitted("exact", prior_precision=0.7)
    curves = la.evidence_path(2, 31)
    errors = torch.full_like(curves.mode_norm, error)
    curves = replace(curves, effective_dimension_se=errors, log_marginal_likelihood_se=2 * errors)
    monkeypatch.setattr(la, "evidence_path", lambda decades, num: curves if (decades, num) == (2, 31) else None)
    figure = plot_evidence(la, decades=2, num=31)
    figure.draw_without_rendering()
    expected = (curves.effective_dimension, curves.mode_norm, curves.log_marginal_likelihood)
    assert len(figure.axes) == 3
    for ax, values in zip(figure.axes, expected, strict=True):
        line, mark = ax.lines
        assert_allclose(line.get_xdata(), curves.prior_precision)
        assert_allclose(line.get_ydata(), values)
        assert_allclose(mark.get_xdata(), 0.7, rtol=1e-6)
        assert ax.get_xscale() == "log"
    assert figure.axes[-1].get_xlabel() == "prior precision α"
    assert not figure.axes[1].collections
    for number, half in ((0, 2 * error), (2, 4 * error)):
        assert len(figure.axes[number].collections) == (error > 0)
        for band in figure.axes[number].collections:
            heights = band.get_paths()[0].vertices[:, 1]
            assert_allclose(heights.max(), expected[number].max() + half)
            assert_allclose(heights.min(), expected[number].min() - half)
    plt.close(figure)


def test_axes_may_be_given_and_several_precisions_are_one_mean() -> None:
    import matplotlib.pyplot as plt

    la = fitted("exact")
    figure, axes = plt.subplots(1, 3)
    assert plot_evidence(la, num=5, axes=axes) is figure
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression", prior="layerwise").fit(case.batches, progress=False)
    other = plot_evidence(la, num=5)
    assert other.axes[-1].get_xlabel() == "prior precision α, geometric mean"
    with pytest.raises(ValueError, match="needs three axes, got 2"):
        plot_evidence(la, axes=axes[:2])
    plt.close("all")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted("exact")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ImportError, match=r"`plot_evidence` needs matplotlib: pip install \"laplace_sampling\[demo\]\""
    ):
        plot_evidence(la)
    assert torch.is_tensor(la.evidence_path(num=3).mode_norm)
