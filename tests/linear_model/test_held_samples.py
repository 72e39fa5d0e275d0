"""Samples in host memory and in half precision: whatever is asked of them is as of a plain tensor."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from laplace_sampling import Krylov, LinearisedLaplace
from laplace_sampling.linear_model import held_samples
from laplace_sampling.linear_model.held_samples import HeldSamples, Holding
from laplace_sampling.methods.problem import Memory

CPU = torch.device("cpu")
SAMPLES = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def offloaded(num: int, monkeypatch: pytest.MonkeyPatch) -> HeldSamples:
    """In host memory, from which so many go to the device at once."""
    monkeypatch.setattr(held_samples, "_MOVED_BYTES", num * 5 * 4)
    return HeldSamples.of(SAMPLES, Holding(offloaded=True), CPU)


@pytest.mark.parametrize(("num", "blocks"), [(1, [1] * 7), (3, [3, 3, 1]), (100, [7])])
def test_samples_in_host_memory_come_in_blocks(num: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list(offloaded(num, monkeypatch).blocks())
    assert [len(rows) for _, rows in parts] == blocks
    assert torch.equal(torch.cat([rows for _, rows in parts]), SAMPLES)
    assert all(torch.equal(rows, SAMPLES[numbers]) for numbers, rows in parts)


def test_a_sample_that_is_larger_than_a_block_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_samples, "_MOVED_BYTES", 1)
    assert HeldSamples.of(SAMPLES, Holding(offloaded=True), CPU).block == 1


@pytest.mark.parametrize("num", [1, 4, 7])
def test_the_first_samples(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for held in (HeldSamples.whole(SAMPLES), offloaded(3, monkeypatch)):
        assert torch.equal(held.first(num), SAMPLES[:num])


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
    part = held.part(range(2, 5))  # as a warm start takes them
    assert part is not None
    assert torch.equal(part, held.full()[2:5])
    again = HeldSamples.of(held.rows_of_all(), held.holding, CPU, held.scales_of_all())
    assert torch.equal(again.full(), held.full())


@pytest.mark.parametrize(("offload", "expected"), [(False, 64), (True, 0)])
def test_how_many_stay_on_the_device(offload: bool, expected: int) -> None:
    assert Holding(offload).num_on_device(64) == expected


def test_samples_in_host_memory_take_none_of_a_device_but_that_of_a_cpu() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    method = Krylov(max_memory=4 * 5 * 20, offload_samples=True)
    la = LinearisedLaplace(torch.nn.Linear(4, 1), "regression", method=method, num_samples=64)
    with pytest.raises(ValueError, match="max_memory"):
        la.fit([(x, x[:, :1])], progress=False)
    assert Memory(1.0, True, 1, Holding(offloaded=True)).kept(64) == 0
    with pytest.raises(TypeError, match="`offload_samples`"):
        Krylov(offload_samples=1)  # pyright: ignore


def test_predictions_and_files_are_those_of_other_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_samples, "_MOVED_BYTES", 3 * 5 * 4)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 1)
    plain, moved = (
        LinearisedLaplace(model, "regression", method=Krylov(offload_samples=offload), num_samples=8).fit(
            [(x, x[:, :1])], progress=False
        )
        for offload in (False, True)
    )
    assert_close(moved.predict(x).deviations, plain.predict(x).deviations)
    moved.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", model)
    assert again.settings.holding.offloaded
    assert torch.equal(again.predict(x).deviations, moved.predict(x).deviations)
