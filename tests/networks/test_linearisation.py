import copy
import math
from collections.abc import Callable

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.data.batches import read
from laplace_sampling.likelihoods.likelihood import Gaussian
from laplace_sampling.networks import jacobian_products, linearisation
from laplace_sampling.networks.jacobian_products import JacobianProducts
from laplace_sampling.networks.linearisation import Linearisation


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", [1, 2, 16])
def test_products_equal_the_dense_jacobian(case: Case, chunk_size: int) -> None:
    network = Linearisation(case.model, chunk_size=chunk_size)
    J = reference.jacobian(case.model, case.x)
    N, C, P = J.shape
    v, u = random(5, P), random(5, N, C)
    assert network.num_parameters == P
    assert_close(network.jvp(case.x, v), torch.einsum("ncp,kp->knc", J, v), rtol=1e-6, atol=1e-9)
    assert_close(network.vjp(case.x, u), torch.einsum("ncp,knc->kp", J, u), rtol=1e-6, atol=1e-9)
    assert_close(network.jacobian(case.x), J, rtol=1e-6, atol=1e-9)


def test_jvp_and_vjp_are_adjoint(case: Case) -> None:
    network = Linearisation(case.model)
    f = network(case.x).reshape(len(case.x), -1)
    v, u = random(3, network.num_parameters), random(3, *f.shape)
    left = (network.jvp(case.x, v) * u).sum((1, 2))
    assert_close(left, (v * network.vjp(case.x, u)).sum(1), rtol=1e-8, atol=1e-9)


def test_outputs_are_the_networks_own_bit_for_bit(case: Case) -> None:
    case.model.train()
    output = Linearisation(case.model)(case.x)
    with torch.no_grad():
        assert torch.equal(output, read(case.model.eval()(case.x), len(case.x))[0])


def test_module_is_untouched(case: Case) -> None:
    case.model.train()
    case.model.get_submodule("").register_forward_hook(lambda module, args, output: None)
    next(iter(case.model.parameters())).grad = torch.ones_like(next(iter(case.model.parameters())))
    network = Linearisation(case.model)
    before = snapshot(case.model)
    f = network(case.x)
    network.jvp(case.x, random(2, network.num_parameters))
    network.vjp(case.x, random(2, len(case.x), f[0].numel()))
    network.jacobian(case.x)
    assert_unchanged(case.model, before)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.fail:
            raise RuntimeError("inside forward")
        return h


@pytest.mark.parametrize("call", ["__call__", "jvp", "vjp", "jacobian"])
def test_module_is_untouched_after_an_exception(call: str) -> None:
    model = Failing().double()
    model.body[2].eval()
    network = Linearisation(model)
    before = snapshot(model)
    args = {"jvp": [random(2, network.num_parameters)], "vjp": [random(2, 4, 3)]}.get(call, [])
    model.fail = True
    with pytest.raises(RuntimeError, match="inside forward"):
        getattr(network, call)(random(4, 2), *args)
    assert_unchanged(model, before)


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


def test_fused_attention_has_a_jvp_and_the_fast_path_is_put_back() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)).double().eval()
    network = Linearisation(model)
    x = random(3, 3, 4)
    v = random(2, network.num_parameters)
    expected = torch.einsum("ncp,kp->knc", reference.jacobian(model, x), v)
    assert_close(network.jvp(x, v), expected, rtol=1e-6, atol=1e-9)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_module_registered_twice() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 2)).double()
    network = Linearisation(model)
    before, x = snapshot(model), random(4, 3)
    v, u = random(2, network.num_parameters), random(2, 4, 2)
    J = reference.jacobian(model, x)
    assert_close(network.jvp(x, v), torch.einsum("ncp,kp->knc", J, v))
    assert_close(network.vjp(x, u), torch.einsum("ncp,knc->kp", J, u))
    assert_close(network.jacobian(x), J)
    assert_unchanged(model, before)


def test_works_under_no_grad() -> None:
    case = make_case("classification")
    network = Linearisation(case.model)
    u = random(2, 8, 4)
    with torch.no_grad():
        inside = network.vjp(case.x, u)
    assert_close(inside, network.vjp(case.x, u))


