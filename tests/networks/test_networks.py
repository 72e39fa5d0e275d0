"""Networks of every kind: their products, and what is said where forward mode is missing."""

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import reference
import torch
import torch.nn.functional as F
from networks.registry.compatibility import run
from networks.registry.unusual_modules import NETWORKS, Checkpointed, Mixture
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from laplace_sampling.data.batches import batched
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.networks.consistency import check_consistency
from laplace_sampling.networks.derivatives import forward_mode_kernels
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.memory import TensorBytes

_SAID = {
    "a custom `autograd.Function` without `jvp`": "has no forward derivative; two reverse passes are taken instead",
    "buffers written in evaluation mode": "mutate a captured Tensor",
    "LSTM on packed sequences": "in `lstm`, a LSTM",
}
_OF_TORCH = [(name, build) for library, name, build in NETWORKS if library == "torch.nn"]


@pytest.mark.parametrize(
    ("name", "build"),
    [pytest.param(*one, id=one[0], marks=pytest.mark.slow if "compile" in one[0] else ()) for one in _OF_TORCH],
)
def test_network_works_and_is_unchanged(name: str, build) -> None:
    outcome = run("torch.nn", name, build)
    if name == "dynamically quantised head":
        assert "`quantized::linear_dynamic`" in outcome.row()
        return
    assert outcome.works, outcome.row()
    assert _SAID.get(name, "") in " ".join(outcome.notices)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_a_ggn_product_of_one_vector_is_that_of_many() -> None:
    network, x = Linearisation(mlp()), random(5, 3)
    v, B = random(3, network.num_parameters), random(2, 2)
    expected = DenseFeatures(network.jacobian(x)).ggn(v, torch.arange(5), lambda u: u @ B)
    assert_close(network.ggn(x, v, lambda u: u @ B), expected)
    network.products.update(jvp=0, vjp=0)
    assert_close(network.ggn(x, v[:1], lambda u: u @ B), expected[:1])
    assert network.products == {"jvp": 5, "vjp": 5}


def test_no_grad_stops_both_products() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.body(x)
            return self.head(h)

    network, x = Linearisation(Stopped().double()), random(5, 3)
    v = random(2, network.num_parameters)
    expected = torch.einsum("ncp,kp->knc", network.jacobian(x), v)
    assert_close(network.jvp(x, v), expected)
    assert_close(network.jvp(x, v[:1]), expected[:1])
    assert torch._C._is_fwd_grad_enabled()


def test_a_notice_is_given_once_and_names_operation_and_module() -> None:
    class Written(nn.Module):
        """Writes what depends on the weights into memory that does not, which `vmap` refuses."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h * float(h.sum() > 1e9) + torch.tanh(h) if bool(torch.isfinite(h).all()) else h

    module = nn.Sequential(Cubed(), Written()).double()
    network, x = Linearisation(module), random(5, 3)
    v = random(2, network.num_parameters)
    with pytest.warns(UserWarning, match=r"Cube\.apply"):
        first = network.jvp(x, v)
    assert_close(network.jvp(x, v), first)  # said once
    u = random(2, 5, 2)
    assert_close((first * u).sum((1, 2)), (network.vjp(x, u) * v).sum(1))


def test_routing_that_depends_on_data_is_that_of_each_datum() -> None:
    network, x = Linearisation(Mixture().double()), random(6, 3)
    v = random(2, network.num_parameters)
    with pytest.warns(UserWarning, match="Mixture"):
        J = network.jacobian(x)
    assert_close(network.jvp(x, v), torch.einsum("ncp,kp->knc", J, v))


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.scale * x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class Opaque(torch.autograd.Function):
    """No forward derivative, and a reverse one that cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Opaque.apply(self.linear(x))


class Tokens(nn.Module):
    """Convolution, layer, and attention to positions: cotangents of the layer are those of a transposition."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.layer, self.head = nn.Conv2d(2, 3, 2), layer, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(torch.softmax(h @ h.mT, -1) @ h).mean(1)


class OfTorch(nn.Module):
    """The same norms by the functions of `torch`, not of `torch.nn.functional`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.instance = norm, isinstance(norm, nn.InstanceNorm2d)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        func = torch.instance_norm if self.instance else torch.batch_norm
        return func(x, n.weight, n.bias, n.running_mean, n.running_var, n.running_mean is None, 0.1, n.eps, True)


