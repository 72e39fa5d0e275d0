"""What each process reads, and what it does with loaders that differ from process to process."""

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

from laplace_sampling import Data, Evidence, LinearisedLaplace, StopFit
from laplace_sampling.data.processes import ProcessError, Processes
from laplace_sampling.data.training_data import TrainingData

pytestmark = pytest.mark.slow


def together() -> Processes:
    return Processes(dist.group.WORLD)


def numbered(num: int) -> TensorDataset:
    return TensorDataset(torch.arange(num * 2, dtype=torch.float64).reshape(num, 2), torch.arange(num) % 3)


class Read(Dataset):
    """Remembers what is read of it."""

    def __init__(self, num: int) -> None:
        self.num, self.read = num, []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.full((2,), float(index)), index % 3


def _reads(num: int) -> tuple[list[int], Tensor, int]:
    dataset = Read(num)
    data = TrainingData(DataLoader(dataset, batch_size=4), processes=together())
    first = list(dataset.read)
    assert torch.equal(data.inputs(torch.arange(num)), torch.arange(num)[:, None].expand(-1, 2).float())
    return first, data.targets, data.batch_size


def test_each_process_reads_its_part_once_and_has_all_targets() -> None:
    found = run_on_ranks(_reads, 3, 20)
    # The first batch is read twice by all, to see that it repeats.
    parts = [read[8:] for read, *_ in found]
    assert parts == [list(range(6)), list(range(6, 13)), list(range(13, 20))]
    for _, targets, size in found:
        assert torch.equal(targets, torch.arange(20) % 3)
        assert size == 4


def _inputs_of(num: int, sampler: bool, batch: int) -> tuple[Tensor, Tensor, int]:
    dataset = numbered(num)
    own = DistributedSampler(dataset, shuffle=True, seed=3) if sampler else None
    torch.manual_seed(dist.get_rank())
    data = TrainingData(DataLoader(dataset, batch, sampler=own, shuffle=not sampler), processes=together())
    return data.inputs(torch.arange(data.num_data)), data.targets, data.num_data


@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("num", [11, 2])
def test_a_distributed_sampler_gives_all_data_once(num: int, sampler: bool) -> None:
    x, y = numbered(num).tensors
    for inputs, targets, number in run_on_ranks(_inputs_of, 3, num, sampler, 4):
        assert number == num  # what the sampler gives twice is there once
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)


def _others_on_each() -> str:
    dataset = numbered(10 + dist.get_rank())
    own = TensorDataset(dataset.tensors[0] + dist.get_rank(), dataset.tensors[1])
    with pytest.raises(ValueError, match="different data") as caught:
        TrainingData(DataLoader(own, 4), processes=together())
    return str(caught.value)


def test_other_data_on_each_process_are_refused() -> None:
    assert all("different data" in text for text in run_on_ranks(_others_on_each, 2))


def _spoilt(at: int) -> str:
    x, y = numbered(10).tensors
    x = x.clone()
    x[at] = torch.nan
    with pytest.raises((ValueError, ProcessError), match="NaN") as caught:
        TrainingData(DataLoader(TensorDataset(x, y), 4), processes=together())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_bad_data_in_the_part_of_one_are_told_to_all() -> None:
    others, own = run_on_ranks(_spoilt, 2, 7)
    assert own.startswith("ValueError: Batch 1 (counted from 0) has NaN or infinity in its inputs")
    assert others.startswith("ProcessError: Process 1 of the 2 that share the fit has failed: ValueError: Batch 1")


def _unlike() -> str:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1 + rank)
    la = LinearisedLaplace(nn.Linear(2, 3).double(), "classification", seed=rank, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="processes") as caught:
        la.fit(DataLoader(numbered(10), 4), progress=False)
    return str(caught.value)


def test_processes_that_are_not_alike_are_refused() -> None:
    for text in run_on_ranks(_unlike, 2):
        assert "differ in the weights or buffers of the model, `seed`, the number of threads." in text


