"""Posteriors of several processes in files."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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
    return la.predict(X).stddev


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("files")
    return folder, run_on_ranks(_written, 2, str(folder))[1]


def test_a_file_of_two_processes_is_one_of_one_process(written: tuple[Path, Tensor]) -> None:
    folder, stddev = written
    la = LinearisedLaplace.load(folder / "posterior.pt", model())
    assert_close(la.predict(X).stddev, stddev, rtol=1e-12, atol=0)
