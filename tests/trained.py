"""What two trainings have to have in common to be the same."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def bits_of_training(*parts: Any) -> list[Any]:
    """The leaves of states (modules, optimisers, schedulers, dictionaries), and the global random states."""
    states = [part.state_dict() if hasattr(part, "state_dict") else part for part in parts]
    modes = [m.training for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    grads = [p.grad for part in parts if isinstance(part, nn.Module) for p in part.parameters()]
    randomness = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 the global one
    return [leaf for item in (states, modes, grads, randomness) for leaf in tree_leaves(item)]


def assert_same_bits(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
        elif isinstance(a, np.ndarray):
            assert np.array_equal(a, b)
        else:
            assert a == b