_NORMS = [
    nn.BatchNorm2d(3),
    nn.BatchNorm2d(3, affine=False),
    nn.InstanceNorm2d(3),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    OfTorch(nn.BatchNorm2d(3)),
    OfTorch(nn.InstanceNorm2d(3)),
    nn.PReLU(3),
    nn.PReLU(),
]


@pytest.mark.parametrize("layer", _NORMS, ids=[f"{layer}".replace("\n", "") for layer in _NORMS])
@pytest.mark.parametrize("num", [1, 3])
def test_layers_whose_derivatives_torch_has_wrong_in_some_layouts(layer: nn.Module, num: int) -> None:
    module, x = Tokens(copy.deepcopy(layer)).double(), random(num, 2, 4, 4)
    generator = torch.Generator().manual_seed(0)
    for value in (p for p in module.layer.state_dict().values() if p.is_floating_point()):
        value.uniform_(0.2, 2, generator=generator)
    network = Linearisation(module)
    J = by_differences(module.eval(), x)  # autograd itself is wrong
    v, u = random(2, network.num_parameters), random(2, num, 2)
    close = {"rtol": 1e-6, "atol": 1e-8}
    assert_close(network.jvp(x, v), torch.einsum("ncp,kp->knc", J, v), **close)
    assert_close(network.vjp(x, u), torch.einsum("knc,ncp->kp", u, J), **close)
    assert_close(network.vjp(x, u, graph=True), torch.einsum("knc,ncp->kp", u, J), **close)
    assert_close(network.vjp_each(x, u[0]), torch.einsum("nc,ncp->np", u[0], J), **close)
    assert_close(network.jacobian(x), J, **close)


@torch.no_grad()
def by_differences(module: nn.Module, x: Tensor, step: float = 1e-6) -> Tensor:
    """The Jacobian in the weights by central differences, `[N, C, P]`."""
    weights = nn.utils.parameters_to_vector(module.parameters())

    def outputs(w: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(w, module.parameters())
        return module(x)

    moved = [
        (outputs(weights + e) - outputs(weights - e)) / (2 * step) for e in step * torch.eye(len(weights)).double()
    ]
    nn.utils.vector_to_parameters(weights, module.parameters())
    return torch.stack(moved, dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_honest_networks_in_low_precision_go_on_together(dtype: torch.dtype) -> None:
    for seed in range(4):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.InstanceNorm1d(4), nn.PReLU()) for _ in range(12)]
            module = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 1), *layers, nn.Flatten(), nn.Linear(32, 2))
            Linearisation(module.to(dtype)).jacobian(torch.randn(5, 8).to(dtype))  # a notice would be an error


def test_norms_in_half_precision_do_not_overflow() -> None:
    module, x = nn.Sequential(nn.InstanceNorm1d(3), nn.Flatten(), nn.Linear(24, 2)).half(), 600 * random(4, 3, 8)
    v = random(2, 50)
    found = Linearisation(module).jvp(x.half(), v.float())
    assert_close(found.double(), Linearisation(copy.deepcopy(module).double()).jvp(x, v), rtol=0.02, atol=0.02)


def test_types_under_autocast_are_those_of_torch() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.act = nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return torch.zeros_like(h).index_add(0, torch.arange(len(x)), self.act(self.norm(h).float()))

    network = Linearisation(Pooled(), autocast=torch.bfloat16)
    assert bool(network.jvp(random(4, 3).float(), torch.ones(1, network.num_parameters)).isfinite().all())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True), nn.PReLU(3)])
def test_exported_networks(norm: nn.Module) -> None:
    module, x = Tokens(copy.deepcopy(norm)).double().eval(), random(4, 2, 4, 4)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    found = Linearisation(exported).jacobian(x)
    assert_close(found, by_differences(module, x), rtol=1e-6, atol=1e-8)


def test_where_nothing_works_an_error_names_operation_and_module() -> None:
    network = Linearisation(nn.Sequential(nn.Linear(3, 3), Failing()).double())
    said = r"Opaque\.apply"
    with pytest.raises(RuntimeError, match=said):
        network.jvp(random(4, 3), random(2, network.num_parameters))


