"""Samples in host memory and in half precision: whatever is asked of them is as of a plain tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.linear_model import held_samples
from laplace_sampling.linear_model.held_samples import HeldSamples, Holding

CPU = torch.device("cpu")
SAMPLES = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def offloaded(num: int, monkeypatch: pytest.MonkeyPatch) -> HeldSamples:
    """In host memory, from which so many go to the device at once."""
    monkeypatch.setattr(held_samples, "_MOVED_BYTES", num * 5 * 4)
    return HeldSamples.of(SAMPLES, Holding(offloaded=True), CPU)


def counted(function: Callable[[Tensor], Tensor], sizes: list[int]) -> Callable[[Tensor], Tensor]:
    def wrapper(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return function(rows)

    return wrapper


@pytest.mark.parametrize(("num", "blocks"), [(1, [1] * 7), (3, [3, 3, 1]), (100, [7])])
def test_samples_in_host_memory_come_in_blocks(num: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    held, sizes = offloaded(num, monkeypatch), []
    double = counted(lambda rows: 2 * rows, sizes)
    assert torch.equal(held.images(double, torch.empty(7, 5)), 2 * SAMPLES)
    assert sizes == blocks


def test_a_sample_that_is_larger_than_a_block_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_samples, "_MOVED_BYTES", 1)
    assert HeldSamples.of(SAMPLES, Holding(offloaded=True), CPU).block == 1


@pytest.mark.parametrize("num", [1, 4, 7])
def test_the_first_samples(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for held in (HeldSamples.whole(SAMPLES), offloaded(3, monkeypatch)):
        assert torch.equal(held.first(num), SAMPLES[:num])
        assert torch.equal(held.images(lambda rows: rows[:, :2], torch.empty(num, 2)), SAMPLES[:num, :2])


def test_samples_by_their_numbers() -> None:
    held = HeldSamples.whole(SAMPLES)
    part = held.part(range(2, 5))
    assert part is not None
    assert torch.equal(part, SAMPLES[2:5])
    assert held.part(range(5, 8)) is None
    assert len(held.none()) == 0
    assert len(held) == 7


def test_kept_samples_are_copies_of_those_that_are_given() -> None:
    given = SAMPLES.clone()
    held = HeldSamples.of(given, Holding(), CPU)
    given.zero_()
    assert torch.equal(held.full(), SAMPLES)


@pytest.mark.parametrize("offload", [False, True])
def test_half_precision(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = (offloaded(2, monkeypatch) if offload else HeldSamples.whole(SAMPLES)).in_half(torch.float16)
    assert held.rows.dtype == torch.float16
    assert_close(held.full(), SAMPLES, rtol=2**-10, atol=1e-6)
    assert torch.equal(held.first(7), held.full())
    again = HeldSamples.of(held.rows_of_all(), held.holding, CPU, held.scales_of_all())
    assert torch.equal(again.full(), held.full())


@pytest.mark.parametrize(("offload", "expected"), [(False, 64), (True, 0)])
def test_how_many_stay_on_the_device(offload: bool, expected: int) -> None:
    assert Holding(offload).num_on_device(64) == expected
