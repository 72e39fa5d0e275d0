import math
import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from scipy import stats

from laplace_sampling.diagnostics import (
    Diagnosis,
    TestResult,
    chi_squared_test,
    data_energy_distribution,
    data_energy_test,
    quantile_plot,
)

mpl.use("Agg")
K, REPEATS = 64, 200


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def binomial_error(level: float) -> float:
    """Standard error of a rejection rate over the repeats: 0.015 at 5 %."""
    return math.sqrt(level * (1 - level) / REPEATS)


class Dense:
    """`M` of rank 12 and `A`, dense, of 40 weights, with exact samples."""

    def __init__(self) -> None:
        root = normal(12, 40, seed=1) * torch.logspace(1, -0.5, 12, dtype=torch.float64)[:, None]
        self.M, self.A = root.T @ root, torch.linspace(0.5, 2, 40, dtype=torch.float64).diag()
        self.H = self.M + self.A
        share = torch.linalg.solve(self.H, self.M)
        self.gamma, self.variance = float(share.trace()), float(2 * (share @ share).trace())

    def samples(self, num: int, seed: int = 0) -> torch.Tensor:
        return torch.linalg.solve_triangular(
            torch.linalg.cholesky(self.H).T, normal(num, 40, seed=seed).T, upper=True
        ).T


def energies(samples: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return ((samples @ matrix) * samples).sum(1)


class Diagonal:
    """In the eigenbasis of `M`, `α = 1`: `P` directions, of which the data determine about `γ`."""

    def __init__(self, size: int, strong: int, seed: int = 0, curvature: float = 100.0) -> None:
        self.m = torch.zeros(size, dtype=torch.float64)
        self.m[:strong] = curvature
        share = self.m / (self.m + 1)
        self.gamma, self.variance = float(share.sum()), float(2 * (share**2).sum())
        self.samples = normal(K, size, seed=seed) / (self.m + 1).sqrt()

    def tests(self, samples: torch.Tensor) -> tuple[TestResult, TestResult]:
        squares = samples**2
        total = chi_squared_test(squares @ (self.m + 1), len(self.m))
        return total, data_energy_test(squares @ self.m, self.gamma, self.variance)


def test_right_samples_have_uniform_p_values() -> None:
    problem = Dense()
    sets = problem.samples(REPEATS * K).split(K)
    total = np.array([chi_squared_test(energies(z, problem.H), 40).p_value for z in sets])
    assert abs((total < 0.05).mean() - 0.05) < 3 * binomial_error(0.05)
    assert stats.kstest(total, "uniform").pvalue > 0.01
    # The reference of the energy of the data is an approximation, with an allowance: at most the level.
    data = np.array(
        [data_energy_test(energies(z, problem.M), problem.gamma, problem.variance).p_value for z in sets[:100]]
    )
    assert (data < 0.05).mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)
    assert np.median(data) < 0.9


def test_data_energy_test_is_exact_for_equal_weights() -> None:
    rows = (normal(REPEATS, K, 7, seed=3) ** 2).sum(2)
    p = np.array([data_energy_test(row, 7.0, 14.0).p_value for row in rows])
    assert abs((p < 0.05).mean() - 0.05) < 3 * binomial_error(0.05)


@pytest.mark.parametrize(
    "weights",
    [1 / np.arange(1, 50), np.r_[1, np.full(100, 0.01)], 0.5 ** np.arange(20), np.r_[np.ones(5), np.full(200, 0.05)]],
    ids=["harmonic", "one strong", "geometric", "five strong"],
)
def test_allowance_covers_the_two_moment_approximation(weights: np.ndarray) -> None:
    w = torch.from_numpy(weights)
    mean, variance = float(w.sum()), float(2 * (w**2).sum())
    rows = (normal(REPEATS, K, len(w), seed=4) ** 2) @ w
    p = np.array([data_energy_test(row, mean, variance).p_value for row in rows])
    for level in (0.01, 0.05):
        assert (p < level).mean() <= level + 3 * binomial_error(level)


def test_the_error_of_the_reference_is_accounted_for() -> None:
    rows = (normal(100, K, 50, seed=5) ** 2).sum(2)
    error = 2.5  # γ = 50 known to 5 %, more than the standard error of 64 samples, 1.25
    estimates = 50 + error * normal(100, seed=6)
    naive = [data_energy_test(r, float(m), 100.0).p_value for r, m in zip(rows, estimates, strict=True)]
    honest = [data_energy_test(r, float(m), 100.0, mean_se=error).p_value for r, m in zip(rows, estimates, strict=True)]
    assert np.mean(np.array(naive) < 0.01) > 0.1  # without its error the reference rejects right samples
    assert np.mean(np.array(honest) < 0.01) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / 100)
    assert all(h >= n for h, n in zip(honest, naive, strict=True))
    # What no mean within the error explains is still wrong.
    assert data_energy_test(2 * rows[0], 50.0, 100.0, mean_se=error).rejects


