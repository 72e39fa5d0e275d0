from dataclasses import replace

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from numpy.testing import assert_allclose
from torch import nn

from laplace_sampling import LinearisedLaplace, NotFittedError
from laplace_sampling.plots import plot_evidence

CURVES = ("log_marginal_likelihood", "effective_dimension", "mode_norm")


def fitted(method: str, **settings) -> LinearisedLaplace:
    case = make_case("regression_many_data")
    return laplace_of(case.model, "regression", method=method, **settings).fit(case.batches, progress=False)


@pytest.mark.parametrize("error", [0.0, 0.3])
@pytest.mark.parametrize("curve", CURVES)
def test_the_curve_is_that_of_the_evidence_path(curve: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted("exact", prior_precision=0.7)
    curves = la.evidence_path(2, 31)
    errors = torch.full_like(curves.mode_norm, error)
    curves = replace(curves, effective_dimension_se=errors, log_marginal_likelihood_se=2 * errors)
    monkeypatch.setattr(la, "evidence_path", lambda decades, num: curves if (decades, num) == (2, 31) else None)
    ax = plot_evidence(la, curve=curve, decades=2, num=31)
    values = getattr(curves, curve)
    line, mark, *_ = ax.lines
    assert_allclose(line.get_xdata(), curves.prior_precision)
    assert_allclose(line.get_ydata(), values)
    assert_allclose(mark.get_xdata(), 0.7, rtol=1e-6)
    half = {"log_marginal_likelihood": 4 * error, "effective_dimension": 2 * error, "mode_norm": 0}[curve]
    assert len(ax.collections) == (half > 0)
    for band in ax.collections:
        heights = band.get_paths()[0].vertices[:, 1]
        assert_allclose([heights.min(), heights.max()], [values.min() - half, values.max() + half])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log" if curve == "mode_norm" else "linear")
    assert ax.get_xlabel() == "prior precision α"
    gap = float(curves.log_marginal_likelihood.max() - curves.log_marginal_likelihood[15])
    said = f"fitted, α = 0.7\n{gap:.3g} nats below the largest evidence here" if gap > 1 else "fitted, α = 0.7"
    assert said in [text.get_text() for text in ax.texts]


def test_words_say_how_far_below_the_largest_evidence_the_fit_is() -> None:
    la = fitted("exact", prior_precision=1e-3)
    ax = plot_evidence(la, curve="effective_dimension", num=61)
    curves = la.evidence_path(num=61)
    best = int(curves.log_marginal_likelihood.argmax())
    gap = float(curves.log_marginal_likelihood[best] - curves.log_marginal_likelihood[30])
    assert gap > 1
    assert_allclose(ax.lines[-1].get_xydata(), [[curves.prior_precision[best], curves.effective_dimension[best]]])
    words = [text.get_text() for text in ax.texts]
    assert words == ["largest evidence here", f"fitted, α = 0.001\n{gap:.3g} nats below the largest evidence here"]


def test_the_default_is_the_evidence() -> None:
    la = fitted("exact", prior_precision=0.7)
    line = plot_evidence(la).lines[0]
    curves = la.evidence_path()
    assert_allclose(line.get_xdata(), curves.prior_precision)
    assert_allclose(line.get_ydata(), curves.log_marginal_likelihood)
    middle = float(la.log_marginal_likelihood())
    assert_allclose(line.get_ydata()[60], middle)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="curve"):
        plot_evidence(fitted("exact"), curve="loss")
    with pytest.raises(NotFittedError, match="posterior"):
        plot_evidence(LinearisedLaplace(nn.Linear(1, 1), "regression"))
