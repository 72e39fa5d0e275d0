import math
from dataclasses import replace

import pytest
import torch

from laplace_sampling.predictions.diagnosis import Accuracy, Check, Diagnosis, dimension_check, energy_checks

K, REPEATS = 64, 300


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Diagonal:
    """In the eigenbasis of `M`, `α = 1`: `P` directions, of which the data determine about `γ`."""

    def __init__(self, size: int, strong: int, curvature: float = 100.0) -> None:
        self.m = torch.zeros(size, dtype=torch.float64)
        self.m[:strong] = curvature
        self.gamma = float((self.m / (self.m + 1)).sum())
        self.samples = normal(K, size) / (self.m + 1).sqrt()

    def checks(self, samples: torch.Tensor) -> list[bool]:
        """Mean and distribution of the total energy, and `γ` of the samples beside the true one."""
        energies, of_data = (samples**2 @ (self.m + c) for c in (1, 0))
        gamma = float(of_data.mean()), float(of_data.std()) / math.sqrt(K)
        found = [*energy_checks(energies, len(self.m), self.gamma), dimension_check(gamma, (self.gamma, 0.0))]
        return [check.holds for check in found]


@pytest.mark.parametrize("num", [8, 40, 300])
def test_right_samples_fail_as_often_as_the_level_says(num: int) -> None:
    rows = (normal(REPEATS, num, 40) ** 2).sum(2)
    failed = torch.tensor([[not check.holds for check in energy_checks(row, 40, 0.0)] for row in rows]).double().mean(0)
    assert bool((failed <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / REPEATS)).all())


def test_samples_at_prior_variance_fail() -> None:
    problem = Diagonal(2000, 30)
    assert problem.checks(problem.samples) == [True] * 3
    unconverged = problem.samples.clone()
    unconverged[:, :5] *= 101**0.5  # five of the directions keep the prior's variance
    assert problem.checks(unconverged) == [False] * 3


def test_the_total_energy_finds_an_alpha_that_is_off_by_a_tenth() -> None:
    problem = Diagonal(5000, 20)
    wrong = problem.samples * ((problem.m + 1) / (problem.m + 1.1)).sqrt()
    assert problem.checks(wrong) == [False, False, True]  # γ hardly depends on α


def test_the_energy_of_the_data_finds_what_the_total_misses() -> None:
    problem = Diagonal(20_000, 20)
    wrong = problem.samples.clone()
    wrong[:, :20] *= 2**0.5  # twice the variance in all directions that the data determine
    # A shift of 20, where one energy has a standard deviation of √(2P) = 200.
    assert problem.checks(wrong) == [True, True, False]


def test_what_no_error_bar_shows_is_harmless() -> None:
    energies = (normal(10_000, 50) ** 2).sum(1) + 1.0  # far beyond the standard error, 0.1, and 2 % of γ
    assert not energy_checks(energies, 50, 0.0)[0].holds
    assert all(check.holds for check in energy_checks(energies, 50, 50.0))
    assert dimension_check((50.01, 0.0), (50.0, 0.0)).holds
    assert not dimension_check((55.0, 1.0), (50.0, 0.5)).holds


def test_energies_that_are_not_finite_fail() -> None:
    assert not any(check.holds for check in energy_checks(torch.tensor([1.0, math.nan]), 3, 1.0))
    assert not any(check.holds for check in energy_checks(torch.full((8,), math.inf), 3, 1.0))


CLEAN = Diagnosis(
    checks=[
        Check("effective dimension γ", 50.0, (1.0, 90.0), "It is wrong."),
        Check("weights floored", 1500, (0, 1000), "Many are floored.", serious=False),
        Check.question("mode converged", True, "It has not converged."),
    ],
    method="sgd",
    reason="A very long reason. " * 40,
    num_samples=K,
    num_parameters=5000,
    num_data=100,
    num_outputs=3,
    passes=1320.0,
    epochs=3.0,
    accuracy=Accuracy(K),
)


def test_the_page_tells_what_does_not_hold() -> None:
    assert CLEAN.ok
    assert [check.name for check in CLEAN.problems] == ["weights floored"]
    assert "Verdict: nothing is wrong. 1 worth a look." in str(CLEAN)
    assert "1. Many are floored." in str(CLEAN)
    wrong = replace(CLEAN, checks=[replace(CLEAN["effective"], value=math.nan), *CLEAN.checks[1:]])
    assert not wrong.ok
    assert "Verdict: 1 of 3 checks failed. 1 worth a look." in str(wrong)
    assert "1. It is wrong.\n2. Many are floored." in str(wrong)
    assert all(len(line) <= 100 for line in str(wrong).splitlines())
    with pytest.raises(KeyError, match="effective dimension"):
        CLEAN["nothing"]


@pytest.mark.parametrize("num_samples", [16, 64])
@pytest.mark.parametrize("error", [0.03, 0.5])
def test_errors_of_solves_move_standard_deviations_by_as_much(num_samples: int, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z, e = torch.randn(2, 20_000, num_samples, generator=generator, dtype=torch.float64)
    change = ((z + error * e).square().mean(1) / z.square().mean(1)).sqrt() - 1
    accuracy = Accuracy.of(torch.full((num_samples,), error))
    # What errors add and what they do by chance are summed, where they are independent.
    assert 0.6 * accuracy.solves <= float(change.square().mean().sqrt()) <= 1.1 * accuracy.solves


def test_the_noise_of_samples_is_that_of_a_standard_deviation() -> None:
    z = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(z.square().mean(1).sqrt().std()) == pytest.approx(Accuracy(64).samples, rel=0.03)
    assert Accuracy(8, solves=0.3, left_out=0.4).total == pytest.approx(math.sqrt(1 / 16 + 0.25))
