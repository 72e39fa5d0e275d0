"""Everything of a module that a user would notice if it changed."""

import torch
from torch import nn


def snapshot(module: nn.Module) -> dict:
    return {
        "weights": {n: p.detach().clone() for n, p in module.named_parameters()},
        "identity": {n: id(p) for n, p in module.named_parameters()},
        "requires_grad": {n: p.requires_grad for n, p in module.named_parameters()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()},
        "buffers": {n: b.clone() for n, b in module.named_buffers()},
        "modes": {n: m.training for n, m in module.named_modules()},
        "hooks": {n: (dict(m._forward_hooks), dict(m._backward_hooks)) for n, m in module.named_modules()},
    }


def assert_unchanged(module: nn.Module, before: dict) -> None:
    after = snapshot(module)
    for key in ("identity", "requires_grad", "modes", "hooks"):
        assert after[key] == before[key], key
    for key in ("weights", "buffers", "grads"):
        assert after[key].keys() == before[key].keys()
        for name, old in before[key].items():
            new = after[key][name]
            assert (new is None and old is None) or torch.equal(new, old), (key, name)
