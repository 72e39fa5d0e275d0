"""The pretended device raises an error where a GPU raises one; `test_pairs` needs what it allows."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pretended_device import pretended_device
from torch import Tensor

# Functions of a tensor of the device, one of the CPU, both of three numbers, and the device.
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


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_gpu_forbids(name: str) -> None:
    with pretended_device() as device, pytest.raises((RuntimeError, TypeError), match=r"xpu|generator|device"):
        FORBIDDEN[name](torch.randn(3).to(device), torch.randn(3), device)


def test_threads_are_watched() -> None:
    seen = []
    with pretended_device() as device:
        d = torch.randn(3).to(device)
        thread = threading.Thread(target=lambda: seen.append((d + 1).device))
        thread.start()
        thread.join()
    assert seen == [device]
