"""Missing targets, soft labels and weights that a module holds elsewhere, with the data on the CPU."""

import copy

import pytest
import torch
from grids import covering
from pretended_device import pretended_device
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Evidence, LinearisedLaplace


class Listed(nn.Module):
    """A network whose first layer takes its weights from a list."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, outputs)
        self.weights = [self.first.weight, self.first.bias]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.linear(x, *self.weights).tanh())


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, dtype=torch.float64, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Listed(3).double()
    y = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    if kind == "soft labels":
        return model, x, y.softmax(1)
    return model, x, y.where(y < 1, torch.nan)


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@covering(kind=["missing", "soft labels"], method=["exact", "krylov", "kfac", "subset"])
def test_numbers_are_those_of_the_cpu(kind: str, method: str) -> None:
    model, x, y = problem(kind)
    likelihood = "regression" if kind == "missing" else "classification"

    def numbers(network: nn.Module) -> list[Tensor]:
        la = LinearisedLaplace(network, likelihood, method=method, num_samples=2)
        la.fit_hyperparameters(
            [(x[:20], y[:20])],
            [(x[20:], y[20:])],
            criterion=Evidence(max_steps=2, precision_bounds=(1.0, 10.0)),
            progress=False,
        )
        pred = la.predict(x[20:])
        return [t.cpu() for t in (pred.outputs, pred.covariance(), pred.log_prob(y[20:]))]

    expected = numbers(copy.deepcopy(model))
    with pretended_device() as device:
        found = numbers(copy.deepcopy(model).to(device))
    assert_close(found, expected, rtol=1e-5, atol=1e-8)