MATRICES = {
    "logdet": lambda A: torch.logdet(A)[:, None],
    "slogdet": lambda A: torch.linalg.slogdet(A)[1][:, None],
    "det": lambda A: torch.linalg.det(A)[:, None],
    "solve": lambda A: torch.linalg.solve(A, torch.ones(len(A), 3, 1).to(A))[..., 0],
    "cholesky": lambda A: torch.linalg.cholesky(A).flatten(1),
}


class OfMatrices(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 9), function

    def forward(self, x: Tensor) -> Tensor:
        A = self.linear(x).reshape(-1, 3, 3)
        return self.function(A @ A.mT + torch.eye(3).to(A))


@pytest.mark.parametrize("name", MATRICES)
def test_derivatives_of_linear_algebra(name: str) -> None:
    """Those of torch for solves and determinants are wrong under `vmap` and `no_grad`."""
    model = OfMatrices(MATRICES[name]).double()
    network, x = Linearisation(model), random(5, 4)
    J = reference.jacobian(model, x)
    u = random(*J.shape[:2])
    assert_close(network.jacobian(x), J)
    assert_close(network.vjp_each(x, u), torch.einsum("ncp,nc->np", J, u))
    assert not network.jacobian(x.requires_grad_()).requires_grad
    assert not network.vjp_each(x, u).requires_grad


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["2.bias", "0.weight"], ["0.weight", "2.bias"]),
        (lambda name, p: p.dim() == 2, ["0.weight", "2.weight"]),
    ],
)
def test_parameters_selects_by_name_glob_or_predicate(selection, expected) -> None:
    model = make_case("classification").model
    network = Linearisation(model, selection)
    assert network.names == expected
    chosen = copy.deepcopy(model)
    for name, p in chosen.named_parameters():
        p.requires_grad_(name in expected)
    x = random(3, 3)
    assert_close(network.jacobian(x), reference.jacobian(chosen, x))


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


def test_products_are_counted_in_data_times_vectors() -> None:
    case = make_case("classification")
    network = Linearisation(case.model)
    network.jvp(case.x, random(5, network.num_parameters))
    network.vjp(case.x, random(2, 8, 4))
    assert network.products == {"jvp": 40, "vjp": 16}


def test_errors_say_what_was_found_and_what_to_do() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, but got builtin_function"):
        Linearisation(torch.sin)  # pyright: ignore
    with pytest.raises(ValueError, match=r"`chunk_size` must be at least 1"):
        Linearisation(model, chunk_size=0)
    with pytest.raises(ValueError, match=r"match no parameter of the model; it has \['weight', 'bias'\]"):
        Linearisation(model, ["head.weight"])
    with pytest.raises(ValueError, match="selects nothing"):
        Linearisation(model, lambda name, p: False)
    with pytest.raises(ValueError, match=r"No parameter of the model requires a gradient.*requires_grad_\(True\)` on"):
        Linearisation(nn.Linear(2, 1).requires_grad_(False))
    quantised = nn.Linear(2, 1)
    quantised.table = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"\['table'\] are not floating point"):
        Linearisation(quantised, "table")
    for wrong, found in (
        (list(model.parameters()), "a list of Parameter"),
        (3, "a int"),
        (model.parameters(), "generator"),
    ):
        with pytest.raises(TypeError, match=rf"`parameters` takes names, globs, .* but got .*{found}; the names are"):
            Linearisation(model, wrong)  # pyright: ignore
    with pytest.raises(ValueError, match=r"needs `v` of shape \[K, P\] with P = 3, but got \[3, 2\]"):
        Linearisation(model).jvp(torch.zeros(1, 2), torch.zeros(3, 2))


