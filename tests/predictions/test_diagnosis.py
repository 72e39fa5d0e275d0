import math
from dataclasses import replace

import pytest
import torch

from laplace_sampling.methods.fit import _data_test
from laplace_sampling.predictions.diagnosis import Diagnosis
from laplace_sampling.predictions.energy_tests import TestResult

K = 64

# The page ------------------------------------------------------------------------------------------------------------

RIGHT = TestResult("total energy", 0.08, 0.8, 4990.0, 5000.0, 100.0)
RIGHT_DATA = TestResult("data energy", 0.07, 0.9, 51.0, 50.0, 9.5)
CLEAN = Diagnosis(
    num_samples=K,
    num_parameters=5000,
    num_data=100,
    num_outputs=3,
    linear_model="homogeneous",
    method="sgd",
    reason="The Jacobian would need 12 GiB.",
    residuals=torch.linspace(0.1, 0.3, K),
    tolerance=0.5,
    solver_converged=True,
    mode_residual=0.02,
    mode_converged=True,
    hyperparameters_converged=True,
    prior_precision={"all": 12.5},
    at_bounds=(),
    effective_dimension=51.0,
    effective_dimension_se=1.2,
    gamma_reference=50.0,
    gamma_reference_se=0.8,
    total_test=RIGHT,
    data_test=RIGHT_DATA,
    offset=0.1,
    num_floored=10,
    passes=1320.0,
)
PROBLEMS = {
    "fewer than 16 samples": (True, {"num_samples": 8, "residuals": torch.full((8,), 0.1)}),
    "not finite": (True, {"prior_precision": {"all": math.inf}}),
    "samples have not converged: 3 of": (True, {"residuals": torch.tensor([0.1] * 61 + [0.6] * 3)}),
    "mode of the linear model has not converged": (True, {"mode_converged": False}),
    "says the solver": (True, {"solver_converged": False}),
    "still moved": (True, {"hyperparameters_converged": False}),
    "at a bound for conv1": (True, {"at_bounds": ("conv1",)}),
    "fail the test of the total energy": (True, {"total_test": replace(RIGHT, p_value=0.005, mean=4900.0)}),
    "fail the test of the data energy": (True, {"data_test": replace(RIGHT_DATA, p_value=1e-4, mean=60.0)}),
    "γ from samples and from the evidence differ": (True, {"gamma_reference": 45.0}),
    "almost nothing": (True, {"effective_dimension": 0.4, "effective_dimension_se": 0.1, "gamma_reference": 0.5}),
    "of the rank that the data can give": (True, {"max_rank": 55}),
    "of the number of weights": (False, {"num_parameters": 55}),
    "too small to matter": (False, {"data_test": replace(RIGHT_DATA, p_value=0.001, statistic=0.05, mean=50.3)}),
    "were floored: 30 %": (False, {"num_floored": 1500}),
    "far from the network": (False, {"offset": 0.8}),
}


def test_a_clean_diagnosis_says_so() -> None:
    assert CLEAN.problems == []
    assert CLEAN.ok
    assert "Verdict: nothing is wrong." in str(CLEAN)


@pytest.mark.parametrize("sentence", PROBLEMS)
def test_each_problem_is_found_alone(sentence: str) -> None:
    serious, changes = PROBLEMS[sentence]
    diagnosis = replace(CLEAN, **changes)
    assert [sentence in p.what for p in diagnosis.problems] == [True]
    problem = diagnosis.problems[0]
    assert problem.serious == serious
    assert diagnosis.ok != serious
    assert all(text.endswith(".") for text in (problem.what, problem.why, problem.do))
    assert ("1 thing is wrong" in str(diagnosis)) == serious


def test_what_is_harmless_is_not_a_problem() -> None:
    assert replace(CLEAN, linear_model="affine", offset=5.0).ok
    assert not replace(CLEAN, linear_model="affine", offset=5.0).problems
    assert not replace(CLEAN, hyperparameters_converged=None).problems
    exact = {"effective_dimension_se": 0.0, "gamma_reference_se": 0.0, "effective_dimension": 50.01}
    assert not replace(CLEAN, **exact).problems  # no standard errors, but a difference that does not matter
    assert not replace(CLEAN, gamma_reference=None, gamma_reference_se=None, data_test=None).problems


def test_a_deviation_is_compared_with_gamma_not_with_all_weights() -> None:
    # 0.2 % of P, but a fifth of γ.
    shifted = replace(RIGHT, p_value=0.001, statistic=0.1, mean=5010.0)
    assert not replace(CLEAN, total_test=shifted).ok
    assert not replace(CLEAN, total_test=replace(RIGHT, p_value=math.nan, mean=math.nan)).ok


def is_one_page(text: str) -> bool:
    lines = text.splitlines()
    return len(lines) <= 60 and all(len(line) <= 100 for line in lines)


def test_the_page_is_one_page() -> None:
    assert is_one_page(str(CLEAN))
    for _, changes in PROBLEMS.values():
        assert is_one_page(str(replace(CLEAN, **changes)))
    worst = replace(
        CLEAN,
        num_samples=8,
        num_parameters=10**9,
        num_data=10**9,
        residuals=torch.full((8,), math.inf),
        reason="A very long reason. " * 40,
        solver_converged=False,
        mode_converged=False,
        hyperparameters_converged=False,
        prior_precision={f"a_rather_long_name_of_a_layer.{i}" * 4: 1.234567e-30 * 10**i for i in range(200)},
        at_bounds=tuple(f"a_rather_long_name_of_a_layer.{i}" * 4 for i in range(200)),
        effective_dimension=0.123456789,
        gamma_reference=1.23456e11,
        total_test=replace(RIGHT, p_value=1e-300, mean=1e30),
        data_test=replace(RIGHT_DATA, p_value=1e-300, mean=-1e30),
        offset=1e9,
        num_floored=10**9,
        passes=1e12,
    )
    assert len(worst.problems) >= 11
    assert is_one_page(str(worst))
    assert str(worst).count("(a look)") == 2  # every problem is there, if not with all its sentences


def test_energies_that_are_all_zero_have_no_test() -> None:
    zero, some = torch.zeros(8), torch.arange(8.0) + 1
    assert _data_test(zero, None) is None
    assert _data_test(zero, (0.0, 0.0, 0.0)) is None
    assert _data_test(some, None) is not None
