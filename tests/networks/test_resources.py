"""Counted tensors."""

import torch

from laplace_sampling.networks.resources import TensorBytes


def test_views_are_no_new_tensors() -> None:
    x = torch.zeros(10, 10)
    with TensorBytes() as found:
        (x.T.reshape(100)[20:] + 1).sum()
    assert found.sizes == [400, 320, 4]  # `reshape` of a transpose copies
