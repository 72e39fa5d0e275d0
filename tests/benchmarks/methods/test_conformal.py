"""The table of conformal intervals counts coverage as its docstring says."""

import math

import pytest
import torch

from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data.tasks import TASKS
from benchmarks.methods.conformal import KINDS, LEVEL, coverage_table, intervals, network_alone, standard_error
from laplace_sampling.predictions.conformal import SplitConformal


@pytest.fixture(scope="module")
def problem() -> Problem:
    task = TASKS["gap"]
    return Problem(task, task.load(0), "tanh MLP", Recipe(steps=200), 0, "gap")


def test_the_interval_of_the_network_has_the_quantile_of_its_absolute_errors(problem: Problem) -> None:
    low, high = network_alone(problem)
    validation = problem.data.validation
    errors = (validation.y - problem.network(validation.x)).abs().detach().flatten().sort().values
    half = errors[math.ceil((len(errors) + 1) * LEVEL) - 1]
    torch.testing.assert_close((high - low) / 2, half.expand(high.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_coverage_is_counted_on_test_data(problem: Problem, kind: str) -> None:
    found, y = intervals(problem, kind), problem.data.test.y
    assert round(found["coverage"] * len(y)) == pytest.approx(found["coverage"] * len(y))
    assert abs(found["coverage"] - LEVEL) < 4 * found["standard_error"]
    assert found["median_width"] > 0


def test_the_standard_error_is_that_of_a_random_threshold() -> None:
    # The coverage of the k-th of n uniform scores has a Beta distribution; m test data are a binomial draw of it.
    generator, n, m = torch.Generator().manual_seed(0), 19, 10
    scores = torch.rand(20_000, n, generator=generator, dtype=torch.float64)
    thresholds = torch.stack([SplitConformal.of(s[:, None], 1).largest(LEVEL)[0] for s in scores])
    coverages = (torch.rand(20_000, m, generator=generator) <= thresholds[:, None]).double().mean(1)
    assert float(coverages.std()) == pytest.approx(standard_error(LEVEL, m, n), rel=0.03)
    assert float(coverages.mean()) == pytest.approx(LEVEL, abs=4 * float(coverages.std()) / math.sqrt(20_000))


def test_the_table_has_distances_in_standard_errors() -> None:
    line = {"task": "t", "training": "r", "standard_error": 0.02, "median_width": 1.0, "width": 1.5}
    lines = [line | {"kind": kind, "seed": seed, "coverage": 0.92} for kind in KINDS for seed in (0, 1, 2, 3)]
    row = coverage_table(lines).splitlines()[-1]
    assert row.startswith("| t / r | 4 | 0.920 (+2.0) |")
    assert row.endswith("| 1.000 |")


def test_widths_without_a_bound_have_no_ratio() -> None:
    line = {"task": "t", "training": "r", "standard_error": 0.02, "median_width": 1.0, "coverage": 0.9, "seed": 0}
    rows = coverage_table([line | {"kind": kind, "width": None} for kind in KINDS])
    assert rows.splitlines()[-1].endswith("| – |")
