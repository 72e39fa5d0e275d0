"""Data at a time under a memory budget and after running out of memory; vectors in caches; pieces of large batches."""

import pytest
import torch
from cases import CASES, Case, make_case
from flat_settings import laplace_of
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.linear_model.cost import rows_in_memory
from laplace_sampling.networks import batching
from laplace_sampling.networks.batching import Batching
from laplace_sampling.networks.linearisation import Linearisation


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


@pytest.mark.parametrize("method", ["krylov", "exact"])
def test_a_fit_that_runs_out_of_memory_is_that_of_smaller_batches(method: str) -> None:
    expected = laplace_of(net(), "classification", method=method, num_samples=8).fit([(X, Y)], progress=False)
    la = laplace_of(net(Hungry), "classification", method=method, num_samples=8)
    with pytest.warns(UserWarning, match="Memory"):
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
def test_vectors_go_together_while_caches_hold_them(width: int, chunk_size: int, calls: int) -> None:
    seen = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(3))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(1)
            return (x @ self.weight)[:, None].expand(-1, width).contiguous().mean(1)  # 4 MiB, or 8, if wide

    network, x, v = Linearisation(Counted(), chunk_size=chunk_size), random(8, 3), random(6, 3)
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


def passes(model: nn.Module) -> list[int]:
    """How many data each forward pass has from here on."""
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    return seen


class FixedPieces(Batching):
    """Splits each batch into pieces of so many data."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def pieces(self, forward, x, num_vectors, weight_bytes, device) -> list[Tensor]:
        return list(x.split(self.size))


@covering(indirect=["case"], case=CASES, pieces=[2, 3], num=[1, 5])
def test_products_of_pieces_are_those_of_the_whole(case: Case, pieces: int, num: int) -> None:
    whole = Linearisation(case.model)
    split = Linearisation(case.model, batching=FixedPieces(-(-len(case.x) // pieces)))
    f = whole(case.x).reshape(len(case.x), -1)
    v, u = random(num, whole.num_parameters), random(num, *f.shape)
    expected = [whole.jvp(case.x, v), whole.vjp(case.x, u), whole.ggn(case.x, v, lambda g: g * u)]
    split.jvp(case.x, v)  # the first product counts what a forward pass of all data makes
    seen = passes(case.model)
    found = [split.jvp(case.x, v), split.vjp(case.x, u), split.ggn(case.x, v, lambda g: g * u)]
    for product, right in zip(found, expected, strict=True):
        assert_close(product, right, rtol=1e-9, atol=1e-10)
        assert not product.requires_grad
    assert max(seen) == -(-len(f) // pieces)
    assert split.products == {"jvp": 3 * num * len(f), "vjp": 2 * num * len(f)}


@pytest.mark.parametrize(
    ("kept", "call", "num", "K", "seen"),
    [
        (2**25, "jvp", 100, 4, [100]),
        (200 * 1280, "jvp", 50, 4, [50]),
        (200 * 1280, "jvp", 100, 4, [50, 50]),
        (200 * 1280, "jvp", 101, 4, [34, 34, 33]),
        (200 * 1280, "jvp", 104, 4, [26] * 4),  # of one size
        (200 * 1280, "vjp", 200, 4, [200]),  # vector by vector
        (200 * 1280, "vjp", 300, 4, [150, 150]),
        (200 * 1280, "ggn", 200, 1, [200]),  # one forward pass for both
        (200 * 1280, "ggn", 300, 1, [150, 150]),
        (1000, "jvp", 2, 1, [2]),  # one image is too large
        (1280, "jvp", 2, 1, [1, 1]),
        (1280, "jvp", 40, 1, [40]),  # weights 39 times more would be more than what is made
    ],
)
def test_data_go_in_pieces_whose_tensors_the_c_library_keeps(
    kept: int, call: str, num: int, K: int, seen: list[int]
) -> None:
    """Images of 256 bytes, with 1,280 in each of two more tensors, and 4,052 of weights."""
    model = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(320, 3))
    network, x = Linearisation(model, batching=Batching(kept_bytes=kept)), torch.randn(num, 1, 8, 8)
    vectors = torch.randn(K, num, 3) if call == "vjp" else torch.randn(K, 1013)

    def product() -> None:
        getattr(network, call)(x, vectors, *([torch.tanh] if call == "ggn" else []))

    product()  # counts what is made
    found = passes(model)
    product()
    assert found == seen


def test_data_on_a_gpu_go_together() -> None:
    batching, x = Batching(), torch.ones(1000, 1)

    def forward(x: Tensor) -> Tensor:
        return torch.ones(len(x), 2**20)

    batching.largest_tensor(forward, x[:10])
    assert len(batching.pieces(forward, x, 4, 8, torch.device("cpu"))) > 100
    assert len(batching.pieces(forward, x, 4, 8, torch.device("cuda"))) == 1


class Graph(nn.Module):
    """600 nodes, all of which go through the network whichever are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 20), nn.Linear(20, 2)
        self.register_buffer("nodes", torch.randn(600, 3))

    def forward(self, index: Tensor) -> Tensor:
        return self.outer(self.inner(self.nodes).relu())[index]


