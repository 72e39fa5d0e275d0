"""Fits of two processes that were killed go on with one, two or four, to the numbers of a fit that nobody disturbed."""

import random
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import SVRG, Evidence, LinearisedLaplace, Stochastic
from laplace_sampling.checkpoint import Results
from laplace_sampling.data.processes import ProcessError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resumed on ranks")]

METHODS = {
    "krylov": "krylov",
    "kfac": "kfac",
    "stochastic": Stochastic(solver=SVRG(max_rank=16)),
}
MOMENTS = random.Random(0)
# Which part of its entries the file of a killed fit has.
FITS = [(name, MOMENTS.uniform(0.0, 1.0)) for name in METHODS]
SIZES = [1, 2, pytest.param(3, marks=pytest.mark.nightly), 4]
N = 61
Numbers = dict[str, Tensor]


class Killed(BaseException):
    """In the place of SIGKILL, which leaves as much in the file."""


class Counted:
    """Counts the entries that a process finds and writes, and may end it after some."""

    def __init__(self) -> None:
        self.found = self.written = 0
        self.end = 10**9
        count, known, write = self, Results._known, Results._write

        def counted_known(self: Results, *call: Any) -> Any:
            found = known(self, *call)
            count.found += found is not None
            return found

        def counted_write(self: Results, *entry: Any) -> None:
            write(self, *entry)
            count.written += 1
            if count.written == count.end:
                raise Killed

        Results._known, Results._write = counted_known, counted_write

    def begin(self, end: int = 10**9) -> None:
        self.found, self.written, self.end = 0, 0, end


def fitted(name: str, checkpoint: Path | None = None, **where: Any) -> Numbers:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    la = LinearisedLaplace(model, "classification", method=METHODS[name], num_samples=8, **where)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    la.fit_hyperparameters(
        loader, criterion=Evidence(max_steps=3, num_samples=4), progress=False, checkpoint=checkpoint
    )
    return {
        "samples": la.samples_,
        "mode": la.mode_,
        "prior precision": la.prior_precision_,
        "effective dimension": la.effective_dimension_,
        "passes": torch.tensor([step.passes for step in la.history_], dtype=torch.float64),
        "scale": torch.tensor([la.scale_, la.temperature_], dtype=torch.float64),
    }


def kept(name: str, part: float, entries: dict[str, int]) -> int:
    """How many entries are written before a kill."""
    return round(1 + part * (entries[name] - 2))


def _interrupted(folder: Path) -> tuple[dict[str, Numbers], dict[str, int]]:
    """Leaves the files of fits that were killed; numbers and entries of fits that were not."""
    warnings.simplefilter("ignore")
    where, counted, whole, entries = {"process_group": dist.group.WORLD}, Counted(), {}, {}
    for name in METHODS:
        counted.begin()
        whole[name] = fitted(name, folder / "whole", **where)
        total = [counted.written]
        dist.broadcast_object_list(total, 0)
        entries[name] = total[0]
    for name, part in FITS:
        counted.begin(kept(name, part, entries))
        with suppress(Killed, ProcessError):
            fitted(name, folder / name, **where)
            raise AssertionError(f"{name} was not killed")
    return whole, entries


def _resumed(folder: Path) -> list[tuple[Numbers, int, int]]:
    """Numbers of the fits that go on, and how many entries they found and wrote."""
    warnings.simplefilter("ignore")
    counted, found, where = Counted(), [], {"process_group": dist.group.WORLD}
    for name, _ in FITS:
        counted.begin()
        found.append((fitted(name, folder / name, **where), counted.found, counted.written))
    return found


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Numbers], dict[str, int]]:
    folder = tmp_path_factory.mktemp("interrupted")
    whole, entries = run_on_ranks(_interrupted, 2, folder)[0]
    return folder, whole, entries


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize("name", METHODS)
def test_a_file_does_not_change_a_fit(name: str, interrupted: Any) -> None:
    _, whole, _ = interrupted
    assert_same(whole[name], fitted(name), name)


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_fit_goes_on_with_other_processes(size: int, interrupted: Any, tmp_path: Path) -> None:
    folder, whole, entries = interrupted
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    results = run_on_ranks(_resumed, size, tmp_path)
    for (name, part), of_ranks in zip(FITS, zip(*results, strict=True), strict=True):
        for numbers, _, _ in of_ranks:
            assert_same(numbers, whole[name], f"{name}, {size}")
        _, found, written = of_ranks[0]
        assert found > 0
        # With as many processes all that was kept is found, and all of the rest is computed.
        if size == 2:
            assert found == kept(name, part, entries)
            assert written == entries[name] - found
    assert not list(tmp_path.iterdir())


def assert_same(numbers: Numbers, expected: Numbers, what: str) -> None:
    for name, value in expected.items():
        atol = 1e-10 * float(value.abs().max())
        assert_close(numbers[name], value, rtol=1e-10, atol=atol, msg=lambda text, n=name: f"{what}, {n}: {text}")
