import math

import numpy as np
import pytest
import torch
from scipy import stats

from laplace_sampling.predictions.energy_tests import (
    TestResult,
    chi_squared_test,
    data_energy_test,
)

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
    with pytest.raises(ValueError, match="NaN"):
        chi_squared_test(torch.tensor([1.0, math.nan]), 3)
    with pytest.raises(ValueError, match="shape"):
        chi_squared_test(torch.ones(0), 3)
    with pytest.raises(ValueError, match="degrees"):
        chi_squared_test(good, 0)
    with pytest.raises(ValueError, match="reference"):
        data_energy_test(good, 1.0)
    with pytest.raises(ValueError, match="standard error"):
        data_energy_test(good, 1.0, -1.0)
    with pytest.raises(ValueError, match="standard error"):
        data_energy_test(good, 1.0, 1.0, math.nan)
    with pytest.raises(ValueError, match="energies"):
        data_energy_test(good)
