"""A seal holds until a weight or a buffer changes, also by `p.data`; what it does not know SHA-256 decides."""

import copy
from collections.abc import Callable

import pytest
import torch
from grids import covering
from torch import Tensor, nn

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.weights_seal import WeightsSeal


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 200), nn.Linear(200, 2))


def swap(weight: Tensor) -> None:
    flat = weight.data.view(-1)
    flat[[0, 1]] = flat[[1, 0]]


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[0] *= 1.01


UNCOUNTED: dict[str, Callable[[Tensor], object]] = {
    "sign": lambda w: w.data.neg_(),
    "rows in another order": lambda w: w.data.copy_(w.data.flip(0)),
    "two numbers swapped": swap,
    "one number": lambda w: w.data.view(-1)[7:8].add_(1e-3),
    "scaled by little": lambda w: w.data.mul_(1 + 1e-5),
    "numpy": by_numpy,
    "other memory": lambda w: setattr(w, "data", w.data.clone()),
}


@covering(change=UNCOUNTED, layer=[0, 3, 4])
def test_changes_that_raise_no_counter_are_seen(change: str, layer: int) -> None:
    module = network()
    seal = WeightsSeal.of(module)
    assert seal is not None
    assert seal.holds(module)
    UNCOUNTED[change](module[layer].weight)
    assert not seal.holds(module)


def test_the_last_bit_of_a_weight_and_of_a_buffer() -> None:
    for name in ("3.weight", "1.running_var", "1.num_batches_tracked"):
        module = network()
        tensor, seal = module.state_dict()[name], WeightsSeal.of(module)
        with torch.no_grad():
            tensor.view(-1)[0:1].view(torch.uint8)[0] ^= 1
        assert seal is not None
        assert not seal.holds(module)


def test_other_objects_names_and_precisions() -> None:
    module = network()
    seal = WeightsSeal.of(module)
    assert seal is not None
    assert not seal.holds(copy.deepcopy(module))
    module[3].weight, module[3].bias = module[3].weight, module[3].bias  # the same objects at the same places
    assert seal.holds(module)
    module[3].register_buffer("more", torch.zeros(1))
    assert not seal.holds(module)
    del module[3].more
    assert seal.holds(module)
    assert not seal.holds(module.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_weights_of_other_precisions(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype))
    module.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    seal = WeightsSeal.of(module)
    assert seal is not None
    assert seal.holds(module)
    with torch.autocast("cpu"):
        assert seal.holds(module)
        module.w.data[1, 4500] *= 1.01
        assert not seal.holds(module)


def test_tensors_that_are_no_block_of_memory_have_no_seal() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(4, 4)[:, :2]):
        module = nn.Linear(2, 2)
        module.register_buffer("other", tensor)
        assert WeightsSeal.of(module) is None
    assert WeightsSeal.of(network().to(memory_format=torch.channels_last)) is not None  # pyright: ignore


def test_predictions_take_a_hash_only_after_a_sign(monkeypatch) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(8, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    la = LinearisedLaplace(model, "regression", num_samples=4).fit([(x, torch.randn(8, 1))], progress=False)
    hashes, held = [], type(la.network.held)
    fingerprint = held.fingerprint
    monkeypatch.setattr(held, "fingerprint", lambda self: hashes.append(1) or fingerprint(self))
    for _ in range(3):
        la.predict(x)
    assert len(hashes) == 1
    weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)  # raises the counters, and changes nothing
    la.predict(x)
    assert len(hashes) == 2
    model[0].weight.data.add_(0.1)
    with pytest.raises(ValueError, match="buffers"):
        la.predict(x)
    model.load_state_dict(weights)
    la.predict(x)
    assert len(hashes) == 4
    assert copy.deepcopy(la).predict(x).stddev.equal(la.predict(x).stddev)