def test_where_only_vmap_fails_vectors_go_one_by_one_and_it_is_said_once() -> None:
    network, x = Linearisation(nn.Sequential(mlp(), Fourth()).double()), random(4, 3)
    v = random(3, network.num_parameters)
    said = "vector"
    with pytest.warns(UserWarning, match=said):
        found = network.jvp(x, v)
    with pytest.warns(UserWarning, match="Jacobians"):
        expected = torch.einsum("ncp,kp->knc", network.jacobian(x), v)
    assert_close(found, expected)
    assert_close(network.jvp(x, v), expected)  # without another notice


class Fourth(nn.Module):
    """`x⁴` by an operation with both derivatives, which `vmap` does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return FourthPower.apply(x)


class FourthPower(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**4

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 4 * ctx.saved_tensors[0] ** 3 * g

    @staticmethod
    def jvp(ctx, t):
        return 4 * ctx.saved_tensors[0] ** 3 * t


class Unreliable(nn.Module):
    """Raises an error of its own at some calls."""

    def __init__(self, *failures: int) -> None:
        super().__init__()
        self.body, self.calls, self.failures = mlp(), [], failures

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        if len(self.calls) - 1 in self.failures:
            raise RuntimeError("the sensor is switched off")
        return self.body(x)


PRODUCTS = {
    "jvp of many": lambda network, x: network.jvp(x, random(3, network.num_parameters)),
    "jvp of one": lambda network, x: network.jvp(x, random(1, network.num_parameters)),
    "ggn of one": lambda network, x: network.ggn(x, random(1, network.num_parameters), lambda u: u),
    "vjp": lambda network, x: network.vjp(x, random(3, 4, 2)),
    "vjp of each": lambda network, x: network.vjp_each(x, random(4, 2)),
    "jacobian": lambda network, x: network.jacobian(x),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("failures", [(0,), range(100)], ids=["once", "always"])
def test_an_error_of_the_network_itself_is_shown_and_no_other_way_is_taken(name: str, failures) -> None:
    x, unreliable = random(4, 3), Unreliable(*failures)
    network = Linearisation(unreliable)
    with pytest.raises(RuntimeError, match=r"^the sensor is switched off$"):
        PRODUCTS[name](network, x)
    unreliable.failures = ()
    network = network.renewed()
    assert_close(PRODUCTS[name](network, x), PRODUCTS[name](Linearisation(unreliable.body), x))  # without a notice


def test_wrappers_are_taken_off() -> None:
    model = mlp()
    for wrapped in (torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model))):
        network = Linearisation(wrapped)
        assert network.source is model
        assert network.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert_close(network(random(4, 3)), model(random(4, 3)), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: torch.jit.trace(mlp(), random(4, 3)), TypeError, r"torch\.jit"),
        (lambda: torch.jit.script(mlp()), TypeError, r"torch\.jit"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 4)), nn.Linear(4, 2)), TypeError, r"torch\.jit"),
        (lambda: lambda x: x, TypeError, r"torch\.nn\.Module"),
        (lambda: torch.ao.quantization.quantize_dynamic(mlp().float(), {nn.Linear}), ValueError, "quantised"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), ValueError, "LazyLinear"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, device="meta")), ValueError, "meta"),
    ],
)
def test_modules_that_cannot_be_differentiated_are_refused(make: Callable, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Linearisation(make())


class Force(nn.Module):
    """The gradient of an energy in the inputs."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.energy, self.itself = mlp(), itself

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if self.itself else nullcontext():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:.*which is slower")
def test_networks_that_differentiate() -> None:
    x, network = random(4, 3), Linearisation(Force(True))
    v, u = random(2, network.num_parameters), random(2, 4, 3)
    assert_close((network.jvp(x, v) * u).sum((1, 2)), (network.vjp(x, u) * v).sum(1))
    assert_close(torch.einsum("ncp,kp->knc", network.jacobian(x), v), network.jvp(x, v))
    with pytest.raises(ValueError, match="enable_grad"):
        Linearisation(Force(False))(x)