def test_patterns_of_names_classes_and_exclusions() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)

    def names(selection) -> list[str]:
        return Linearisation(model, selection).names

    assert names("!*.bias") == ["1.weight", "2.weight"]  # of those that require a gradient
    assert names(["*", "!*.bias"]) == ["0.weight", "1.weight", "2.weight"]
    assert names("!*Norm*.*") == ["0.bias", "2.weight", "2.bias"]
    assert names(["Linear.*", "!2.*"]) == ["0.weight", "0.bias"]
    assert names(["!1.*", "!*.weight"]) == ["0.bias", "2.bias"]
    assert names(["LayerNorm.weight", "2.bias"]) == ["1.weight", "2.bias"]
    with pytest.raises(ValueError, match=r"`parameters=\['!BatchNorm2d.\*'\]` match no parameter"):
        names(["Linear.*", "!BatchNorm2d.*"])
    with pytest.raises(ValueError, match="`parameters` selects nothing"):
        names(["1.*", "!*"])
    with pytest.raises(ValueError, match="`parameters` selects nothing"):
        names([])


def test_complex_weights_are_left_out() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.ones(3, dtype=torch.complex128)), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))

    model, x = Spectral(), random(3, 4)
    with pytest.warns(UserWarning, match=r"Parameters \['filter'\] are not floating point: they are left out"):
        network = Linearisation(model)
    assert_close(network.jacobian(x), reference.jacobian(model.head, torch.fft.irfft(torch.fft.rfft(x), n=4)))


def test_a_name_is_no_pattern() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.Linear = nn.Linear(2, 3), nn.Linear(3, 1)
            self.table = nn.ParameterDict({"a[0]": nn.Parameter(torch.ones(2)), "a0": nn.Parameter(torch.ones(2))})

    def names(selection) -> list[str]:
        return Linearisation(Named(), selection).names

    assert names("Linear.weight") == ["Linear.weight"]
    assert names("table.a[0]") == ["table.a[0]"]
    assert names(["Linear.*", "!Linear.weight"]) == ["first.weight", "first.bias", "Linear.bias"]
    assert names(["table.*", "!table.a[0]"]) == ["table.a0"]
    assert names(names(None)) == names(None)


def test_tied_weights_have_the_names_of_all_their_modules() -> None:
    model = nn.Module()
    model.table, model.head = nn.Embedding(5, 3), nn.Linear(3, 5)
    model.head.weight = model.table.weight
    for selection in ("head.weight", "table.weight", "Linear.weight", "Embedding.*", ["*", "!*.bias"]):
        assert Linearisation(model, selection).names == ["table.weight"]
    assert Linearisation(model, "head.*").names == ["table.weight", "head.bias"]
    assert Linearisation(model, "!head.weight").names == ["head.bias"]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(3, 2), torch.ones(4, 3).double()),
        (nn.Linear(3, 2), torch.ones(4, 3).long()),
        (nn.Conv1d(1, 2, 2), torch.ones(4, 1, 3).double()),
        (nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), torch.ones(4, 3).double()),
        (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), torch.ones(4, 3).double()),
    ],
)
def test_inputs_of_another_type_than_the_weights(model: nn.Module, x: Tensor) -> None:
    message = (
        rf"{type(model).__name__}, whose weights are in torch.float32, fails on inputs in {x.dtype}: .* Convert the"
    )
    with pytest.raises(TypeError, match=message + r" inputs, as by `x.to\(torch.float32\)`"):
        Linearisation(model)(x)


class Wrong(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(2, 2), kind

    def forward(self, x: Tensor):
        y = self.linear(x)
        return {"tuple": (y, y), "dict": {"scores": None}, "scalar": y.sum(), "transposed": y.T}[self.kind]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("tuple", TypeError, "returned a tuple, not a tensor. Wrap it in a module"),
        ("dict", TypeError, r"a dict with \['scores'\], not a tensor.*a dictionary of such tensors, one for each"),
        ("scalar", ValueError, r"returned shape \[\] for a batch of 5 inputs"),
        ("transposed", ValueError, "the first axis of the output must be the batch"),
    ],
)
def test_outputs_that_are_not_a_batch_tensor_are_refused(kind, error, message) -> None:
    with pytest.raises(error, match=message):
        Linearisation(Wrong(kind))(torch.zeros(5, 2))


def group_norm() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.GroupNorm(1, 4, affine=False), nn.Flatten()
        ).double()
        return Case(net, Gaussian(1.0), torch.randn(3, 2, 4).double(), torch.zeros(3, 12).double())


