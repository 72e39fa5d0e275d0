import pytest
import torch
from cases import make_case
from numpy.testing import assert_allclose
from torch import nn

from laplace_sampling import Gaussian, LinearisedLaplace, NotFittedError
from laplace_sampling.plots import plot_history


def test_lines_are_the_steps(tuned) -> None:
    la = tuned()
    steps = la.history_
    alpha, noise, gamma = plot_history(la).lines
    for line, values in (
        (alpha, [step.prior_precision[0] for step in steps]),
        (noise, [step.noise_precision[0] for step in steps]),
        (gamma, [step.effective_dimension[0] for step in steps]),
    ):
        assert_allclose(line.get_xdata(), range(1, len(steps) + 1))
        assert_allclose(line.get_ydata(), values)
    ax = alpha.axes
    assert ax.get_yscale() == "log"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["prior precision α", "noise precision b = 1/σ²", "effective dimension γ"]


def test_several_groups_and_outputs_have_a_line_each_and_one_name(tuned) -> None:
    la, outputs = tuned(Gaussian(torch.ones(2)), 2, prior="layerwise"), 2
    steps, groups = la.history_, len(la.prior_precision_)
    lines = plot_history(la).lines
    assert len(lines) == groups + outputs + 1
    assert groups > 1
    for group in range(groups):
        assert_allclose(lines[group].get_ydata(), [step.prior_precision[group] for step in steps])
    for output in range(outputs):
        assert_allclose(lines[groups + output].get_ydata(), [step.noise_precision[output] for step in steps])
    assert_allclose(lines[-1].get_ydata(), [sum(step.effective_dimension) for step in steps])
    assert len(lines[0].axes.get_legend().get_texts()) == 3


def test_likelihoods_without_noise_have_no_line_of_it() -> None:
    case = make_case("classification")
    la = LinearisedLaplace(case.model, case.given[0], method="exact")
    la = la.fit_hyperparameters(case.batches, criterion="evidence", progress=False)
    names = [text.get_text() for text in plot_history(la).get_legend().get_texts()]
    assert names == ["prior precision α", "effective dimension γ"]


def test_what_has_no_steps_is_refused() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="steps"):
        plot_history(la)
    with pytest.raises(NotFittedError, match="history_"):
        plot_history(LinearisedLaplace(nn.Linear(1, 1), "regression"))
