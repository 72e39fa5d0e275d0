"""Fits stay within the memory of a device, however little that is."""

import warnings

import pytest
import torch
from pretended_device import memory_of, pretended_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import LinearisedLaplace, Subset
from laplace_sampling.networks.memory import free_memory

MIB = 2**20


def test_what_torch_has_reserved_is_free() -> None:
    with pretended_device(MIB) as device:
        kept = torch.zeros(1000, device=device)
        assert free_memory(device) == MIB - kept.nbytes


def images(num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(num) % 3
    return torch.randn(num, 1, 6, 6, generator=generator) + y[:, None, None, None], y


def network() -> nn.Module:
    """A network of 74,307 weights, most of them in convolutions, whose rows of the Jacobian are formed whole."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 127, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(127, 3),
    )  # fmt: skip


@pytest.mark.parametrize("mebibytes", [96, 160])
@pytest.mark.parametrize("method", ["subset", "auto"])
def test_a_part_of_the_data_becomes_smaller_or_kronecker_factors(method: str, mebibytes: int) -> None:
    x, y = images(240)
    train = DataLoader(TensorDataset(x[:200], y[:200]), 40)
    with pretended_device(mebibytes * MIB) as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = LinearisedLaplace(network().to(device), "classification", method=method, num_samples=8)
        la.fit_hyperparameters(train, [(x[200:], y[200:])], progress=False)
        pred = la.predict(x[:40])
        assert bool((pred.epistemic > 0).all())
        assert memory_of(device).peak <= 0.9 * mebibytes * MIB
    if method == "auto":
        assert la._fitted.posterior.method.name == "kfac"


def test_more_memory_holds_more_rows() -> None:
    x, y = images(200)
    rows = []
    for mebibytes in (96, 192):
        with pretended_device(mebibytes * MIB) as device, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la = LinearisedLaplace(network().to(device), "classification", method=Subset(), num_samples=8)
            la.fit([(x, y)], tolerance=1e-6, progress=False)
            rows.append(la._fitted.fit.solver.part.growth.num_rows)
    assert 0 < 1.5 * rows[0] < rows[1] < 600
