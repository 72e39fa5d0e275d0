import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from benchmarks.scaling.hardware import H100, H100_ONE_CARD, Figure
from benchmarks.scaling.model import (
    Mesh,
    Work,
    all_reduce_seconds,
    best_mesh,
    efficiency,
    gathered_bytes,
    ggn_operations,
    jvp_operations,
    memory,
    meshes,
    product_seconds,
    sent_bytes,
    solve_seconds,
    vectors_that_fit,
    vjp_operations,
)
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.resources import Operations

HALF, NOTHING = Figure(0.5, "of the peak", ""), Figure(0.0, "s", "")
WORK = Work("made up", 1000, 10, 10**6, 1e9, False, 50, 4e6, 2000.0, 100.0, HALF, HALF, NOTHING)


def changed(**fields: object) -> Work:
    return dataclasses.replace(WORK, **fields)  # pyright: ignore[reportArgumentType]


def test_operations_of_products() -> None:
    # 20 vectors go in two groups of 16 at most.
    assert jvp_operations(WORK, 3, 20) == 3e9 * (2 + 2 * 20)
    assert vjp_operations(WORK, 3, 20) == 3e9 * (1 + 2 * 20)
    assert ggn_operations(WORK, 3, 20) == 3e9 * (3 + 4 * 20)
    assert ggn_operations(WORK, 3, 1) == 3e9 * (1 + 4)
    assert ggn_operations(changed(frozen=True), 3, 20) == 3e9 * (3 + 2 * 20)


