"""Jacobian-vector products of many vectors, and of few data, are those of `torch.func.jvp` vector by vector."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grids import covering
from torch import Tensor, nn
from torch.func import functional_call, jvp

from laplace_sampling.networks.linearisation import Linearisation


def products(module: nn.Module, x: Any, parameters: Any = None, num: int = 5) -> tuple[Tensor, Tensor]:
    """Those of the network, and those of `jvp` vector by vector."""
    module = module.double().eval()
    network = Linearisation(module, parameters)
    v = torch.randn(num, network.num_parameters, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    product = network.jvp(x, v)
    weights = {name: p.detach() for name, p in module.named_parameters()}
    primals = {name: weights[name] for name in network.names}
    expected = [
        jvp(lambda w: functional_call(module, {**weights, **w}, (x,)), (primals,), (network.unflatten(row),))[1]
        for row in v
    ]
    return product, torch.stack(expected).detach().flatten(2)


NETWORKS = {
    "lenet": lambda: nn.Sequential(
        *(nn.Conv2d(1, 3, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3)),
    ),
    "batch norm": lambda: nn.Sequential(
        *(nn.Conv2d(1, 3, 3, stride=2, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 2, 3, dilation=2)),
        *(nn.BatchNorm2d(2, affine=False), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)),
    ),
    "no bias": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(196, 4, bias=False), nn.ELU(), nn.Linear(4, 3, bias=False)
    ),
    "linear layers of sequences": lambda: nn.Sequential(nn.Linear(14, 5), nn.Mish(), nn.Linear(5, 2)),
}


@covering(name=NETWORKS, parameters=[None, ["*weight"], "first"], num_data=[1, 2, 4], num=[1, 5, 13, 120])
def test_products_of_small_networks(name: str, parameters: Any, num_data: int, num: int) -> None:
    """Those of 120 vectors and few data are computed from the rows of the Jacobian."""
    torch.manual_seed(0)
    module = NETWORKS[name]()
    for part in module:
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(), part.running_var.uniform_(0.5, 2)  # pyright: ignore
    if parameters == "first":
        parameters = [next(n for n, _ in module.named_parameters())]
    x = torch.randn(num_data, 1, 14, 14, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    product, expected = products(module, x, parameters, num)
    assert product.shape == expected.shape
    assert (product - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_of_a_datum_alone(name: str) -> None:
    torch.manual_seed(0)
    network = Linearisation(NETWORKS[name]().double().eval())
    x = torch.randn(3, 1, 14, 14, dtype=torch.float64)
    rows = network.jacobian(x)
    for n in range(3):
        assert (network.jacobian(x[n : n + 1]) - rows[n]).abs().max() <= 1e-12 * rows[n].abs().max()


def test_outputs_that_depend_on_no_weight() -> None:
    """A weight that a branch leaves out has no derivative, whichever way a product takes."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] if bool((x < 0).all()) else self.inside(x)

    network, x = Linearisation(Gated()), torch.rand(1, 3) + 1
    for num in (1, 2, 64):
        v = torch.randn(num, network.num_parameters)
        assert bool(network.jvp(x, v).any())
        assert torch.equal(network.jvp(-x, v), torch.zeros(num, 1, 2))


def _doubled(x: Tensor) -> Tensor:
    return x * 2


class _Hidden(nn.Module):
    """A network with an operation that torch differentiates in another way than those around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.kind == "detached":
            h = h + h.detach() * 2
        if self.kind == "in place":
            h[:, 0] = 2 * h[:, 1]
        if self.kind == "in place of a view":
            F.relu(h[:, 1:], inplace=True)
        if self.kind == "script":
            with warnings.catch_warnings(action="ignore"):
                h = torch.jit.script(_doubled)(h)
        return self.b(torch.sin(h))


@pytest.mark.parametrize("kind", ["detached", "in place", "in place of a view", "script"])
@pytest.mark.parametrize("num_data", [1, 5])
def test_operations_that_hide_what_they_do(kind: str, num_data: int) -> None:
    torch.manual_seed(0)
    product, expected = products(_Hidden(kind), torch.randn(num_data, 3, dtype=torch.float64), num=9)
    assert (product - expected).abs().max() <= 1e-10 * expected.abs().max()
