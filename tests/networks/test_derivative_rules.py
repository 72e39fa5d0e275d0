"""Forward derivatives of products and of batch normalisation, against torch's own, and what they cost."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grids import covering
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import jvp, vmap
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from laplace_sampling.networks.derivatives import ComposedLayers
from laplace_sampling.networks.linearisation import Linearisation

Shape = tuple[int, ...]


# What is linear in each of two, and in a bias.
PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[Shape]]] = {
    "linear": (F.linear, [(5, 3), (4, 3), (4,)]),
    "linear, three axes": (F.linear, [(5, 2, 3), (4, 3), (4,)]),
    "linear, one axis": (F.linear, [(3,), (4, 3), (4,)]),
    "linear without bias": (F.linear, [(5, 3), (4, 3)]),
    "conv1d": (lambda *a: F.conv1d(*a, stride=2, padding=1), [(5, 2, 7), (3, 2, 3), (3,)]),
    "conv2d": (lambda *a: F.conv2d(*a, padding="same"), [(5, 2, 7, 6), (3, 2, 3, 3), (3,)]),
    "conv2d of one": (F.conv2d, [(2, 7, 6), (3, 2, 3, 3), (3,)]),
    "conv2d without bias": (lambda x, w: F.conv2d(x, w, None, 2, groups=2), [(5, 4, 7, 6), (6, 2, 3, 3)]),
    "conv3d": (F.conv3d, [(5, 2, 4, 5, 6), (3, 2, 2, 3, 3), (3,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(5, 2, 7), (2, 3, 3), (3,)]),
    "conv_transpose2d": (lambda *a: F.conv_transpose2d(*a, stride=2), [(5, 2, 4, 3), (2, 3, 3, 3), (3,)]),
    "conv_transpose3d": (F.conv_transpose3d, [(5, 2, 2, 3, 3), (2, 3, 2, 2, 2), (3,)]),
    "torch.matmul": (torch.matmul, [(5, 2, 3), (3, 4)]),
    "Tensor.matmul": (Tensor.matmul, [(5, 3), (3, 4)]),
    "@": (lambda a, b: a @ b, [(5, 3), (3, 4)]),
    "mm": (torch.mm, [(5, 3), (3, 4)]),
    "Tensor.mm": (Tensor.mm, [(5, 3), (3, 4)]),
    "bmm": (torch.bmm, [(5, 3, 2), (5, 2, 4)]),
}


def normalised(statistics: int, *affine: bool) -> Callable[..., Tensor]:
    def normalise(x: Tensor, *parameters: Tensor) -> Tensor:
        mean = torch.linspace(-1, 2, statistics, dtype=x.dtype)
        var = torch.linspace(0.3, 3, statistics, dtype=x.dtype)
        found = iter(parameters)
        weight, bias = (next(found) if given else None for given in affine)
        return F.batch_norm(x, mean, var, weight, bias, eps=0.1)

    return normalise


NORMS: dict[str, tuple[Callable[..., Tensor], list[Shape]]] = {
    "of rows": (normalised(3, True, True), [(5, 3), (3,), (3,)]),
    "of images": (normalised(3, True, True), [(5, 3, 4, 2), (3,), (3,)]),
    "without parameters": (normalised(3, False, False), [(5, 3, 4)]),
    "without bias": (normalised(3, True, False), [(5, 3, 4), (3,)]),
    "without scale": (normalised(3, False, True), [(5, 3, 4), (3,)]),
}

EVERY = [
    pytest.param(f, shapes, given, id=f"{name}: {given}")
    for name, (f, shapes) in [*PRODUCTS.items(), *NORMS.items()]
    for given in product((0, 1), repeat=len(shapes))
]


def numbers(shapes: list[Shape], seed: int, *batch: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch, *shape, generator=generator, dtype=dtype) for shape in shapes]


def composed(f: Callable[..., Tensor], *args: Any) -> Tensor:
    with ComposedLayers():
        return f(*args)


@pytest.mark.parametrize(("f", "shapes", "given"), EVERY)
def test_one_and_many_tangents_are_those_of_torch(
    f: Callable[..., Tensor], shapes: list[Shape], given: tuple[int, ...]
) -> None:
    values, tangents = numbers(shapes, 0), numbers(shapes, 1)
    tangents = [t * here for t, here in zip(tangents, given, strict=True)]
    value, expected = jvp(f, tuple(values), tuple(tangents))
    with dual_level():
        inputs = [make_dual(p, t) if here else p for p, t, here in zip(values, tangents, given, strict=True)]
        found = unpack_dual(composed(f, *inputs))
    assert_close(found.primal, value)
    if any(given):
        assert found.tangent is not None
        assert_close(found.tangent, expected)
        assert_many_tangents(f, shapes, given)
    else:
        assert found.tangent is None


def assert_many_tangents(f: Callable[..., Tensor], shapes: list[Shape], given: tuple[int, ...]) -> None:
    """Four tangents at once, under `vmap`."""
    values, tangents = numbers(shapes, 0), numbers(shapes, 1, 4)
    here = [n for n, one in enumerate(given) if one]

    def pushed(way: Callable[..., Tensor]) -> Tensor:
        def of_some(*some: Tensor) -> Tensor:
            every = [some[here.index(n)] if n in here else value for n, value in enumerate(values)]
            return way(*every)

        def push(*t: Tensor) -> Tensor:
            return jvp(of_some, tuple(values[n] for n in here), t)[1]

        return vmap(push)(*[tangents[n] for n in here])

    assert_close(pushed(lambda *args: composed(f, *args)), pushed(f))


@pytest.mark.parametrize("name", PRODUCTS)
def test_zeros_are_not_multiplied(name: str) -> None:
    """One product more for a tangent of one factor, two for both, none for that of the bias alone."""
    f, shapes = PRODUCTS[name]

    def operations(*given: bool) -> int:
        values, tangents = numbers(shapes, 0), numbers(shapes, 1)
        with dual_level(), FlopCounterMode(display=False) as counter:
            composed(f, *[make_dual(p, t) if g else p for p, t, g in zip(values, tangents, given, strict=True)])
        return counter.get_total_flops()

    biases = (False, True) if len(shapes) == 3 else (None,)
    for a, b, bias in product((False, True), (False, True), biases):
        given = (a, b) if bias is None else (a, b, bias)
        assert operations(*given) == (1 + a + b) * operations(*[False] * len(shapes)) > 0


@covering(given=list(product((0, 1), repeat=3))[1:], dtype=[torch.bfloat16, torch.float32])
def test_normalisation_in_half_precision(dtype: torch.dtype, given: tuple[int, int, int]) -> None:
    """Of images in bfloat16 with parameters in it, or in float32 as under autocast, against float64."""
    shapes = NORMS["of images"][1]
    types = [torch.bfloat16, dtype, dtype]
    values = [t.to(kind) for t, kind in zip(numbers(shapes, 0), types, strict=True)]
    tangents = [g * t.to(kind) for t, kind, g in zip(numbers(shapes, 1), types, given, strict=True)]
    mean, var = torch.full((3,), 0.5), torch.full((3,), 2.0)

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, mean.to(w.dtype), var.to(w.dtype), w, b)

    with dual_level():
        inputs = [make_dual(p, t) if g else p for p, t, g in zip(values, tangents, given, strict=True)]
        found = unpack_dual(composed(norm, *inputs)).tangent
    exact = jvp(norm, tuple(v.double() for v in values), tuple(t.double() for t in tangents))[1]
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert_close(found.double(), exact, rtol=0.01, atol=0.02)


def test_a_bias_alone_under_autocast() -> None:
    x, w, b = numbers([(5, 3), (4, 3), (4,)], 0, dtype=torch.float32)
    with dual_level(), torch.autocast("cpu", torch.bfloat16):
        found = unpack_dual(composed(F.linear, x, w, make_dual(b, torch.ones(4)))).tangent
    assert found is not None
    assert_close(found, torch.ones(5, 4, dtype=torch.bfloat16))


class Graph(nn.Module):
    """Two layers over the nodes of a graph whose adjacency matrix is held sparse; data are nodes."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("edges", torch.rand(6, 6, dtype=torch.float64).bernoulli().to_sparse(layout=layout))
        self.register_buffer("nodes", torch.randn(6, 3, dtype=torch.float64))
        self.inner, self.outer = nn.Linear(3, 5).double(), nn.Linear(5, 2).double()

    def forward(self, index: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, self.outer(self.edges @ self.inner(self.nodes).tanh()))[index]


LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr]


@pytest.mark.filterwarnings(
    "ignore:.*slower", "ignore:Sparse CSR", "ignore:There is a performance"
)  # torch has no batches of sparse matrices
def test_sparse_matrices() -> None:
    index, generator = torch.arange(4), torch.Generator().manual_seed(1)
    found, prints = [], set()
    for layout in LAYOUTS:
        network = Linearisation(Graph(layout))
        generator.manual_seed(1)
        v = torch.randn(3, network.num_parameters, generator=generator, dtype=torch.float64)
        u = torch.randn(2, 4, 2, generator=generator, dtype=torch.float64)
        products = [network.jvp(index, v), network.vjp(index, u), network.jacobian(index)]
        found.append([*products, network.ggn(index, v[:1], torch.tanh), network.vjp_each(index, u[0])])
        assert network.lacking is None or layout == torch.sparse_csr
        before = network.fingerprint()
        buffer = network.module.edges
        (buffer if layout == torch.strided else buffer.values())[0] *= 2  # pyright: ignore
        prints |= {tuple(before.tolist()), tuple(network.fingerprint().tolist())}
    for other in found[1:]:
        for product_, right in zip(other, found[0], strict=True):
            assert_close(product_, right)
    assert len(prints) == 6


class Batches(nn.Module):
    """`torch.vmap` over the data, within the network."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5).double(), nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.outer((row @ self.inner.weight.T).sin()))(x)


def test_a_network_that_takes_batches_itself() -> None:
    network, x = Linearisation(Batches(), ["*.weight"]), torch.randn(4, 3, dtype=torch.float64)
    v = torch.randn(3, network.num_parameters, dtype=torch.float64)
    expected = torch.einsum("ncp,kp->knc", network.jacobian(x), v)
    assert_close(network.jvp(x, v), expected)
    assert_close(network.jvp(x, v[:1]), expected[:1])
    assert network.lacking is None
