import pytest
import torch
from cases import make_case
from numpy.testing import assert_allclose
from torch import nn

from laplace_sampling import Gaussian, LinearisedLaplace, NotFittedError
from laplace_sampling.plots import plot_history


def test_lines_are_the_steps_each_unit_in_a_panel_of_its_own(tuned) -> None:
    la = tuned()
    steps = la.history_
    first = plot_history(la)
    panels = first.figure.axes
    assert panels[0] is first
    expected = (
        ("prior precision α", [step.prior_precision[0] for step in steps]),
        ("noise precision b = 1/σ²", [step.noise_precision[0] for step in steps]),
        ("effective dimension γ", [step.effective_dimension[0] for step in steps]),
    )
    for ax, (label, values) in zip(panels, expected, strict=True):
        (line,) = ax.lines
        assert_allclose(line.get_xdata(), range(1, len(steps) + 1))
        assert_allclose(line.get_ydata(), values)
        assert (ax.get_yscale(), " ".join(ax.get_ylabel().split())) == ("log", label)
    assert [ax.get_xlabel() for ax in panels] == ["", "", "step"]


def test_several_groups_and_outputs_have_a_line_each(tuned) -> None:
    la, outputs = tuned(Gaussian(torch.ones(2)), 2, prior="layerwise"), 2
    steps, groups = la.history_, len(la.prior_precision_)
    priors, noises, dimensions = plot_history(la).figure.axes
    assert groups > 1
    for lines, field, num in ((priors, "prior_precision", groups), (noises, "noise_precision", outputs)):
        assert len(lines.lines) == num
        for number, line in enumerate(lines.lines):
            assert_allclose(line.get_ydata(), [getattr(step, field)[number] for step in steps])
    assert_allclose(dimensions.lines[0].get_ydata(), [sum(step.effective_dimension) for step in steps])


def test_likelihoods_without_noise_have_no_panel_of_it() -> None:
    case = make_case("classification")
    la = LinearisedLaplace(case.model, case.given[0], method="exact")
    la = la.fit_hyperparameters(case.batches, criterion="evidence", progress=False)
    names = [" ".join(ax.get_ylabel().split()) for ax in plot_history(la).figure.axes]
    assert names == ["prior precision α", "effective dimension γ"]


def test_what_has_no_steps_is_refused() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="steps"):
        plot_history(la)
    with pytest.raises(NotFittedError, match="history_"):
        plot_history(LinearisedLaplace(nn.Linear(1, 1), "regression"))