@pytest.mark.parametrize("name", [*CASES, "group_norm"])
def test_products_are_differentiable_where_asked_for(name: str) -> None:
    """By `graph=True`: the same numbers, and derivatives in inputs and vectors, none in the weights."""
    case = group_norm() if name == "group_norm" else make_case(name)
    net = Linearisation(case.model, lambda name, p: name != "0.weight" and p.requires_grad)
    x = case.x[:2].clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    C = net(case.x[:2]).reshape(2, -1).shape[1]
    v = torch.randn(2, net.num_parameters, generator=generator, dtype=torch.float64, requires_grad=True)
    u = torch.randn(2, 2, C, generator=generator, dtype=torch.float64, requires_grad=True)
    calls = {
        "call": (lambda x: net(x, graph=True), lambda x: net(x), (x,)),
        "jvp": (lambda x, v: net.jvp(x, v, graph=True), net.jvp, (x, v)),
        "vjp": (lambda x, u: net.vjp(x, u, graph=True), net.vjp, (x, u)),
        "jacobian": (lambda x: net.jacobian(x, graph=True), net.jacobian, (x,)),
    }
    for with_graph, plain, inputs in calls.values():
        assert_close(with_graph(*inputs).detach(), plain(*(t.detach() for t in inputs)))
        assert torch.autograd.gradcheck(with_graph, inputs, eps=1e-6, atol=1e-5, fast_mode=True)
    assert all(p.grad is None for p in case.model.parameters())


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
    monkeypatch.setattr(jacobian_products, "_ALONE", most)
    assert_close(network.vjp(case.x, u), known)
    assert set(calls) == {batched}


def passes(model: nn.Module) -> list[int]:
    """How many data each forward pass has from here on."""
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    return seen


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the largest block that the C library keeps."""

    def keep(num_bytes: int) -> None:
        for module in (jacobian_products, linearisation):
            monkeypatch.setattr(module, "LARGEST_KEPT", num_bytes)

    return keep


@pytest.mark.parametrize("num", [1, 5])
@pytest.mark.parametrize("pieces", [2, 3])
def test_products_of_pieces_are_those_of_the_whole(
    case: Case, pieces: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split = Linearisation(case.model), Linearisation(case.model)
    f = whole(case.x).reshape(len(case.x), -1)
    v, u = random(num, whole.num_parameters), random(num, *f.shape)
    expected = [whole.jvp(case.x, v), whole.vjp(case.x, u), whole.ggn(case.x, v, lambda g: g * u)]
    monkeypatch.setattr(JacobianProducts, "pieces", lambda *args: pieces)
    monkeypatch.setattr(JacobianProducts, "check_proportion", lambda *args: True)
    monkeypatch.setattr(linearisation, "FEWEST", math.inf)
    split.jvp(case.x, v)  # the first product counts what a forward pass of all data makes
    seen = passes(case.model)
    found = [split.jvp(case.x, v), split.vjp(case.x, u), split.ggn(case.x, v, lambda g: g * u)]
    for product, right in zip(found, expected, strict=True):
        assert_close(product, right, rtol=1e-8, atol=1e-9)
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
    kept: int, call: str, num: int, K: int, seen: list[int], keep: Callable[[int], None]
) -> None:
    """Of images of 256 bytes, with 1,280 in each of two tensors more, and 4,052 of weights."""
    keep(kept)
    model = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(320, 3))
    network, x = Linearisation(model), torch.randn(num, 1, 8, 8)
    vectors = torch.randn(K, num, 3) if call == "vjp" else torch.randn(K, 1013)

    def product() -> None:
        getattr(network, call)(x, vectors, *([torch.tanh] if call == "ggn" else []))

    product()  # counts what is made
    found = passes(model)
    product()
    assert found == seen


def test_data_on_a_gpu_go_together() -> None:
    ways = JacobianProducts(nn.Linear(1, 1), 16)
    ways.size(lambda: torch.ones(10, 2**20), 10)
    assert ways.pieces(1000, 1000, 4, 8, torch.device("cpu")) > 100
    assert ways.pieces(1000, 1000, 4, 8, torch.device("cuda")) == 1


class Graph(nn.Module):
    """600 nodes, all of which go through the network whichever are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 20), nn.Linear(20, 2)
        self.register_buffer("nodes", torch.randn(600, 3))

    def forward(self, index: Tensor) -> Tensor:
        return self.outer(self.inner(self.nodes).relu())[index]


