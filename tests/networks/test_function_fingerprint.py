"""Networks with the same weights and another function are told apart; rounding is not."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_sampling.data.batches import batched, num_rows
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.networks.consistency import FunctionFingerprint
from laplace_sampling.networks.linearisation import Linearisation


class Net(nn.Module):
    """An activation that shows in no attribute of a module: it may be a function, and forward the code of a class."""

    def __init__(self, activation: Callable = torch.tanh) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(3, 8), nn.Linear(8, 2), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x)))


def make(seed: int = 0) -> tuple[Net, TrainingData]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(), TrainingData([(torch.randn(9, 3), torch.zeros(9, 2)) for _ in range(3)])


@pytest.mark.parametrize("activation", [F.relu, F.gelu, F.silu, F.elu, F.softplus, F.hardtanh, lambda h: h])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_other_activations_differ(activation: Callable, offset: float) -> None:
    """Also where the outputs are large numbers that hardly depend on the inputs."""
    model, data = make()
    with torch.no_grad():
        model.last.bias += offset
    fingerprint = FunctionFingerprint.of(Linearisation(model), data)
    assert fingerprint is not None
    assert fingerprint.difference(Linearisation(copy.deepcopy(model))) is None
    model.activation = activation
    assert "outputs" in (fingerprint.difference(Linearisation(model)) or "")


def test_rounding_does_not_differ() -> None:
    model, data = make()
    fingerprint = FunctionFingerprint.of(Linearisation(model), data)
    assert fingerprint is not None
    assert fingerprint.difference(Linearisation(copy.deepcopy(model).double())) is None
    with torch.autocast("cpu", torch.bfloat16):  # the user's own around the call
        assert fingerprint.difference(Linearisation(model)) is None
    assert fingerprint.difference(Linearisation(model, autocast=torch.bfloat16)) is None
    half, _ = make()
    fingerprint = FunctionFingerprint.of(Linearisation(half.bfloat16()), data)
    assert fingerprint is not None
    with torch.no_grad():
        for p in half.parameters():
            p *= 1 + 2**-8 * torch.randn(p.shape)
    assert fingerprint.difference(Linearisation(half)) is None


def test_some_weights_and_zero_outputs() -> None:
    model, data = make()
    with torch.no_grad():
        model.last.weight.zero_()
        model.last.bias.zero_()
    for parameters in (None, "last.*", ["first.bias"]):
        fingerprint = FunctionFingerprint.of(Linearisation(model, parameters), data)
        assert fingerprint is not None
        assert fingerprint.difference(Linearisation(model, parameters)) is None
    other = copy.deepcopy(model)
    other.activation = F.relu
    fingerprint = FunctionFingerprint.of(Linearisation(model), data)
    assert fingerprint is not None
    assert fingerprint.difference(Linearisation(other)) is not None  # by its derivatives


def test_random_networks_and_what_a_file_cannot_hold_have_none() -> None:
    model, data = make()
    model.activation = lambda h: F.dropout(h, 0.5, training=True)
    assert FunctionFingerprint.of(Linearisation(model), data) is None

    class WithObject(Net):
        def forward(self, x: Tensor, what: object) -> Tensor:
            return super().forward(x)

    x = (torch.randn(4, 3), object())
    data = TrainingData([(x, torch.zeros(4))], unpack=lambda batch: (x, torch.zeros(4)))
    assert FunctionFingerprint.of(Linearisation(WithObject()), data) is None


@pytest.mark.parametrize(
    ("num", "size", "kept"), [(1, 3, 1), (3, 3, 3), (50, 3, 4), (6, 2**19, 2), (2, 2**21, 1)]
)  # float32
def test_few_data_are_kept_and_fewer_large_ones(num: int, size: int, kept: int) -> None:
    model = nn.Linear(1, 1)
    model.forward = lambda x: F.linear(x.mean(1, keepdim=True), model.weight, model.bias)
    x = torch.arange(float(num))[:, None].expand(num, size)
    fingerprint = FunctionFingerprint.of(Linearisation(model), TrainingData([(x, torch.zeros(num))]))
    assert fingerprint is not None
    assert num_rows(fingerprint.inputs) == kept
    assert all(t.untyped_storage().nbytes() == t.numel() * 4 for t in batched(fingerprint.inputs)[0])


def test_many_outputs_are_thinned_and_files_hold_any_structure() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 5000)

        def forward(self, tokens: Tensor, mask: Tensor, scale: float, temperature: Tensor) -> dict[str, Tensor]:
            h = (self.embedding(tokens) * mask[..., None]).sum(1) * scale / temperature
            return {"words": self.head(h), "length": mask.sum(1, keepdim=True)}

    model, tokens = Tokens(), torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(0))
    x = {"tokens": tokens, "mask": (tokens > 0).float(), "scale": 0.5, "temperature": torch.tensor(2.0)}
    network = Linearisation(model)
    fingerprint = FunctionFingerprint.of(network, TrainingData([(x, torch.zeros(6))]))
    assert fingerprint is not None
    assert fingerprint.outputs.shape == fingerprint.product.shape == (4, 2501)
    again = FunctionFingerprint(**vars(fingerprint))
    assert again.difference(network) is None
    assert network.products == {"jvp": 0, "vjp": 0}
