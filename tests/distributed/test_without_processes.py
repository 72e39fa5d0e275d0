"""Errors of a single process that should share data with others."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_sampling import LinearisedLaplace
from laplace_sampling.data.processes import ALONE
from laplace_sampling.data.training_data import TrainingData


def test_a_share_of_the_data_is_refused_without_its_group() -> None:
    dataset = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3)
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="process_group"):
        TrainingData(loader, processes=ALONE)


def test_a_group_needs_processes() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed"):
        LinearisedLaplace(nn.Linear(1, 1), "regression", process_group="all")