def test_samples_at_prior_variance_fail_both_tests() -> None:
    problem = Diagonal(2000, 30)
    assert not any(test.rejects for test in problem.tests(problem.samples))
    unconverged = problem.samples.clone()
    unconverged[:, :5] *= 101**0.5  # five of the directions keep the prior's variance
    assert all(test.rejects for test in problem.tests(unconverged))


def test_chi_squared_finds_an_alpha_that_is_off_by_a_tenth() -> None:
    problem = Diagonal(5000, 20)
    wrong = problem.samples * ((problem.m + 1) / (problem.m + 1.1)).sqrt()
    total, data = problem.tests(wrong)
    assert total.rejects
    assert total.deviation < -3
    assert not data.rejects  # γ hardly depends on α


def test_data_energy_finds_what_chi_squared_misses() -> None:
    problem = Diagonal(20_000, 20)
    wrong = problem.samples.clone()
    wrong[:, :20] *= 2**0.5  # twice the variance in all directions that the data determine
    total, data = problem.tests(wrong)
    assert total.p_value > 0.05  # a shift of 20, where one energy has a standard deviation of √(2P) = 200
    assert abs(total.deviation) < 0.3
    assert data.p_value < 1e-6
    assert data.mean == pytest.approx(2 * data.expected_mean, rel=0.1)


def test_without_a_reference_only_the_shape_is_tested() -> None:
    rows = (normal(40, K, 20, seed=7) ** 2).sum(2)
    results = [data_energy_test(row) for row in rows]
    assert np.mean([r.p_value < 0.05 for r in results]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 40)
    assert not results[0].independent
    assert results[0].expected_mean == results[0].mean
    assert data_energy_test(3 * rows[0]).p_value == pytest.approx(results[0].p_value, abs=0.2)  # a factor is not seen
    mixture = torch.cat([rows[0, :32], 5 * rows[0, 32:]])
    assert data_energy_test(mixture).rejects
    assert data_energy_test(rows[0]) == results[0]  # the seed is fixed


def test_bad_arguments_are_refused() -> None:
    good = torch.ones(5, dtype=torch.float64)
    with pytest.raises(ValueError, match="NaN or infinity"):
        chi_squared_test(torch.tensor([1.0, math.nan]), 3)
    with pytest.raises(ValueError, match="at least 1 energies"):
        chi_squared_test(torch.ones(0), 3)
    with pytest.raises(ValueError, match="degrees above 0"):
        chi_squared_test(good, 0)
    with pytest.raises(ValueError, match="or neither"):
        data_energy_test(good, 1.0)
    with pytest.raises(ValueError, match="positive mean"):
        data_energy_test(good, 1.0, -1.0)
    with pytest.raises(ValueError, match="finite standard error"):
        data_energy_test(good, 1.0, 1.0, math.nan)
    with pytest.raises(ValueError, match="positive and differ"):
        data_energy_test(good)


# Plots ---------------------------------------------------------------------------------------------------------------


def test_quantile_plot_has_a_point_a_sample_inside_its_band() -> None:
    import matplotlib.pyplot as plt

    values = (normal(K, 30, seed=8) ** 2).sum(1)
    axes = quantile_plot(values, stats.chi2(30))
    assert [len(line.get_xdata()) for line in axes.lines] == [2, K]
    assert axes.lines[1].get_ydata() == pytest.approx(values.sort().values.numpy())
    _, own = plt.subplots()
    assert quantile_plot(values, data_energy_distribution(30.0, 60.0), own) is own
    plt.close("all")


def test_band_holds_all_points_of_95_percent_of_right_sets() -> None:
    from laplace_sampling.diagnostics import _joint_level

    ranks, level = np.arange(1, K + 1), _joint_level(K)
    heights = stats.beta.cdf(np.sort(np.random.default_rng(1).random((2000, K)), axis=1), ranks, K + 1 - ranks)
    inside = (np.abs(heights - 0.5) <= 0.5 - level / 2).all(1).mean()
    assert inside == pytest.approx(0.95, abs=0.025)  # three standard errors of both simulations
    assert level < 0.01  # far from 5 % at each point


def test_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"laplace_sampling\[demo\]"):
        quantile_plot(torch.ones(3), stats.chi2(1))


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
