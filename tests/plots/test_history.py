import pytest
import torch
from cases import make_case
from numpy.testing import assert_allclose
from torch import nn

from laplace_sampling import Gaussian, LinearisedLaplace, NotFittedError, Step
from laplace_sampling.plots import plot_history


def steps_of(num: int, groups: int = 1, outputs: int | None = 1) -> list[Step]:
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> list[float]:
        return torch.rand(size, generator=generator).tolist()

    return [
        Step(
            number,
            prior_precision=draw(groups),
            new_prior_precision=draw(groups),
            effective_dimension=draw(groups),
            mode_norm=None,
            loss=1.0,
            network_loss=1.0,
            passes=1.0,
            seconds=1.0,
            noise_precision=None if outputs is None else draw(outputs),
        )
        for number in range(1, num + 1)
    ]


def test_lines_are_the_steps_and_end_at_what_was_fitted(tuned) -> None:
    la = tuned()
    steps = la.history_
    alpha, noise, gamma = plot_history(la).lines
    for line in (alpha, noise, gamma):
        assert_allclose(line.get_xdata(), range(1, len(steps) + 2))
    assert_allclose(alpha.get_ydata(), [step.prior_precision[0] for step in steps] + [float(la.prior_precision_)])
    assert_allclose(noise.get_ydata(), [step.noise_precision[0] for step in steps] + [float(la.noise_precision_)])
    last = float(la.effective_dimension_.sum())
    assert_allclose(gamma.get_ydata(), [step.effective_dimension[0] for step in steps] + [last])
    ax = alpha.axes
    assert ax.get_yscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(s.step) for s in steps] + ["fitted"]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["prior precision α", "noise precision b = 1/σ²", "effective dimension γ"]


def test_several_groups_and_outputs_have_a_line_each_and_one_name(tuned) -> None:
    la, outputs = tuned(Gaussian(torch.ones(2)), 2, prior="layerwise"), 2
    steps, groups = la.history_, len(la.prior_precision_)
    lines = plot_history(la).lines
    assert len(lines) == groups + outputs + 1
    assert groups > 1
    for group in range(groups):
        expected = [step.prior_precision[group] for step in steps] + [float(la.prior_precision_[group])]
        assert_allclose(lines[group].get_ydata(), expected)
    for output in range(outputs):
        expected = [step.noise_precision[output] for step in steps] + [float(la.noise_precision_[output])]
        assert_allclose(lines[groups + output].get_ydata(), expected)
    total = [sum(step.effective_dimension) for step in steps] + [float(la.effective_dimension_.sum())]
    assert_allclose(lines[-1].get_ydata(), total)
    assert len(lines[0].axes.get_legend().get_texts()) == 3


def test_likelihoods_without_noise_have_no_line_of_it() -> None:
    case = make_case("classification")
    la = LinearisedLaplace(case.model, case.given[0], method="exact")
    la = la.fit_hyperparameters(case.batches, criterion="evidence", progress=False)
    names = [text.get_text() for text in plot_history(la).get_legend().get_texts()]
    assert names == ["prior precision α", "effective dimension γ"]


def test_an_interrupted_run_ends_without_a_fit() -> None:
    la = LinearisedLaplace(nn.Linear(1, 1), "regression")
    la._unfinished = steps_of(23)
    ax = plot_history(la)
    assert_allclose(ax.lines[0].get_ydata(), [step.prior_precision[0] for step in la._unfinished])
    # At most eleven marks: every third step, and the last.
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "7", "10", "13", "16", "19", "22", "23"]


def test_what_has_no_steps_is_refused() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="steps"):
        plot_history(la)
    with pytest.raises(NotFittedError, match="history_"):
        plot_history(LinearisedLaplace(nn.Linear(1, 1), "regression"))
