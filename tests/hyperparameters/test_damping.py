import pytest
import torch

from laplace_sampling.hyperparameters.em import DampedSteps


@pytest.mark.parametrize("slope", [-1.0, -1.8, -2.5])
def test_damped_steps_end_where_those_of_the_map_itself_oscillate(slope: float) -> None:
    x, steps = torch.tensor([1.0, -2.0], dtype=torch.float64), DampedSteps()
    for _ in range(60):
        x = x + steps.step(slope * x - x)
    assert float(x.abs().max()) < 1e-6


def test_steps_that_go_on_are_not_damped() -> None:
    x, steps = torch.tensor([1.0], dtype=torch.float64), DampedSteps()
    for num in range(5):
        assert float(x) == 0.5**num
        x = x + steps.step(0.5 * x - x)
        assert steps.length == 1
