"""What errors of samples do to standard deviations."""

import math

import pytest
import torch

from laplace_sampling.predictions.accuracy import Accuracy


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
