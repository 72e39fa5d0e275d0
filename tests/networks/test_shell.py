"""The module is not changed; half precision, autocast and TF32."""

import copy
import warnings
from typing import Any

import pytest
import torch
from cases import FEW_CASES, Case, make_case
from flat_settings import laplace_of
from torch import Tensor, nn

from laplace_sampling import ConvergenceWarning, LinearisedLaplace
from laplace_sampling.data.batches import read
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import precisions, solving, users_precision
from laplace_sampling.solvers.krylov import Basis, BlockKrylov

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    linear, second, third = nn.Linear(3, 10), nn.Linear(10, 10), nn.Linear(10, 2)
    return nn.Sequential(linear, nn.Tanh(), second, nn.Tanh(), third)


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_outputs_are_the_networks_own_bit_for_bit(case: Case) -> None:
    case.model.train()
    output = Linearisation(case.model)(case.x)
    with torch.no_grad():
        assert torch.equal(output, read(case.model.eval()(case.x), len(case.x))[0])


def test_dropout_in_training_mode_inside_a_frozen_submodule() -> None:
    body = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5)).requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(8, 2)).double()
    model.eval()
    body.train()
    network = Linearisation(model)
    x, v = random(4, 2), random(1, network.num_parameters)
    assert torch.equal(network(x), network(x))
    assert torch.equal(network.jvp(x, v), network.jvp(x, v))
    assert body[1].training
    assert not model.training


def test_layers_group_weights_by_their_module() -> None:
    names, groups = Linearisation(make_case("classification").model).layers()
    assert names == ["0", "2"]
    assert groups.bincount().tolist() == [24, 28]
    assert Linearisation(make_case("scalar_and_matrix").model).layers()[0] == ["(root)"]


def test_fingerprint_tells_networks_apart() -> None:
    model = make_case("conv_batch_norm").model
    first = Linearisation(model).fingerprint()
    assert torch.equal(first, Linearisation(copy.deepcopy(model)).fingerprint())
    model[1].running_mean += 1e-9
    assert not torch.equal(first, Linearisation(model).fingerprint())


def test_autocast_products_are_float32_and_right_to_a_percent() -> None:
    network, lowered = Linearisation(net()), Linearisation(net(), autocast=torch.bfloat16)
    v = torch.randn(5, network.num_parameters, generator=torch.Generator().manual_seed(1))
    u = network.jvp(X, v)
    assert torch.equal(lowered(X), network(X))  # its own output is not lowered
    for name, given in (("jvp", v), ("vjp", u)):
        found, expected = getattr(lowered, name)(X, given), getattr(network, name)(X, given)
        assert found.dtype == torch.float32
        assert 0 < (found - expected).norm() < 1e-2 * expected.norm()
    with pytest.raises(ValueError, match=r"autocast=torch\.float64"):
        Linearisation(net(), autocast=torch.float64)
    with pytest.raises(ValueError, match=r"autocast=torch\.bfloat16"):
        Linearisation(net().double(), autocast=torch.bfloat16)


def test_a_fit_under_autocast_converges_or_says_that_it_did_not(tmp_path) -> None:
    settings = {"method": "krylov", "num_samples": 8}
    expected = laplace_of(net(), "classification", **settings).fit([(X, Y)], progress=False).predict(X)
    model = net()
    la = laplace_of(model, "classification", **settings, autocast=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        pred = la.fit([(X, Y)], progress=False).predict(X)
    assert la.converged_ or any(issubclass(w.category, ConvergenceWarning) for w in caught)
    assert la.samples_.dtype == pred.stddev.dtype == torch.float32
    assert float((pred.stddev / expected.stddev - 1).abs().median()) < 0.02
    la.save(tmp_path / "la.pt")
    assert LinearisedLaplace.load(tmp_path / "la.pt", model).network.autocast == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["krylov", "exact"])
def test_models_in_half_precision_have_error_bars_in_float32(dtype: torch.dtype, method: str) -> None:
    model = net().to(dtype)
    before = copy.deepcopy(model.state_dict())
    la = laplace_of(model, "classification", method=method).fit([(X, Y)], progress=False)
    pred = la.predict(X)
    assert torch.equal(pred.outputs, model(X.to(dtype)).detach().float())
    assert pred.stddev.dtype == pred.log_prob(Y).dtype == torch.float32
    expected = laplace_of(net(), "classification", method=method).fit([(X, Y)], progress=False).predict(X)
    assert float((pred.stddev / expected.stddev - 1).abs().median()) < 0.03
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


def settings() -> tuple[str, ...]:
    return tuple(precisions())


@pytest.fixture
def lowered():
    """The user's setting of float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield settings()
    torch.set_float32_matmul_precision(before)


def test_tf32_is_off_in_solvers_and_put_back(monkeypatch, lowered: tuple[str, ...]) -> None:
    seen: dict[str, set] = {"solver": set(), "network": set()}
    extend, forward = Basis.extend, nn.Linear.forward
    monkeypatch.setattr(Basis, "extend", lambda *a: seen["solver"].add(settings()) or extend(*a))
    monkeypatch.setattr(nn.Linear, "forward", lambda *a: seen["network"].add(settings()) or forward(*a))
    la = LinearisedLaplace(net(), "classification", method="krylov", num_samples=4)
    la.fit_hyperparameters([(X, Y)], progress=False, tolerance=0.2)
    assert seen["solver"] == {("ieee", "ieee")}
    assert lowered in seen["network"]  # its outputs are as the user has them
    assert settings() == lowered
    la.predict(X)
    assert settings() == lowered


def test_tf32_is_put_back_after_an_error(monkeypatch, lowered: tuple[str, ...]) -> None:
    def fail(*_: object, **__: object) -> None:
        assert settings() == ("ieee", "ieee")
        raise ArithmeticError("in the solver")

    monkeypatch.setattr(BlockKrylov, "solve", fail)
    with pytest.raises(ArithmeticError, match="in the solver"):
        LinearisedLaplace(net(), "classification", method="krylov").fit([(X, Y)], progress=False)
    assert settings() == lowered
    assert torch.get_float32_matmul_precision() == "medium"


def test_contexts_of_precision_nest(lowered: tuple[str, ...]) -> None:
    with solving(), solving():
        assert settings() == ("ieee", "ieee")
        with users_precision():
            assert settings() == lowered
        assert settings() == ("ieee", "ieee")
    with users_precision():
        assert settings() == lowered


@pytest.mark.parametrize(
    ("model", "x", "said"),
    [
        (nn.Linear(2, 3), torch.ones(4, 2).double(), r"(?s)\[4, 2\] in torch\.float64.*x\.to"),
        (nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), torch.ones(4, 3).double(), r"\[4, 3\] in torch\.float64"),
        (nn.Linear(2, 3), torch.zeros(4, 5), r"\[4, 5\]"),
        (nn.Linear(2, 3), (torch.zeros(4, 2), torch.zeros(4, 2)), r"\[4, 2\].*\[4, 2\]"),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double()), torch.zeros(4, 2), r"torch\.float64"),
        (nn.Embedding(3, 2), torch.tensor([3]), "Embedding"),
    ],
)
def test_errors_of_torch_in_a_network_say_of_what_they_are(model: nn.Module, x: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Linearisation(model)(x)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_that_is_gone_is_named(name: str) -> None:
    model = nn.Linear(2, 3)
    network = Linearisation(model)
    delattr(model, name)
    assert network(torch.zeros(4, 2)).shape == (4, 3)
    with pytest.raises(ValueError, match=f"'{name}'"):
        network.renewed()
