"""Data at a time under a memory budget and after running out of memory; half precision; TF32."""

import copy
import warnings

import pytest
import torch
from flat_settings import laplace_of
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, LinearisedLaplace
from laplace_sampling.linear_model.cost import rows_in_memory
from laplace_sampling.networks.batching import Batching
from laplace_sampling.networks.held_module import precisions, solving, users_precision
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.resources import TensorBytes
from laplace_sampling.solvers.krylov import Basis, BlockKrylov

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Hungry(nn.Sequential):
    """Runs out of memory above so many data."""

    most, error, largest = 8, torch.OutOfMemoryError("CUDA out of memory."), 0

    def forward(self, input: Tensor) -> Tensor:
        data = input
        while torch._C._functorch.is_functorch_wrapped_tensor(data):  # one by one under `vmap`
            data = torch._C._functorch.get_unwrapped(data)
        if len(data) > self.most:
            raise self.error
        Hungry.largest = max(Hungry.largest, len(data))
        return super().forward(input)


def net(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2))


CPU_ERROR = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), CPU_ERROR])
def test_products_are_halved_where_memory_does_not_hold_the_batch(monkeypatch, error: Exception) -> None:
    monkeypatch.setattr(Hungry, "error", error)
    network, plain = Linearisation(net(Hungry)), Linearisation(net())
    v = torch.randn(3, plain.num_parameters, generator=torch.Generator().manual_seed(1))
    u = plain.jvp(X, v)
    with pytest.warns(UserWarning, match="does not hold 60 data in the network at once: 30 are taken from here on"):
        assert_close(network(X), plain(X))
    assert network.batching.max_rows == 7  # said once, and remembered
    assert_close(network.jvp(X, v), u)
    assert_close(network.vjp(X, u), plain.vjp(X, u))
    assert_close(network.ggn(X, v[:1], lambda u: 2 * u), plain.ggn(X, v[:1], lambda u: 2 * u))
    assert_close(network.vjp_each(X, u[0]), plain.vjp_each(X, u[0]))
    assert_close(network.jacobian(X), plain.jacobian(X))
    assert network.products == plain.products


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), CPU_ERROR])
def test_a_product_that_runs_out_first_is_halved_too(monkeypatch, num: int, error: Exception) -> None:
    monkeypatch.setattr(Hungry, "error", error)
    plain = Linearisation(net())
    v = torch.randn(num, plain.num_parameters, generator=torch.Generator().manual_seed(1))
    u = plain.jvp(X, v)
    for name, given in (("ggn", (v, lambda u: 2 * u)), ("jvp", (v,)), ("vjp", (u,)), ("jacobian", ())):
        network = Linearisation(net(Hungry))
        with pytest.warns(UserWarning, match="Memory does not hold"):
            found = getattr(network, name)(X, *given)
        assert_close(found, getattr(plain, name)(X, *given))


