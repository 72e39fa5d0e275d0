import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks

pytestmark = pytest.mark.slow


def _summed(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    summed = x * (dist.get_rank() + 1)
    dist.all_reduce(summed)
    return dist.get_rank(), summed


def test_results_are_those_of_all_ranks() -> None:
    results = run_on_ranks(_summed, 2, torch.arange(3.0))
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.equal(summed, 3 * torch.arange(3.0)) for _, summed in results)


def _raises_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.zeros(1))


def _second_is_killed() -> None:
    if dist.get_rank() == 1:
        os._exit(9)
    dist.all_reduce(torch.zeros(1))


def _second_is_slow() -> None:
    if dist.get_rank() == 1:
        torch.multiprocessing.get_context().Event().wait()


def test_a_rank_that_fails_ends_all() -> None:
    with pytest.raises(RuntimeError, match=r"_raises_on_the_second(?s:.*)the cause"):
        run_on_ranks(_raises_on_the_second, 2)


def test_a_rank_that_is_killed_ends_all() -> None:
    with pytest.raises(RuntimeError, match=r"Rank [01]"):
        run_on_ranks(_second_is_killed, 2)


def test_a_rank_that_waits_for_ever_ends_all() -> None:
    with pytest.raises(RuntimeError, match=r"\[1\]"):
        run_on_ranks(_second_is_slow, 2, timeout=3.0)


def _crashes(folder: str, times: int) -> int:
    if dist.get_rank() == 0:
        number = len(os.listdir(folder))
        if number < times:
            (Path(folder) / str(number)).touch()
            os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return dist.get_rank()


def test_ranks_that_crash_are_started_once_more(tmp_path: Path) -> None:
    assert run_on_ranks(_crashes, 2, str(tmp_path), 1) == [0, 1]


def test_ranks_that_crash_again_are_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"\[0\]"):
        run_on_ranks(_crashes, 2, str(tmp_path), 2)
