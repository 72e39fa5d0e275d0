"""The filter-wise prior on a device; data and `T` are on the CPU."""

import copy

import inverse
import pytest
import torch
from pretended_device import pretended_device
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import FilterwisePrior, Gaussian, LinearisedLaplace


@pytest.mark.parametrize("method", ["exact", "dual"])
def test_numbers_are_those_of_the_cpu(method: str, tmp_path) -> None:
    model, z = inverse.picture(6)
    T = inverse.radon(6, 4)
    y = inverse.noisy(model(z).detach().flatten(1) @ torch.as_tensor(T.toarray()).mT)

    def numbers(network: nn.Module) -> list[Tensor]:
        prior, likelihood = FilterwisePrior(total_variation=0.1), Gaussian(50.0, observe=T)
        la = LinearisedLaplace(network, likelihood, prior=prior, method=method, num_samples=2)
        la.fit_hyperparameters([(z, y)], progress=False)
        la.save(tmp_path / "la.pt")
        again = LinearisedLaplace.load(tmp_path / "la.pt", network, likelihood=likelihood)
        assert_close(again.predict(z).deviations, la.predict(z).deviations)
        blocks = torch.tensor(list(la.posterior_.prior.blocks.values()))
        return [
            t.cpu() for t in (blocks, la.samples_, la.mode_, la.sample(1), la.sample_prior(z), la.predict(z).deviations)
        ]

    expected = numbers(copy.deepcopy(model))
    with pretended_device() as device:
        found = numbers(copy.deepcopy(model).to(device))
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