@pytest.mark.parametrize("first", [2, 100])
def test_tensors_that_fewer_data_do_not_make_smaller_are_not_split(first: int) -> None:
    model, index = Graph(), torch.arange(100)
    network = Linearisation(model, batching=Batching(kept_bytes=24_000))  # of 48,000 bytes
    v = torch.randn(1, network.num_parameters)
    network.jvp(index[:first], v)
    network.jvp(index, v)
    seen = passes(model)
    for product in (
        network.jvp(index, v),
        network.vjp(index, torch.randn(1, 100, 2)),
        network.ggn(index, v, torch.tanh),
    ):
        assert product.isfinite().all()
    assert seen == [100] * 3


class Together(nn.Module):
    """Does not do with fewer data than all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.points = nn.Linear(3, 20), nn.Buffer(torch.randn(100, 20))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.points).tanh()


def test_networks_that_fail_for_fewer_data_are_not_split() -> None:
    network = Linearisation(Together(), batching=Batching(kept_bytes=4_000))  # of 8,000 bytes
    assert network.vjp(torch.randn(100, 3), torch.randn(1, 100, 20)).isfinite().all()


class Routed(nn.Module):
    """Data of positive `x_0` go through `a`, others through `b`, which nothing is sent to if there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 20), nn.Linear(3, 20)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 20, dtype=x.dtype)
        for expert, here in ((self.a, x[:, 0] > 0), (self.b, x[:, 0] <= 0)):
            if here.any():
                out = out.index_add(0, here.nonzero()[:, 0], expert(x[here]).tanh())
        return out


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("parameters", [["a.*"], ["b.*"], None])
def test_pieces_that_do_not_depend_on_the_weights(parameters: list[str] | None, num: int) -> None:
    x = random(40, 3)
    x, model = x[x[:, 0].argsort()], Routed().double()
    whole, split = Linearisation(model, parameters), Linearisation(model, parameters, batching=FixedPieces(10))
    v, u = random(num, whole.num_parameters), random(num, 40, 20)
    assert_close(split.jvp(x, v), whole.jvp(x, v))
    assert_close(split.vjp(x, u), whole.vjp(x, u))
    assert_close(split.ggn(x, v, torch.tanh), whole.ggn(x, v, torch.tanh))
    with pytest.raises(ValueError, match="parameters="):
        split.with_names(["a.bias"]).vjp(-x.abs(), u)


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


def test_cotangents_of_a_piece_without_gradients() -> None:
    x, u, model = random(40, 3), random(3, 40, 3), Forces().double()
    x = x[x[:, 0].argsort()]
    split = Linearisation(model, ["b.*"], batching=FixedPieces(10))
    assert_close(split.vjp(x, u), Linearisation(model, ["b.*"]).vjp(x, u))


def test_cotangents_without_gradients_give_zeros() -> None:
    """Of which torch gives none, so that nothing says how many there were."""
    network = Linearisation(Forces().double(), ["b.*"])
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    try:
        found = network.vjp(-random(10, 3).abs(), random(3, 10, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(found, torch.zeros_like(found))


def test_where_outputs_are_large_the_curvature_is_not_asked_for_each_piece() -> None:
    x, asked = torch.randn(100, 3), []
    network = Linearisation(nn.Sequential(nn.Linear(3, 60), nn.Tanh()), batching=Batching(kept_bytes=20_000))
    network.ggn(x, torch.randn(1, network.num_parameters), lambda u: asked.append(u.shape) or u)
    assert asked == [(1, 100, 60)]
