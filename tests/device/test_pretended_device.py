"""The pretended device raises an error where a GPU raises one; `test_pairs` needs what it allows."""

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pretended_device import pretended_device
from torch import Tensor, nn

# Functions of a tensor of the device, one of the CPU, both of three numbers, and the device.

ALLOWED: dict[str, Case] = {
    "number of the CPU": lambda d, c, device: (d * torch.tensor(2.0), torch.where(d > 0, d, torch.tensor(0.0))),
    "number of the CPU as a filling": lambda d, c, device: d.masked_fill(d > 0, torch.tensor(1.0)),
    "number of the device into the CPU": lambda d, c, device: c.index_put_((torch.arange(3) > 1,), d[0]),
    "indices of the CPU": lambda d, c, device: (d[torch.arange(2)], d.index_put((torch.arange(3),), d)),
    "mask of the CPU": lambda d, c, device: d[torch.ones(3, dtype=torch.bool)],
    "copies": lambda d, c, device: (c.copy_(d), d.copy_(c), d.__setitem__(slice(2), c[:2]), d.__setitem__(0, c[0])),
    "numbers to Python": lambda d, c, device: (d.tolist(), float(d[0]), torch.tensor([d[0], d[1]]) + c[:2]),
    "numpy by the CPU": lambda d, c, device: (d.cpu().numpy(), np.asarray(d.cpu()), torch.from_numpy(np.ones(3)) + c),
    "gradient through `to`": lambda d, c, device: torch.autograd.grad(
        (c.requires_grad_().to(device) * d).sum(), c
    )[0].numpy(),
    "gradient of a number": lambda d, c, device: torch.autograd.grad((c.requires_grad_()[0] * d).sum(), c)[0].numpy(),
    "generator of the device": lambda d, c, device: d + torch.randn(
        3, device=device, generator=torch.Generator(device)
    ),
    "generator of the CPU": lambda d, c, device: c.normal_(generator=torch.Generator()),
}  # fmt: skip
FORBIDDEN: dict[str, Callable[[Tensor, Tensor, torch.device], object]] = {
    "sum": lambda d, c, device: d + c,
    "product": lambda d, c, device: d @ c,
    "number of the device": lambda d, c, device: c * d[0],
    "in place into a number of the CPU": lambda d, c, device: torch.tensor(0.0).add_(d.sum()),
    "stack of numbers": lambda d, c, device: torch.stack([d[0], torch.tensor(0.0)]),
    "clamp by a tensor": lambda d, c, device: d.clamp(torch.tensor(0.0)),
    "mask of the device into the CPU": lambda d, c, device: c[d > 0],
    "indices of the device into the CPU": lambda d, c, device: c[torch.arange(2, device=device)],
    "values of the CPU": lambda d, c, device: d.__setitem__(d > -9, c),
    "index_select by the CPU": lambda d, c, device: d.index_select(0, torch.arange(2)),
    "gather by the CPU": lambda d, c, device: d.gather(0, torch.arange(2)),
    "numpy": lambda d, c, device: d.numpy(),
    "asarray": lambda d, c, device: np.asarray(d),
    "generator of the CPU": lambda d, c, device: torch.randn(3, device=device, generator=torch.Generator()),
    "vmap": lambda d, c, device: torch.func.vmap(lambda v: v + c)(d.expand(2, 3)),
    "jvp": lambda d, c, device: torch.func.jvp(lambda v: v * c, (d,), (d,)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_gpu_allows(name: str) -> None:
    with pretended_device() as device:
        ALLOWED[name](torch.randn(3).to(device), torch.randn(3), device)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_gpu_forbids(name: str) -> None:
    with pretended_device() as device, pytest.raises((RuntimeError, TypeError), match=r"xpu|generator|device"):
        FORBIDDEN[name](torch.randn(3).to(device), torch.randn(3), device)


def test_results_are_on_the_device() -> None:
    with pretended_device() as device:
        d, net = torch.randn(2, 3).to(device), nn.Linear(3, 1).to(device)
        net(d).sum().backward()
        results = [d[0], d.T, d.new_zeros(2), torch.empty_like(d), d.new_tensor([1.0]), d.type_as(d), copy.deepcopy(d)]
        results += [copy.deepcopy(net).weight, net.weight.grad, torch.func.vmap(torch.func.grad(lambda v: v @ v))(d)]
        for tensor in results:
            assert tensor.device == device
            assert tensor.is_xpu
            assert not tensor.is_cpu
        assert d.cpu().is_cpu
        assert torch.zeros_like(d, device="cpu").is_cpu
        assert torch.zeros(2).is_cpu


def test_threads_are_watched() -> None:
    seen = []
    with pretended_device() as device:
        d = torch.randn(3).to(device)
        thread = threading.Thread(target=lambda: seen.append((d + 1).device))
        thread.start()
        thread.join()
    assert seen == [device]


def test_nothing_is_left_behind() -> None:
    with pretended_device() as device:
        torch.randn(3).to(device)
    assert torch.Generator().manual_seed(0).__class__ is torch.Generator
    assert torch.randn(3).is_cpu
