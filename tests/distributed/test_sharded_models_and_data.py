"""Models of `fully_shard` whose processes share out the data, too: each gathers weights while it runs its own data."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import SGD, Evidence, LinearisedLaplace, Stochastic

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "krylov": {"method": "krylov", "parameters": ["2.*"]},
    "kfac": {"method": "kfac"},
    "last layer": {"parameters": "last_layer"},
    # Mini-batches are divided by their places: a process runs data whose outputs are in another one.
    # Few steps: each of them takes the shared weights together.
    "stochastic": {
        "method": Stochastic(solver=SGD(epochs=2, mode_epochs=2, min_steps=6, batch_size=5, finish_passes=0)),
        "parameters": ["2.*"],
    },
}


def _fitted(case: str, shard: bool) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(23, 3).double(), torch.randn(23, 2).double()
    where: dict[str, Any] = {}
    if shard:
        fully_shard(model[2])
        fully_shard(model)
        where = {"process_group": dist.group.WORLD}
    la = LinearisedLaplace(model, "regression", num_samples=4, **CASES[case], **where)
    # Of 23 data one process has 11, another one 12, in as many pieces.
    la.fit_hyperparameters(
        DataLoader(TensorDataset(x, y), 5), progress=False, budget=None, criterion=Evidence(max_steps=2)
    )
    return {"alpha": la.prior_precision_, "samples": la.samples_, "stddev": la.predict(x[:3]).stddev}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case == "stochastic")) for case in CASES]
)
def test_fits_are_those_of_one_process(case: str) -> None:
    alone = _fitted(case, False)
    for of_rank in run_on_ranks(_fitted, 2, case, True):
        for name, value in alone.items():
            assert_close(of_rank[name], value, rtol=1e-8, atol=1e-8 * float(value.abs().max()))


def _too_few() -> str:
    warnings.simplefilter("ignore")
    model = fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)))
    la = LinearisedLaplace(model, "regression", method="kfac", process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"(?s).") as caught:
        la.fit([(torch.zeros(1, 3), torch.zeros(1, 1))], progress=False)
    return str(caught.value)


def test_each_process_needs_data() -> None:
    assert all("batches" in text for text in run_on_ranks(_too_few, 2))
