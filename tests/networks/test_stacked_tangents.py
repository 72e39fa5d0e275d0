"""Stacked tangents give the products of `jvp`, and leave to it what they have no rule for."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grids import covering
from kernels import kernels_of
from torch import Tensor, nn
from torch.func import functional_call, jvp

from laplace_sampling.networks.linearisation import Linearisation


def products(module: nn.Module, x: Any, parameters: Any = None, num: int = 5) -> tuple[Tensor, Tensor, bool]:
    """Those of the network, those of `jvp` vector by vector, and whether tangents were stacked."""
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
    stacked = list(network.ways._stacks.values()) == [True]
    return product, torch.stack(expected).detach().flatten(2), stacked


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
    "same padding": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.LeakyReLU(), nn.Conv2d(2, 1, 3)),
    "linear layers of sequences": lambda: nn.Sequential(nn.Linear(14, 5), nn.Mish(), nn.Linear(5, 2)),
}


@covering(name=NETWORKS, parameters=[None, ["!*weight"], ["*weight"], "first"])
def test_products_of_small_networks(name: str, parameters: Any) -> None:
    torch.manual_seed(0)
    module = NETWORKS[name]()
    for part in module:
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(), part.running_var.uniform_(0.5, 2)  # pyright: ignore
    if parameters == "first":
        parameters = [next(n for n, _ in module.named_parameters())]
    if name == "no bias" and parameters == ["!*weight"]:
        parameters = ["3.weight"]
    x = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    product, expected, stacked = products(module, x, parameters)
    assert stacked
    assert (product - expected).abs().max() <= 1e-10 * expected.abs().max()


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return tangents[0].clone()


def _doubled(x: Tensor) -> Tensor:
    return x * 2


class _Hidden(nn.Module):
    """A network with an operation that rules of functions do not see, or see otherwise than torch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.kind == "function":
            h = _Straight.apply(h)
        if self.kind == "no_grad":
            with torch.no_grad():
                h = torch.tanh(h)
        if self.kind == "detached":
            h = h + h.detach() * 2
        if self.kind == "in place":
            h[:, 0] = 2 * h[:, 1]
        if self.kind == "in place of a view":
            F.relu(h[:, 1:], inplace=True)
        if self.kind == "script":
            with warnings.catch_warnings(action="ignore"):
                h = torch.jit.script(_doubled)(h)
        if self.kind == "numbers":
            h = h * float(h.detach()[0, 0])
        return self.b(torch.sin(h))


@pytest.mark.parametrize("kind", ["no_grad", "detached", "in place", "in place of a view", "numbers", "script"])
def test_what_has_no_rule_is_left_to_jvp(kind: str) -> None:
    torch.manual_seed(0)
    product, expected, stacked = products(_Hidden(kind), torch.randn(5, 3, dtype=torch.float64))
    assert not stacked or kind == "no_grad"
    if kind != "no_grad":  # where `jvp` differentiates what reverse mode does not
        assert (product - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_functions_with_derivatives_of_their_own() -> None:
    torch.manual_seed(0)
    module, x = _Hidden("function").double(), torch.randn(5, 3, dtype=torch.float64)
    network = Linearisation(module)
    v = torch.randn(4, network.num_parameters, dtype=torch.float64)
    with pytest.warns(UserWarning, match="reverse passes"):
        product = network.jvp(x, v)
    u = torch.randn(1, 5, 2, dtype=torch.float64)
    assert ((product * u).sum((1, 2)) - v @ network.vjp(x, u)[0]).abs().max() <= 1e-10


def test_kernels_of_a_product_do_not_grow_with_the_vectors() -> None:
    torch.manual_seed(0)
    network, x, counts = Linearisation(NETWORKS["lenet"]()), torch.randn(1, 1, 14, 14), []
    for num in (4, 16):
        v = torch.randn(num, network.num_parameters)
        network.jvp(x, v)
        counts.append(kernels_of(partial(network.jvp, x, v)))
    assert counts[0] == counts[1]
    # Ten layers: a value, a tangent of weights and of inputs, their sum, and views of these.
    assert counts[0] <= 180
