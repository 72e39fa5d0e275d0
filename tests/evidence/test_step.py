import json
from dataclasses import asdict, replace

import pytest

from laplace_sampling.evidence.step import Step

EXACT = Step(1, [1.0], [2.0], [3.5], [0.1], 7.0, 8.0, 3.0, 0.5)
SAMPLED = replace(EXACT, noise_precision=[4.0], effective_dimension_se=[0.2], mode_residual=1e-3, sample_residual=2e-3)


@pytest.mark.parametrize("step", [EXACT, SAMPLED])
def test_a_step_survives_json(step: Step) -> None:
    assert Step(**json.loads(json.dumps(asdict(step)))) == step


def test_a_shift_changes_the_losses_only() -> None:
    assert SAMPLED.shifted(1.5) == replace(SAMPLED, loss=8.5, network_loss=9.5)
