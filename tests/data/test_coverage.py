"""Loaders that give a part of their data."""

import warnings

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from laplace_sampling.data.training_data import TrainingData

DATASET = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))


def loader_of(sampler, **settings) -> DataLoader:
    return DataLoader(DATASET, batch_size=4, sampler=sampler, **settings)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_share_of_one_process_is_refused(drop_last: bool) -> None:
    share = DistributedSampler(DATASET, num_replicas=2, rank=0)
    inside = torch.utils.data.BatchSampler(share, 2, drop_last)
    for loader in (loader_of(share), DataLoader(DATASET, batch_sampler=inside)):
        with pytest.raises(ValueError, match="DistributedSampler"):
            TrainingData(loader)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (SubsetRandomSampler([5, 2, 9]), r"\b3\b"),
        (RandomSampler(DATASET, num_samples=4), r"\b4\b"),
        (WeightedRandomSampler([1.0] * 2 + [0.0] * 8, 10), r"\b8\b"),
        ([0, 1, 1], r"\b1\b"),
    ],
    ids=["subset", "some", "weighted", "repeated"],
)
def test_a_part_of_the_data_is_counted(sampler, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        TrainingData(loader_of(sampler))


def test_a_subset_of_the_dataset_and_a_dropped_batch_need_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TrainingData(DataLoader(Subset(DATASET, [5, 2, 9]), batch_size=2)).num_data == 3
        # All data are read, also those of the last batch.
        assert TrainingData(DataLoader(DATASET, batch_size=4, shuffle=True, drop_last=True)).num_data == 10


def test_a_dataset_of_ready_made_batches_counts_its_batches() -> None:
    with pytest.warns(UserWarning, match=r"\b2\b"):
        TrainingData(DataLoader([DATASET[:4], DATASET[4:8], DATASET[8:]], batch_size=None, sampler=[0, 2]))
