"""A choice of measurements and of inputs on a device; candidates are on the CPU or on the device."""

import copy
from typing import Any

import inverse
import torch
from grids import covering
from pretended_device import pretended_device
from torch import nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, LinearisedLaplace
from laplace_sampling.design import Design, greedy

SIDE = 6


@covering(method=["exact", "dual", "krylov"], where=["cpu", "device"], criterion=["eig", "ese", "variance"])
def test_choices_of_measurements_are_those_of_the_cpu(method: str, where: str, criterion: str) -> None:
    model, z = inverse.picture(SIDE)
    T = torch.as_tensor(inverse.radon(SIDE, 5).toarray()).reshape(5, SIDE, -1)

    def design(network: nn.Module, place: Any) -> Design:
        la = LinearisedLaplace(network, Gaussian(30.0, learn=False, observe=T[0]), method=method, num_samples=2)
        y = inverse.noisy(model(z).detach().cpu().flatten(1) @ T[0].mT)
        la.fit([(z, y)], progress=False, budget=None)
        given: Any = {"targets": torch.eye(SIDE**2).to(place)} if criterion == "variance" else {}
        samples = None if method == "exact" else 50
        return greedy(la, [block.to(place) for block in T], 3, criterion, num_samples=samples, **given)

    expected = design(copy.deepcopy(model), "cpu")
    with pretended_device() as device:
        found = design(copy.deepcopy(model).to(device), device if where == "device" else "cpu")
    assert found.chosen == expected.chosen
    assert_close(found.gains, expected.gains, rtol=1e-5, atol=0)


@covering(method=["exact", "subset"], samples=[None, 50])
def test_choices_of_inputs_are_those_of_the_cpu(method: str, samples: int | None) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double(), torch.randn(20, 2).double()

    def design(network: nn.Module, place: Any) -> Design:
        likelihood = Gaussian(torch.tensor([10.0, 30.0]), learn=False)
        la = LinearisedLaplace(network, likelihood, method=method, num_samples=2)
        la.fit([(x[:8], x[:8].sin())], progress=False)
        at = {"targets": x[4:].to(place)}
        return greedy(la, x[8:].to(place), 3, "variance", num_samples=samples, **at)

    expected = design(copy.deepcopy(model), "cpu")
    with pretended_device() as device:
        found = design(copy.deepcopy(model).to(device), device)
    assert found.chosen == expected.chosen
    assert_close(found.gains, expected.gains, rtol=1e-5, atol=0)
