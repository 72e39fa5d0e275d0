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
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import SVRG, LinearisedLaplace, Stochastic
from laplace_sampling.checkpoint import Checkpoint
from laplace_sampling.data import fit_group
from laplace_sampling.data.processes import ProcessError
from laplace_sampling.journal import Journal

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resumed on ranks")]

METHODS = {
    "krylov": "krylov",
    "kfac": "kfac",
    "stochastic": Stochastic(solver=SVRG(max_rank=16)),
}
MOMENTS = random.Random(0)
# Which part of its entries the file of a killed fit has.
FITS = [(name, MOMENTS.uniform(0.0, 1.0)) for name in METHODS]
# Number of processes on each axis: the data, the samples.
SHAPES = [(1, 1), (2, 1), pytest.param((3, 1), marks=pytest.mark.nightly), (4, 1)]
N = 61
Numbers = dict[str, Tensor]


class Killed(BaseException):
    """In the place of SIGKILL, which leaves as much in the file."""


class Counted:
    """Counts the entries that a process finds and writes, and may end it after some."""

    def __init__(self) -> None:
        self.found = self.written = 0
        self.end = 10**9
        count, known, append = self, Journal.known, Journal._append

        def counted_known(self: Journal, key: str) -> Any:
            found = known(self, key)
            count.found += found is not None
            return found

        def counted_append(self: Journal, entry: list[Any]) -> None:
            append(self, entry)
            count.written += 1
            if count.written == count.end:
                raise Killed

        Journal.known, Journal._append = counted_known, counted_append

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
    la.fit_hyperparameters(loader, max_steps=3, num_samples=4, progress=False, checkpoint=checkpoint)
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
    fit_group._LOOK = 0.05
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


def _where(shape: tuple[int, int]) -> dict[str, Any]:
    if shape[1] == 1:
        return {"process_group": dist.group.WORLD}
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("data", "samples"))}


def _resumed(folder: Path, shape: tuple[int, int]) -> list[tuple[Numbers, int, int]]:
    """Numbers of the fits that go on, and how many entries they found and wrote."""
    warnings.simplefilter("ignore")
    counted, found, where = Counted(), [], _where(shape)
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_killed_fit_goes_on_with_other_processes(shape: tuple[int, int], interrupted: Any, tmp_path: Path) -> None:
    folder, whole, entries = interrupted
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    results = run_on_ranks(_resumed, shape[0] * shape[1], tmp_path, shape)
    for (name, part), of_ranks in zip(FITS, zip(*results, strict=True), strict=True):
        for numbers, _, _ in of_ranks:
            assert_same(numbers, whole[name], f"{name}, {shape}")
        _, found, written = of_ranks[0]
        assert found > 0
        # With as many processes all that was kept is found, and all of the rest is computed.
        if shape == (2, 1):
            assert found == kept(name, part, entries)
            assert written == entries[name] - found
    assert not list(tmp_path.iterdir())


def _ended_last(path: Path) -> Any:
    """Files after a process failed at the end of a fit; the error of another mesh; and how the same mesh goes on."""
    warnings.simplefilter("ignore")
    counted, where = Counted(), _where((1, 2))
    expected, written, done = fitted("kfac", path, **where), counted.written, Checkpoint.done

    def fails(self: Checkpoint, fit: Any) -> None:
        if dist.get_rank() == 1:
            raise Killed
        done(self, fit)

    fit_group._LOOK, Checkpoint.done = 0.05, fails  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(Killed, ProcessError):
        fitted("kfac", path, **where)
    Checkpoint.done = done
    dist.barrier()
    there = sorted(file.name for file in path.parent.iterdir())
    try:
        fitted("kfac", path, **_where((2, 1)))
        message = ""
    except (ValueError, ProcessError) as error:
        message = str(error)
    counted.begin()
    return there, message, expected, fitted("kfac", path, **where), written, counted.found, list(path.parent.iterdir())


def test_files_of_samples_stay_until_all_have_the_fit(tmp_path: Path) -> None:
    for there, message, expected, numbers, written, found, left in run_on_ranks(_ended_last, 2, tmp_path / "fit"):
        assert there == ["fit", "fit.samples1"]
        assert "`mesh`" in message
        assert_same(numbers, expected, "kfac")
        assert found == written > 3
        assert not left


def assert_same(numbers: Numbers, expected: Numbers, what: str) -> None:
    for name, value in expected.items():
        atol = 1e-10 * float(value.abs().max())
        assert_close(numbers[name], value, rtol=1e-10, atol=atol, msg=lambda text, n=name: f"{what}, {n}: {text}")