class Adapted(nn.Module):
    """A frozen linear layer with two factors of rank one beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width)
        self.lora = nn.Sequential(nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x) + self.lora(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_operations_are_those_that_the_library_makes(frozen: bool) -> None:
    torch.manual_seed(0)
    layers = 10
    blocks = [Adapted(64) if frozen else nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)]
    network, K, n = Linearisation(nn.Sequential(*blocks), "*lora*" if frozen else None), 6, 8
    x, v, u = torch.randn(n, 64), torch.randn(K, network.num_parameters), torch.randn(K, n, 64)
    network.jvp(x, v)
    with Operations() as forward:
        network.jvp(x, v)
    with Operations() as backward:
        network.vjp(x, u)
    work = changed(forward=2.0 * layers * 64**2, frozen=frozen)
    # The first layer has no tangent and no cotangent of its input, and the small factors are not counted.
    assert forward.count == pytest.approx(jvp_operations(work, n, K), rel=0.15)
    assert backward.count == pytest.approx(vjp_operations(work, n, K), rel=0.15)


def test_a_ring_inside_a_node() -> None:
    # 14 steps of eight ranks; each sends 7/4 of the vector.
    assert all_reduce_seconds(1e9, 8, H100) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1.75e9 / 370e9)
    assert all_reduce_seconds(1e9, 1, H100) == 0
    assert sent_bytes(1e9, 8) == 1.75e9


def test_a_ring_over_nodes() -> None:
    # 16 ranks on two nodes: 30 steps, of which two are between nodes; the network is the slowest link.
    latency = 8.4e-6 + 28 * 3.4e-6 + 2 * 9.6e-6
    assert all_reduce_seconds(1e9, 16, H100) == pytest.approx(latency + 1.875e9 / 368e9)
    assert all_reduce_seconds(1e9, 16, H100_ONE_CARD) == pytest.approx(latency + 1.875e9 / 46e9)


def test_seconds_of_a_product() -> None:
    # 1,000 data on 4 ranks are 250 in five batches; 8 vectors in two groups are four for each rank.
    arithmetic = 250e9 * (2 + 4 * 4) / (0.5 * 989.4e12)
    touched = 5 * 3 * 4 * 4e6 / 3.35e12
    summed = all_reduce_seconds(4 * 4e6, 4, H100)
    assert product_seconds(WORK, H100, 8, Mesh(4, 2)) == pytest.approx(arithmetic + touched + summed)
    slow = changed(overhead=Figure(1.0, "s", ""))
    # A JVP and a pullback of each batch take a second of Python, more than the arithmetic.
    assert product_seconds(slow, H100, 8, Mesh(4, 2)) == pytest.approx(10 + touched + summed)
    assert product_seconds(slow, H100, 8, Mesh(4, 2), kind="jvp") == pytest.approx(5 + touched)


def test_float32_is_slower() -> None:
    ratio = product_seconds(WORK, H100, 8, dtype="fp32") / product_seconds(WORK, H100, 8)
    assert ratio == pytest.approx(989.4 / 66.9, rel=0.05)


@pytest.mark.parametrize("size", [None, 100])
def test_efficiency_falls_with_ranks(size: int | None) -> None:
    for kind in (lambda ranks: Mesh(ranks, 1), lambda ranks: Mesh(1, ranks)):
        found = [efficiency(WORK, H100, 64, kind(ranks), size) for ranks in (1, 2, 4, 8, 16, 32, 64)]
        assert found[0] == pytest.approx(1)
        assert all(after <= before + 1e-12 for before, after in pairwise(found))
        assert 0 < found[-1] < 1


def test_a_group_with_one_sample_shares_no_forward_pass() -> None:
    # All 64 vectors take 4 + 1 forward passes and 256 others; a group with one of them takes one and four.
    work = changed(weights=1)
    assert efficiency(work, H100, 64, Mesh(1, 64)) == pytest.approx((5 + 256) / (64 * 5), rel=1e-6)


def test_memory_by_hand() -> None:
    found = memory(WORK, 64, Mesh(4, 8), stacks=16)
    assert found == {
        "weights of the network": 4e6,
        # Eight vectors of its own, sixteen times 10⁶ numbers each.
        "vectors of the solver": 8 * 16 * 4e6,
        # 50 data: what the forward pass keeps, and four of the largest tensors for each of eight vectors.
        "activations of a batch": 50 * (2000 + 4 * 100 * 8),
        # 8 vectors, 50 data, 10 outputs, twice.
        "outputs or noise of a batch, all vectors": 2 * 4 * 8 * 50 * 10,
        # 250 data of its own.
        "outputs of the network, own data": 4 * 250 * 10,
        "samples, gathered in the end": 64 * 4e6,
    }
    assert gathered_bytes(WORK, 64, Mesh(4, 8)) == 64 * 4e6 * 7 / 8
    # No more than 16 vectors go through the network together.
    assert memory(WORK, 64, Mesh(), 16)["activations of a batch"] == 50 * (2000 + 4 * 100 * 16)


def test_vectors_that_memory_does_not_hold_are_solved_for_in_groups() -> None:
    small = dataclasses.replace(H100, memory=Figure(1e9, "B", ""))
    # 0.256 GB of samples, 4 MB of weights, and 64 MB for each vector, of which eleven fit.
    assert vectors_that_fit(WORK, small, 64, Mesh(), 16) == 11
    assert vectors_that_fit(WORK, small, 64, Mesh(1, 8), 16) == 8
    # Six groups of eleven.
    assert solve_seconds(WORK, small, 64, Mesh(), 16) == pytest.approx(6 * product_seconds(WORK, small, 11))
    assert solve_seconds(WORK, small, 64, Mesh(1, 8), 16) == product_seconds(WORK, small, 64, Mesh(1, 8))


def test_the_best_mesh() -> None:
    assert {(mesh.data, mesh.samples) for mesh in meshes(6)} == {(1, 6), (2, 3), (3, 2), (6, 1)}
    # A large product is divided by data, which repeats no forward pass; a small step with large vectors by samples.
    assert best_mesh(changed(num_data=10**6), H100, 64, 8, 2) == Mesh(8, 1)
    assert best_mesh(changed(weights=10**8, forward=1e6), H100, 64, 8, 2, num_data=8) == Mesh(1, 8)
    tiny = dataclasses.replace(H100, memory=Figure(1e6, "B", ""))
    assert best_mesh(WORK, tiny, 64, 8, 2) is None
