"""Data at a time under a memory budget and after running out of memory; vectors in caches."""

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.linear_model.cost import rows_in_memory
from laplace_sampling.networks import memory as batching
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.memory import Batching


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


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
    with pytest.warns(UserWarning, match=r"\b30\b"):
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
        with pytest.warns(UserWarning, match="Memory"):
            found = getattr(network, name)(X, *given)
        assert_close(found, getattr(plain, name)(X, *given))


def test_what_does_not_hold_one_datum_is_an_error() -> None:
    with pytest.warns(UserWarning, match="Memory"), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        Batching().in_parts(5, lambda rows: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(RuntimeError, match="shape"):
        Batching().in_parts(5, lambda rows: torch.zeros(2).reshape(7))  # no other error is


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


def test_rows_are_predicted_from_the_tensors_that_are_made() -> None:
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


@pytest.mark.parametrize(("width", "chunk_size", "calls"), [(2, 16, 1), (2, 1, 2), (2**16, 16, 2), (2**17, 2, 3)])
def test_vectors_go_together_while_caches_hold_them(width: int, chunk_size: int, calls: int, monkeypatch) -> None:
    monkeypatch.setattr(Batching, "chunk_size", chunk_size)
    seen = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(3))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(1)
            return (x @ self.weight)[:, None].expand(-1, width).contiguous().mean(1)  # 4 MiB, or 8, if wide

    network, x, v = Linearisation(Counted()), random(8, 3), random(6, 3)
    assert_close(network.jvp(x, v), (v @ x.mT)[:, :, None])
    seen.clear()
    assert_close(network.jvp(x, v), (v @ x.mT)[:, :, None])
    assert len(seen) == calls


@pytest.mark.parametrize(("most", "batched"), [(0, False), (10**9, True)])
def test_pullbacks_of_large_tensors_go_one_by_one(
    most: int, batched: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls, grad = make_case("conv_batch_norm"), [], torch.autograd.grad
    network = Linearisation(case.model)
    u = torch.randn(5, len(case.x), 4, generator=generator, dtype=torch.float64)
    known = network.vjp(case.x, u)

    def spy(*args, **kwargs):
        calls.append(kwargs.get("is_grads_batched", False))
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    monkeypatch.setattr(batching, "_PULLED_TOGETHER_BYTES", most)
    assert_close(network.vjp(case.x, u), known)
    assert set(calls) == {batched}


class Forces(nn.Module):
    """The gradient of an energy, which some random weights are only part of where a datum asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.a(x).tanh().sum()
            if (x[:, 0] > 0).any():
                energy = energy + (self.b(x).sin().sum(1) * (x[:, 0] > 0)).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_cotangents_without_gradients_give_zeros() -> None:
    """Of which torch gives none, so that nothing says how many there were."""
    network = Linearisation(Forces().double(), ["b.*"])
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    try:
        found = network.vjp(-random(10, 3).abs(), random(3, 10, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(found, torch.zeros_like(found))
