"""Processes of a fit that fail, end, are slow or have no data, and fits that go on after them."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_sampling import Evidence, LinearisedLaplace, from_loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning"),
]

N = 23
# A test fails long before processes that nobody ends would.
TIMEOUT = 40.0


def tensors(num: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 2, generator=generator, dtype=torch.float64)
    return x, x[:, :1].sin() + 0.1 * torch.randn(num, 1, generator=generator, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def laplace(likelihood: Any = "regression", **where: Any) -> LinearisedLaplace:
    return LinearisedLaplace(network(), likelihood, method="krylov", num_samples=4, **where)


def together() -> dict[str, Any]:
    return {"process_group": dist.group.WORLD}


def fit(la: LinearisedLaplace, data: Dataset | None = None, **arguments: Any) -> LinearisedLaplace:
    data = TensorDataset(*tensors()) if data is None else data
    arguments = {
        "budget": None,
        "criterion": Evidence(max_steps=2, num_samples=4),
        "tolerance": 1e-8,
        "progress": False,
        **arguments,
    }
    return la.fit_hyperparameters(DataLoader(data, batch_size=5), **arguments)


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Unreadable(TensorDataset):
    """Has a last datum that cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == N - 1:
            raise OSError("no such image")
        return super().__getitem__(index)


def _bad_datum() -> list[tuple[str, str]]:
    x, y = tensors()
    x[-1] = torch.nan
    la = laplace(**together())
    return [caught(lambda: fit(la, Unreadable(*tensors()))), caught(lambda: fit(la, TensorDataset(x, y)))]


def test_a_datum_that_one_process_cannot_read_ends_all() -> None:
    first, second, third = run_on_ranks(_bad_datum, 3, timeout=TIMEOUT)
    assert third[0] == ("OSError", "no such image")
    for other in (first[0], second[0]):
        assert other[0] == "ProcessError"
        assert "OSError: no such image" in other[1]
    assert third[1][0] == "ValueError"
    for other in (first[1], second[1]):
        assert other[0] == "ProcessError"
        assert third[1][1] in other[1]


class Failing:
    """A loss of a user that fails on one process after some calls."""

    def __init__(self, rank: int, after: int) -> None:
        self.rank, self.left = rank, after

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        self.left -= 1
        if dist.is_initialized() and dist.get_rank() == self.rank and self.left < 0:
            raise ZeroDivisionError("the loss of a user")
        return 0.5 * (f - y).square().sum()


def _failing_loss() -> Any:
    loss = Failing(1, 12)
    la = laplace(from_loss(loss), **together())
    found = caught(lambda: fit(la))
    loss.left = 10**9
    # The others have left sums, which another fit must not take for its own; nor must a collective of the user.
    here = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(here)
    return found, here, fit(la).samples_


def test_an_error_in_a_loss_ends_all_and_the_next_fit_is_right() -> None:
    results = run_on_ranks(_failing_loss, 3, timeout=TIMEOUT)
    alone = fit(laplace(from_loss(Failing(-1, 0)))).samples_
    for rank, ((kind, message), here, samples) in enumerate(results):
        assert kind == ("ZeroDivisionError" if rank == 1 else "ProcessError"), message
        assert ("the loss of a user" if rank == 1 else "has failed") in message
        assert_close(here, torch.full((5,), sum(range(len(results))) * 1.0))
        assert_close(samples, alone, rtol=1e-6, atol=1e-8)


def _killed(rank: int) -> Any:
    def kill(step: Any) -> None:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return caught(lambda: fit(laplace(**together()), callback=kill))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_kill_of_one_process_ends_the_others(rank: int) -> None:
    results = run_on_ranks(_killed, 3, rank, timeout=TIMEOUT, may_end=True)
    assert results.pop(rank) is None
    for kind, message in results:
        assert kind == "ProcessError"
        assert "`checkpoint=`" in message


def _few(num: int) -> Tensor:
    return fit(laplace(**together()), TensorDataset(*tensors(num))).samples_


@pytest.mark.parametrize("num", [3, 6])
def test_processes_without_data_and_with_unequal_parts(num: int) -> None:
    alone = fit(laplace(), TensorDataset(*tensors(num))).samples_
    for samples in run_on_ranks(_few, 4, num, timeout=TIMEOUT):
        assert_close(samples, alone, rtol=1e-8, atol=1e-10)
