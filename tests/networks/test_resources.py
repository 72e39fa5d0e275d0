"""Counted tensors and operations."""

import pytest
import torch
from torch import nn

from laplace_sampling.networks.memory import Operations, TensorBytes


def test_views_are_no_new_tensors() -> None:
    x = torch.zeros(10, 10)
    with TensorBytes() as found:
        (x.T.reshape(100)[20:] + 1).sum()
    assert found.sizes == [400, 320, 4]  # `reshape` of a transpose copies


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_gradients_of_a_convolution_take_twice_its_operations_whatever_its_groups(
    groups: int, transposed: bool
) -> None:
    x = torch.randn(8, 12, 10, 10, requires_grad=True)
    shape = (12, 16 // groups) if transposed else (16, 12 // groups)
    weight = torch.randn(*shape, 3, 3, requires_grad=True)
    convolution = nn.functional.conv_transpose2d if transposed else nn.functional.conv2d
    with Operations() as forward:
        out = convolution(x, weight, groups=groups)
    with Operations() as backward:
        out.sum().backward()
    assert backward.count == 2 * forward.count