@pytest.mark.parametrize("first", [2, 100])
def test_what_is_no_smaller_for_fewer_data_does_not_go_in_pieces(first: int, keep: Callable[[int], None]) -> None:
    keep(24_000)  # of 48,000 bytes
    model, index = Graph(), torch.arange(100)
    network = Linearisation(model)
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


def test_what_fails_for_fewer_data_does_not_go_in_pieces(keep: Callable[[int], None]) -> None:
    keep(4_000)  # of 8,000 bytes
    network = Linearisation(Together())
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
def test_pieces_that_do_not_depend_on_the_weights(
    parameters: list[str] | None, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random(40, 3)
    x = x[x[:, 0].argsort()]
    network = Linearisation(Routed().double(), parameters)
    v, u = random(num, network.num_parameters), random(num, 40, 20)

    def products() -> list[Tensor]:
        return [network.jvp(x, v), network.vjp(x, u), network.ggn(x, v, torch.tanh)]

    expected = products()
    monkeypatch.setattr(Linearisation, "_pieces", lambda self, x, *args, **kwargs: list(x.split(10)))
    for found, right in zip(products(), expected, strict=True):
        assert_close(found, right)
    with pytest.raises(ValueError, match="depend on none of the random weights"):
        network.with_names(["a.bias"]).vjp(-x.abs(), u)


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


def test_cotangents_of_a_piece_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, u = random(40, 3), random(3, 40, 3)
    x = x[x[:, 0].argsort()]
    network = Linearisation(Forces().double(), ["b.*"])
    expected = network.vjp(x, u)
    monkeypatch.setattr(Linearisation, "_pieces", lambda self, x, *args, **kwargs: list(x.split(10)))
    assert_close(network.vjp(x, u), expected)


def test_cotangents_without_gradients_give_zeros() -> None:
    """Of which torch gives none, so that nothing says how many there were."""
    network = Linearisation(Forces().double(), ["b.*"])
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    try:
        found = network.vjp(-random(10, 3).abs(), random(3, 10, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(found, torch.zeros_like(found))


def test_where_outputs_are_large_the_curvature_is_not_asked_for_each_piece(keep: Callable[[int], None]) -> None:
    keep(20_000)
    x, asked = torch.randn(100, 3), []
    network = Linearisation(nn.Sequential(nn.Linear(3, 60), nn.Tanh()))
    network.ggn(x, torch.randn(1, network.num_parameters), lambda u: asked.append(u.shape) or u)
    assert asked == [(1, 100, 60)]


class Distances(nn.Module):
    """To four points, whose pullbacks torch gets wrong under `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()
        self.points = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.inner(x), self.points)


def test_products_of_distances() -> None:
    """Products and Jacobian against single derivatives of torch's own `cdist`."""
    torch.manual_seed(0)
    model, x = Distances(), torch.randn(5, 3, dtype=torch.float64)
    network = Linearisation(model)
    rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in model(x).reshape(-1)]
    full = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
    u, v = torch.randn(6, 5, 4, dtype=torch.float64), torch.randn(6, full.shape[1], dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    assert network.names == names
    assert_close(network.jacobian(x).reshape(full.shape), full, rtol=1e-8, atol=1e-10)
    assert_close(network.vjp(x, u), u.flatten(1) @ full, rtol=1e-8, atol=1e-10)
    assert_close(network.jvp(x, v).flatten(1), v @ full.T, rtol=1e-8, atol=1e-10)
    each = (u[0].reshape(5, 4, 1) * full.reshape(5, 4, -1)).sum(1)
    assert_close(network.vjp_each(x, u[0]), each, rtol=1e-8, atol=1e-10)
