"""The temperature that benchmarks choose is that of the library, and what it gains is counted on other data."""

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.methods.own_temperature import LOGS, PRIORS, gains, least
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.predictions.calibration import own_temperature


def _losses(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits that are half as large as they should be: `[N, logs]`, labels and logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num, 3, generator=generator, dtype=torch.float64)
    y = torch.multinomial((2 * logits).softmax(1), 1, generator=generator)[:, 0]
    losses = [F.cross_entropy(logits / T, y, reduction="none") for T in LOGS.exp().tolist()]
    return torch.stack(losses, 1), y, logits


@pytest.mark.parametrize("num", [30, 300, 3000])
def test_the_library_has_the_exponential_prior(num: int) -> None:
    losses, y, logits = _losses(num)
    found = float(LOGS[least(losses, PRIORS["exponential, 0.1"])])
    # The grid has steps of 0.01.
    assert math.log(own_temperature(Categorical(), y, logits)) == pytest.approx(found, abs=0.0101)


def test_gains_are_those_of_data_that_did_not_choose() -> None:
    losses, *_ = _losses(400)
    found, best = gains(losses, 10, torch.Generator().manual_seed(0))
    assert found.keys() == PRIORS.keys()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    chosen, others = losses[order[:10]], losses[order[10:]].mean(0)
    assert math.log(best) == pytest.approx(float(LOGS[others.argmin()]))
    for name, prior in PRIORS.items():
        assert found[name] == pytest.approx(float(others[-1] - others[least(chosen, prior)]))
    # Those that chose have another one.
    own = losses[order[:10]].mean(0)
    assert found["none"] != pytest.approx(float(own[-1] - own.min()), rel=0.1)
