"""A state holds until an attribute, a weight, a buffer or a part is another one, and puts back what was changed."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks import held_module
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.module_state import ModuleState


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
        self.calls, self.cache, self.seen, self.mask = [1], {"a": 2}, {3}, torch.ones(1)
        self.table, self.scale = np.ones(3), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m.body[2], "other", 1),
    "attribute deleted": lambda m: delattr(m, "mask"),
    "array": lambda m: setattr(m, "table", np.ones(3)),
    "list": lambda m: m.calls.append(2),
    "dictionary": lambda m: m.cache.update(b=1),
    "set": lambda m: m.seen.add(4),
    "equal tensor of one number": lambda m: setattr(m, "mask", torch.ones(1)),
    "equal weight of one number": lambda m: m._parameters.update(scale=nn.Parameter(torch.ones(1))),
    "weight": lambda m: m.body[0]._parameters.update(weight=torch.zeros(3, 2)),
    "buffer": lambda m: m.body[1]._buffers.update(running_mean=torch.zeros(3)),
    "mode": lambda m: m.body[1].train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen_and_put_back(change: str) -> None:
    module = Kept().eval()
    state = ModuleState(module)
    assert state.holds()
    CHANGES[change](module)
    assert not state.holds()
    assert not state.is_restored()
    state.restore()
    assert state.holds()


def test_what_is_seen_but_is_the_users() -> None:
    changes: list[Callable[[Any], object]] = [
        lambda m: m.body.__setitem__(2, nn.ReLU()),
        lambda m: m.body._modules.update({"2": m.body._modules.pop("2")}),
        lambda m: m.mask.mul_(2),
        lambda m: setattr(m.body[2], "__class__", nn.ReLU),
    ]
    for change in changes:
        module = Kept().eval()
        state = ModuleState(module)
        change(module)
        assert not state.holds()
    module = Kept()
    state = ModuleState(module)
    hooks = state.hooks()
    handle = module.body[0].register_forward_hook(lambda *_: None)
    assert state.holds()
    assert state.hooks() != hooks
    handle.remove()
    module.body[2].register_forward_hook(handle_of := lambda *_: None)
    first = state.hooks()
    module.body[2]._forward_hooks.clear()
    module.body[3].register_forward_hook(handle_of)
    assert state.hooks() != first


def test_a_second_prediction_looks_at_no_attribute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(ModuleState):
        def __init__(self, module: nn.Module) -> None:
            made.append(module)
            super().__init__(module)

    monkeypatch.setattr(held_module, "ModuleState", Counted)
    torch.manual_seed(0)
    x, module = torch.randn(8, 2), Kept().eval()
    for parameters in (None, ["body.3.*"]):
        la = LinearisedLaplace(module, "regression", parameters=parameters, num_samples=4)
        la.fit([(x, torch.randn(8, 1))], progress=False).predict(x)
        made.clear()
        before = la.predict(x)
        assert not made
        module.calls.append(2)
        la.predict(x)
        assert made
        made.clear()
        assert torch.equal(la.predict(x).samples, before.samples)
        assert not made


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_of_one_number_that_a_hook_computes_is_put_back() -> None:
    module = nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.utils.weight_norm(nn.Linear(1, 1))).double()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        module(x)
    before, network = module[2].__dict__["weight"], Linearisation(module)
    network.vjp(x, torch.ones(1, 3, 1, dtype=torch.float64))
    assert module[2].__dict__["weight"] is before
    copy.deepcopy(module)  # which raises for a tensor with a graph


def test_weights_that_are_tied_later() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    network, x, v = Linearisation(module, ["0.*"]), torch.randn(4, 3).double(), torch.randn(1, 12).double()
    network.jvp(x, v)
    module[2].weight = module[0].weight

    def outputs(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional_call(module, {"0.weight": weight, "0.bias": bias, "2.bias": module[2].bias.detach()}, (x,))

    weights = module[0].weight.detach(), module[0].bias.detach()
    expected = torch.func.jvp(outputs, weights, (v[0, :9].view(3, 3), v[0, 9:]))[1]
    assert_close(network.jvp(x, v)[0], expected)