def _held_out(num: int) -> tuple[int, float]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(num, 2).double(), torch.arange(num) % 3)
    la = LinearisedLaplace(nn.Linear(2, 3).double(), "classification", num_samples=4, process_group=dist.group.WORLD)
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
    la.fit_hyperparameters(loader, loader, progress=False)
    return la._fitted.tangent.data.num_data, float(la.prior_precision_)  # pyright: ignore


def test_held_out_data_may_have_a_distributed_sampler() -> None:
    (first, alpha), (second, other) = run_on_ranks(_held_out, 2, 13)
    assert (first, alpha) == (second, other)
    assert first == 13


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = numbered(23).tensors
        yield from zip(x, y, strict=True)


def _of_stream(loader_only: bool) -> Tensor:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    where = {} if loader_only else {"process_group": dist.group.WORLD}
    la = LinearisedLaplace(model, "classification", method="kfac", num_samples=4, **where)
    return la.fit(DataLoader(Stream(), 5), data=Data(num_data=23), progress=False).samples_


def test_streams_are_shared_out() -> None:
    alone = _of_stream(True)
    for samples in run_on_ranks(_of_stream, 2, False):
        assert_close(samples, alone, rtol=1e-10, atol=1e-12)


class Forked(IterableDataset):
    """Begins with the same batch in each process, and goes on with another one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = numbered(23).tensors
        order = list(range(5)) + list(range(5, 23))[:: 1 - 2 * dist.get_rank()]
        yield from ((x[i], y[i]) for i in order)


def _forked() -> str:
    with pytest.raises(ValueError, match="streams") as caught:
        TrainingData(DataLoader(Forked(), 5), num_data=23, processes=together())
    return str(caught.value)


def test_streams_that_differ_behind_the_first_batch_are_refused() -> None:
    assert all("streams" in text for text in run_on_ranks(_forked, 2))


def _of_dtype(dtype: torch.dtype) -> Tensor:
    y = torch.arange(7).to(dtype)[:, None].expand(7, 2)
    return TrainingData(DataLoader(TensorDataset(torch.ones(7, 1), y), 2), processes=together()).targets


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.bfloat16, torch.float64, torch.int64])
def test_targets_of_any_kind_are_put_together(dtype: torch.dtype) -> None:
    y = torch.arange(7).to(dtype)[:, None].expand(7, 2)
    for targets in run_on_ranks(_of_dtype, 3, dtype):
        assert torch.equal(targets, y)


class Ragged(Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(1 + index, dtype=torch.float64) * index, index % 2


def _padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([x for x, _ in items], True), torch.tensor([y for _, y in items])


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sum(1, keepdim=True))


def _of_ragged(share: bool) -> Tensor:
    warnings.simplefilter("ignore")
    where = {"process_group": dist.group.WORLD} if share else {}
    la = LinearisedLaplace(Pooled(), "classification", method="exact", num_samples=4, **where)
    return la.fit(DataLoader(Ragged(), 2, collate_fn=_padded), progress=False).samples_


def test_padded_data_are_shared_out() -> None:
    alone = _of_ragged(False)
    for samples in run_on_ranks(_of_ragged, 3, True):
        assert_close(samples, alone, rtol=1e-10, atol=1e-12)


def _no_group(**arguments: Any) -> None:
    LinearisedLaplace(nn.Linear(1, 1), "regression", **arguments)


def _wrong_groups() -> list[str]:
    alone = dist.new_group([0])
    cases: list[dict[str, Any]] = [
        {"process_group": "all"},
        *([{"process_group": alone}] if dist.get_rank() == 1 else []),
    ]
    found = []
    for case in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            _no_group(**case)
        found.append(str(caught.value))
    return found


def test_what_is_no_group_is_refused() -> None:
    _, found = run_on_ranks(_wrong_groups, 2)
    assert "process_group" in found[0]
    assert "group" in found[1]


class _Indices(Sampler):
    """All data, in an order of this process, with indices of another type."""

    def __init__(self, num: int, kind: str) -> None:
        self.num, self.kind = num, kind

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.num)
        yield from order.numpy() if self.kind == "numpy" else order

    def __len__(self) -> int:
        return self.num


def _by_indices(kind: str) -> tuple[int, Tensor]:
    torch.manual_seed(dist.get_rank())
    dataset = numbered(10)
    data = TrainingData(DataLoader(dataset, 4, sampler=_Indices(10, kind)), processes=together())
    return data.num_data, data.inputs(torch.arange(data.num_data))


@pytest.mark.parametrize("kind", ["tensors", "numpy"])
def test_indices_may_be_numbers_of_torch_or_numpy(kind: str) -> None:
    for num, inputs in run_on_ranks(_by_indices, 2, kind):
        assert num == 10
        assert torch.equal(inputs, numbered(10).tensors[0])


def _one_stops() -> tuple[int, bool]:
    torch.manual_seed(0)
    la = LinearisedLaplace(nn.Linear(2, 1).double(), "regression", method="krylov", process_group=dist.group.WORLD)
    x, _ = numbered(12).tensors
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())

    def stop(step: Any) -> None:
        raise StopFit

    la.fit_hyperparameters(DataLoader(data, 4), progress=False, callback=stop if dist.get_rank() else None)
    return len(la.history_), la._fitted is None


def test_all_stop_where_one_does() -> None:
    assert run_on_ranks(_one_stops, 2) == [(1, True), (1, True)]


def _other_calls() -> list[str]:
    warnings.simplefilter("ignore")
    rank, found = dist.get_rank(), []
    dataset = numbered(12)
    loader = DataLoader(dataset, 4)
    others: list[dict[str, Any]] = [
        {"criterion": Evidence(max_steps=3 + rank)},
        {"val_loader": DataLoader(TensorDataset(dataset.tensors[0] + rank, dataset.tensors[1]), 4)},
        {"data": Data(weights=torch.ones(12) + rank)},
    ]
    torch.manual_seed(0)
    la = LinearisedLaplace(nn.Linear(2, 3).double(), "classification", process_group=dist.group.WORLD)
    for other in others:
        with pytest.raises(ValueError, match="processes") as caught:
            la.fit_hyperparameters(loader, progress=False, **other)
        found.append(str(caught.value))
    prior = LinearisedLaplace(
        nn.Linear(2, 3).double(),
        "classification",
        prior=["isotropic", "layerwise"][rank],
        process_group=dist.group.WORLD,
    )
    prior.network.source.load_state_dict(la.network.source.state_dict())
    with pytest.raises(ValueError, match="`prior`"):
        prior.fit(loader, progress=False)
    return found


def test_other_arguments_in_each_process_are_refused() -> None:
    for steps, held_out, weights in run_on_ranks(_other_calls, 2):
        assert "`max_steps`" in steps
        assert "`val_loader`" in held_out
        assert "`weights`" in weights


def _timeouts() -> tuple[float, float]:
    group = dist.new_group(timeout=timedelta(seconds=7))
    own = Processes(group)._own
    return tuple(one._get_backend(torch.device("cpu")).options._timeout.total_seconds() for one in (group, own))  # pyright: ignore


def test_fits_have_the_timeout_of_the_group() -> None:
    assert run_on_ranks(_timeouts, 2) == [(7.0, 7.0), (7.0, 7.0)]


def _call_of_another(call: str) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dataset = numbered(12)
    la = LinearisedLaplace(
        nn.Linear(2, 3).double(), "classification", method="krylov", num_samples=4, process_group=dist.group.WORLD
    )
    la.fit(DataLoader(dataset, 4), progress=False)
    if dist.get_rank() == 1:
        # An error of this process within the call.
        Fit = type(la._fitted.fit)  # pyright: ignore
        Fit.draw = Fit.find_mode = _fails
    with pytest.raises((ProcessError, OSError)) as caught:
        la.mode_ if call == "mode_" else la.sample(3)
    return type(caught.value).__name__


def _fails(*_: Any) -> None:
    raise OSError("no such image")


@pytest.mark.parametrize("call", ["sample", "mode_"])
def test_errors_after_a_fit_are_told(call: str) -> None:
    assert run_on_ranks(_call_of_another, 2, call) == ["ProcessError", "OSError"]