def test_what_does_not_hold_one_datum_is_an_error() -> None:
    with pytest.warns(UserWarning, match="Memory"), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        Batching().in_parts(5, lambda rows: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(RuntimeError, match="shape"):
        Batching().in_parts(5, lambda rows: torch.zeros(2).reshape(7))  # no other error is


@pytest.mark.parametrize("method", ["krylov", "exact"])
def test_a_fit_that_runs_out_of_memory_is_that_of_smaller_batches(method: str) -> None:
    expected = laplace_of(net(), "classification", method=method, num_samples=8).fit([(X, Y)], progress=False)
    la = laplace_of(net(Hungry), "classification", method=method, num_samples=8)
    with pytest.warns(UserWarning, match="Memory does not hold"):
        la.fit([(X, Y)], progress=False)
    assert_close(la.samples_, expected.samples_, rtol=2e-3, atol=2e-3)
    assert_close(la.predict(X).variance, expected.predict(X).variance, rtol=1e-2, atol=1e-4)


def test_batches_of_the_loader_go_in_pieces_that_the_budget_holds(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Hungry, "most", 60)
    # Not the last layer is random: its features would be kept, and the network not run.
    layers = Hungry(nn.Flatten(), nn.Linear(3, 200_000)), nn.ReLU(), nn.Linear(200_000, 2), nn.Linear(2, 2)
    wide = nn.Sequential(*layers)
    la = laplace_of(wide, "classification", parameters="2.bias", method="krylov", num_samples=8, max_memory=2**26)
    la.fit([(X, Y)], progress=False)
    assert la._fitted.tangent is not None
    rows = la._fitted.tangent.model.features.batch_size
    assert rows < 60
    assert la.network.batching.max_rows == rows
    monkeypatch.setattr(Hungry, "largest", 0)
    la.predict(X)
    assert 0 < Hungry.largest <= rows
    again = laplace_of(wide, "classification", parameters="2.bias", method="krylov", num_samples=8, max_memory=2**30)
    again.fit([(X, Y)], progress=False)
    assert again.network.batching.max_rows is None
    assert_close(la.predict(X).variance, again.predict(X).variance, rtol=1e-2, atol=1e-5)


def test_rows_are_foretold_from_what_is_made() -> None:
    la = LinearisedLaplace(net(), "classification", num_samples=4).fit([(X, Y)], progress=False)
    assert la._fitted.tangent is not None
    features = la._fitted.tangent.model.features
    few, many = (rows_in_memory(features, 2**22, vectors) for vectors in (1, 16))
    assert many < few
    assert abs(rows_in_memory(features, 2**23, 16) - 2 * many) <= 1
    assert rows_in_memory(features, 1, 16) == 1


def test_weights_are_no_activations() -> None:
    """A tangent of the matrix for 16 vectors, 10 MB, would leave room for one or two data of a few kilobytes each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 2))
    la = LinearisedLaplace(model, "classification", method="krylov", num_samples=2).fit([(X, Y)], progress=False)
    assert la._fitted.tangent is not None
    found = rows_in_memory(la._fitted.tangent.model.features, 2**24, 16)
    activations = 4 * 4 * 400  # bytes of two layers, before and after their nonlinearity
    assert 2**24 / (100 * activations) < found < 2**24 / activations


def test_views_are_no_new_tensors() -> None:
    x = torch.zeros(10, 10)
    with TensorBytes() as found:
        (x.T.reshape(100)[20:] + 1).sum()
    assert found.sizes == [400, 320, 4]  # `reshape` of a transpose copies


def test_autocast_products_are_float32_and_right_to_a_percent() -> None:
    network, lowered = Linearisation(net()), Linearisation(net(), autocast=torch.bfloat16)
    v = torch.randn(5, network.num_parameters, generator=torch.Generator().manual_seed(1))
    u = network.jvp(X, v)
    assert torch.equal(lowered(X), network(X))  # its own output is not lowered
    for name, given in (("jvp", v), ("vjp", u)):
        found, expected = getattr(lowered, name)(X, given), getattr(network, name)(X, given)
        assert found.dtype == torch.float32
        assert 0 < (found - expected).norm() < 1e-2 * expected.norm()
    with pytest.raises(ValueError, match=r"autocast=torch.float64` must be torch.bfloat16 or torch.float16"):
        Linearisation(net(), autocast=torch.float64)
    with pytest.raises(ValueError, match=r"the network is in torch.float64; leave it out, or call `model.float\(\)`"):
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


@pytest.mark.parametrize("hessian_at", ["mode", "network"])
def test_tf32_is_off_in_solvers_and_put_back(monkeypatch, lowered: tuple[str, ...], hessian_at: str) -> None:
    seen: dict[str, set] = {"solver": set(), "network": set()}
    extend, forward = Basis.extend, nn.Linear.forward
    monkeypatch.setattr(Basis, "extend", lambda *a: seen["solver"].add(settings()) or extend(*a))
    monkeypatch.setattr(nn.Linear, "forward", lambda *a: seen["network"].add(settings()) or forward(*a))
    la = LinearisedLaplace(net(), "classification", method="krylov", hessian_at=hessian_at, num_samples=4)
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
