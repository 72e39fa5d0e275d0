"""What of a module, and of random generators, a user would notice if it changed."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["changes", "state_of"]


def state_of(module: nn.Module) -> dict[str, Any]:
    return {
        "identity of parameters": [(n, id(p), type(p), p.requires_grad) for n, p in module.named_parameters()],
        "gradients": [p.grad is None for p in module.parameters()],
        "weights or buffers": [t.detach().clone() for t in (*module.parameters(), *module.buffers())],
        "attributes": [
            {name: id(value) for name, value in m.__dict__.items() if name != "training"} for m in module.modules()
        ],
        "training flags": [m.training for m in module.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in module.modules()],
        "random generator of torch": [torch.get_rng_state()],
        "random generator of numpy": [str(np.random.get_state())],  # noqa: NPY002
        "random generator of python": list(random.getstate()[1]),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the same."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return torch.equal(a, b)
        return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b

    return [name for name in before if not same(before[name], after[name])]
