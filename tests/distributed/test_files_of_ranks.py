"""Posteriors of several processes in files: by `save`, and by `torch.distributed.checkpoint`."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import LinearisedLaplace

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("files of ranks")]

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _written(folder: str) -> Tensor:
    warnings.simplefilter("ignore")
    la = LinearisedLaplace(model(), "regression", num_samples=4, process_group=dist.group.WORLD)
    la.fit(DataLoader(TensorDataset(X, X.sum(1, keepdim=True).sin()), 4), progress=False)
    if dist.get_rank() == 0:
        la.save(Path(folder) / "posterior.pt")
    dcp.save(la.state_dict(), checkpoint_id=Path(folder) / "posterior")
    return la.predict(X).stddev


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("files")
    return folder, run_on_ranks(_written, 2, str(folder))[1]


def test_a_file_of_two_processes_is_one_of_one_process(written: tuple[Path, Tensor]) -> None:
    folder, stddev = written
    la = LinearisedLaplace.load(folder / "posterior.pt", model())
    assert_close(la.predict(X).stddev, stddev, rtol=1e-12, atol=0)


def _state(folder: Path) -> dict[str, Tensor]:
    kept: dict[str, Any] = dcp.FileSystemReader(folder / "posterior").read_metadata().state_dict_metadata
    state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in kept.items()}
    dcp.load(state, checkpoint_id=folder / "posterior")
    return state


def test_distributed_checkpoints_are_read_by_one_process(written: tuple[Path, Tensor]) -> None:
    folder, stddev = written
    la = LinearisedLaplace(model(), "regression", num_samples=4)
    warnings.simplefilter("ignore")
    la.load_state_dict(_state(folder))
    assert_close(la.predict(X).stddev, stddev, rtol=1e-12, atol=0)


def _read(folder: str) -> Tensor:
    la = LinearisedLaplace(model(), "regression", num_samples=4, process_group=dist.group.WORLD)
    la.load_state_dict(_state(Path(folder)))
    return la.predict(X).stddev


def test_distributed_checkpoints_are_read_by_more_processes(written: tuple[Path, Tensor]) -> None:
    folder, stddev = written
    for found in run_on_ranks(_read, 3, str(folder)):
        assert_close(found, stddev, rtol=1e-12, atol=0)