@pytest.mark.slow
def test_nothing_is_said_of_what_torch_imports() -> None:
    code = "import torch; from laplace_sampling.networks.linearisation import Linearisation as L; "
    code += "n = L(torch.nn.Linear(2, 1)); "
    code += "n.jvp(torch.ones(3, 2), torch.ones(2, 3)); n.vjp(torch.ones(3, 2), torch.ones(2, 3, 1))"
    for before in ("", "import torch; torch.inference_mode(True).__enter__(); "):
        run = [sys.executable, "-W", "error::FutureWarning", "-W", "error::DeprecationWarning", "-c"]
        subprocess.run([*run, before + code], check=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num", [1, 2])
def test_weights_before_a_quantised_layer_are_refused(num: int) -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    module, x = torch.ao.quantization.quantize_dynamic(body, {"2"}), torch.randn(4, 3)
    after = Linearisation(module, "4.*")
    with pytest.raises(ValueError, match="quantized::linear_dynamic"):
        check_consistency(Linearisation(module), x[:num])
    check_consistency(after, x[:num])
    head = Linearisation(module[4])
    v, hidden = torch.ones(num, 8), module[:4](x).detach()
    assert_close(after.ggn(x, v, lambda u: u), head.ggn(hidden, v, lambda u: u))


class Attention(nn.Module):
    """Self-attention and a linear layer of sequences `[N, T, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.linear = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.attention(x, x, x, need_weights=False)[0]).mean(1)


def test_tangents_of_linear_layers_are_not_repeated_for_each_index_of_a_sequence() -> None:
    num, length, K = 40, 7, 5
    network, x = Linearisation(Attention().double()), random(num, length, 4)
    v = random(K, network.num_parameters)
    expected = DenseFeatures(network.jacobian(x)).jvp(v, torch.arange(num))
    with TensorBytes() as made:
        assert_close(network.jvp(x, v), expected)
    # that of a weight for each datum takes four times as much
    assert max(made.sizes) <= K * num * length * 64 * x.element_size()
    before = F.linear
    with pytest.raises(AssertionError, match="embedding"):
        network.jvp(random(num, length, 3), v)
    assert F.linear is before


def test_groups_of_rows_are_multiplied_by_their_matrices() -> None:
    rows, weights, ends = random(7, 4).float(), random(3, 4, 8).float(), torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch._grouped_mm(rows, weights, offs=ends)  # pyright: ignore
    with forward_mode_kernels():
        found = torch._grouped_mm(rows, weights, offs=ends)  # pyright: ignore
    assert_close(found, torch.cat([rows[:2] @ weights[0], rows[2:6] @ weights[2], torch.zeros(1, 8)]))
    assert_close(found[:6], expected[:6])


def test_other_errors() -> None:
    constant = nn.Sequential(mlp(), nn.Threshold(1e9, 0.0))
    detached = Linearisation(Detached().double())
    with pytest.raises(ValueError, match="parameters="):
        detached.vjp(random(4, 3), random(1, 4, 2))
    assert not Linearisation(constant).vjp(random(4, 3), random(1, 4, 2)).any()


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_their_weights_are_refused_before_they_do(layer) -> None:
    module = nn.Sequential(layer(5, 2, max_norm=0.1), nn.Flatten())
    with pytest.raises(ValueError, match="max_norm"):
        Linearisation(module)

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            function = getattr(nn.functional, "embedding" if layer is nn.Embedding else "embedding_bag")
            return function(x, self.table, max_norm=0.1).flatten(1)

    with pytest.raises(ValueError, match="max_norm"):
        Linearisation(Functional()).jvp(torch.tensor([[1, 2]]), torch.zeros(1, 10))


def assert_products_are_of(J: Tensor, network: Linearisation, x) -> None:
    v, u = random(2, J.shape[2]), random(2, *J.shape[:2])
    Jv, Ju = torch.einsum("ncp,kp->knc", J, v), torch.einsum("ncp,knc->kp", J, u)
    assert_close(network.jvp(x, v), Jv)
    assert_close(network.jvp(x, v[:1]), Jv[:1])
    assert_close(network.vjp(x, u), Ju)
    assert_close(network.vjp_each(x, u[0]).sum(0), Ju[0])
    assert_close(network.ggn(x, v[:1], lambda u: 2 * u), 2 * torch.einsum("ncp,knc->kp", J, Jv[:1]))
    assert_close(network.jacobian(x), J)


def test_the_row_of_padding_has_no_derivative_and_gradients_are_not_scaled() -> None:
    x = torch.tensor([[1, 2, 0], [3, 3, 3], [0, 0, 4]])
    for settings in ({"padding_idx": 0}, {"padding_idx": -5}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = nn.Sequential(nn.Embedding(5, 2, **settings), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)).double()
        plain = nn.Sequential(nn.Embedding(5, 2), *module[1:]).double()
        plain[0].load_state_dict(module[0].state_dict())
        J = reference.jacobian(plain, x)
        if "padding_idx" in settings:
            J[..., :2] = 0
        assert_products_are_of(J, Linearisation(module), x)


def test_the_row_of_padding_has_one_where_its_weights_are_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).mean(1).tanh())

    model, x = Tied().double(), torch.tensor([[1, 2, 0], [3, 3, 3], [0, 0, 4]])
    assert_products_are_of(reference.jacobian(model, x), Linearisation(model), x)


class InPlace(nn.Module):
    """Standardises its inputs in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.body, self.in_place = mlp(), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.in_place else x.clone()
        x.mul_(2.0)
        x -= x.mean(1, keepdim=True)
        return self.body(x)


@pytest.mark.parametrize("form", ["tensor", "tuple", "keyword"])
def test_networks_that_change_their_inputs_in_place(form: str) -> None:
    model, plain, x = InPlace(True), InPlace(False), random(4, 3)
    plain.load_state_dict(model.state_dict())
    given = {"tensor": x.clone(), "tuple": (x.clone(),), "keyword": {"x": x.clone()}}[form]
    network = Linearisation(model)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(network(given), plain(x))
        assert_products_are_of(reference.jacobian(plain, x), network, given)
    assert torch.equal(batched(given)[0][0], x)


def test_what_a_forward_pass_writes_to_lists_and_dictionaries_of_the_copy_is_undone() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.seen, self.cache = mlp(), ["first"], {"kept": 1, "written": 2}

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            self.seen[0] = self.seen.append(h)
            self.cache["h"], self.cache["written"] = h, 3
            return h

    network, x = Linearisation(Collecting()), random(4, 3)
    network(x)
    network.jvp(x, random(2, 26))
    assert (network.module.seen, network.module.cache) == (["first"], {"kept": 1, "written": 2})


def test_a_ggn_product_through_a_checkpoint() -> None:
    """Whose part is run again in the pullback, then without dual numbers."""
    model, x = Checkpointed().double(), random(4, 3)
    plain = nn.Sequential(*model.body, model.head)
    J, network = reference.jacobian(plain, x), Linearisation(model)
    v, u = random(1, 26), random(1, 4, 2)
    for _ in range(2):
        expected = torch.einsum("ncp,ncq,kq->kp", J, J, v)
        assert_close(network.ggn(x, v, lambda u: u), expected)
        assert_close(network.vjp(x, u), torch.einsum("ncp,knc->kp", J, u))


@pytest.mark.filterwarnings("ignore")
def test_attention_from_scores_of_the_users_own() -> None:
    """`flex_attention`, which is not known to forward derivatives."""

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 12)

        def forward(self, x: Tensor, function=flex_attention) -> Tensor:
            q, k, v = self.linear(x).reshape(len(x), -1, 3, 4).transpose(1, 2).chunk(3, 1)
            return function(q.contiguous(), k.contiguous(), v.contiguous()).flatten(1)

    network, x = Linearisation(Flexible().double()), random(2, 3, 4)
    with pytest.raises(RuntimeError, match="FlexAttention"):
        network.jvp(x, random(2, network.num_parameters))


def test_weights_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    with pytest.raises(ValueError, match="inference_mode"):
        Linearisation(made)
    copied, x = copy.deepcopy(made), random(4, 3)
    assert_close(Linearisation(copied).jacobian(x), reference.jacobian(copied.eval(), x))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach()


def test_a_row_of_padding_counted_from_the_end() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(random(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.table, padding_idx=-1).flatten(1)

    x, network = torch.tensor([[0, 4], [4, 3]]), Linearisation(Table())
    moved = network.jvp(x, torch.ones(1, 10, dtype=torch.float64))[0]
    assert_close(moved, torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.float64))
