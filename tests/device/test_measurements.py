"""Measurements of a model on a device; `T` and the data are on the CPU or on the device."""

import copy
from typing import Any

import inverse
import torch
from grids import covering
from pretended_device import pretended_device
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, LinearisedLaplace, residual_precision

SIDE = 6


class Mask(nn.Module):
    """Every other pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(SIDE**2).reshape(SIDE, SIDE) % 2).double())

    def A(self, x: Tensor) -> Tensor:
        return x * self.mask

    A_adjoint = A


@covering(form=["sparse", "dense", "physics", "physics on the device", "pair"], method=["exact", "dual"])
def test_numbers_are_those_of_the_cpu(form: str, method: str) -> None:
    model, z = inverse.picture(SIDE)
    T = torch.as_tensor(inverse.radon(SIDE, 4).toarray())

    def numbers(network: nn.Module, device: str | torch.device) -> list[Tensor]:
        D = T.to(device)
        physics = Mask()
        observe: Any = {
            "sparse": inverse.radon(SIDE, 4),
            "dense": T,
            "physics": physics,
            "physics on the device": copy.deepcopy(physics).to(device),
            "pair": (lambda f: f @ D.mT, lambda u: u @ D),
        }[form]
        image = inverse.noisy(model(z).detach().cpu())
        y = image * physics.mask if form.startswith("physics") else image.flatten(1) @ T.mT
        la = LinearisedLaplace(network, Gaussian(50.0, observe=observe), method=method, num_samples=2)
        la.fit_hyperparameters([(z, y)], progress=False)
        b = torch.tensor(residual_precision(network, [(z, y)], observe=observe))
        pred, observed = la.predict(z), la.predict(z, observed=True)
        return [t.cpu() for t in (b, pred.outputs, pred.deviations, observed.samples, observed.log_prob(y))] + [
            pred.log_likelihood(model(z).detach().cpu() + 0.1, patch, 1e-4).cpu() for patch in (None, (4, 4))
        ]

    expected = numbers(copy.deepcopy(model), "cpu")
    with pretended_device() as device:
        found = numbers(copy.deepcopy(model).to(device), device)
    assert_close(found, expected, rtol=1e-5, atol=1e-7)
