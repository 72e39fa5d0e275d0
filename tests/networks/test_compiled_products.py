"""Products by `torch.compile`: the same as those that are not compiled, and what is said where there are none."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from networks.registry.unusual_modules import Mixture
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.subnetwork import Subnetwork

pytestmark = pytest.mark.slow

BEFORE = 3  # products of a shape that are not compiled


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 5)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x) * weight[:, None] + self.shift)
        return {"a": self.a(h), "b": self.b(h).reshape(-1, 5, 1)}


def networks() -> dict[str, tuple[nn.Module, object, object]]:
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    ).double()
    heads = TwoHeads().double()
    return {
        "convolutions": (convolutions, random(5, 1, 8, 8), None),
        "two heads": (heads, {"x": random(5, 3), "weight": random(5, seed=1)}, None),
        "some weights": (heads, (random(5, 3), random(5, seed=1)), ["a.*", "body.bias"]),
    }


@pytest.mark.parametrize("name", ["convolutions", "two heads", "some weights"])
def test_products_are_those_that_are_not_compiled(name: str) -> None:
    module, x, parameters = networks()[name]
    before = copy.deepcopy(module.state_dict())
    plain, compiled = Linearisation(module, parameters), Linearisation(module, parameters, compile="aot_eager")
    for num in (1, 5, 70):
        v, u = random(num, plain.num_parameters), random(num, *plain(x).flatten(1).shape)
        for call in range(BEFORE + 2):
            assert_close(compiled.jvp(x, v), plain.jvp(x, v))
            assert_close(compiled.vjp(x, u), plain.vjp(x, u))
            assert_close(compiled.ggn(x, v, torch.tanh), plain.ggn(x, v, torch.tanh))
            assert num > 1 or bool(compiled.compiled.programs) == (call >= BEFORE)
    # one vector, 5 as 8 and 70 as 64 and 8, by forward and by reverse mode
    assert compiled.compiled.programs == 6
    assert compiled.products == plain.products
    assert not compiled.jvp(x, v).requires_grad
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
    assert module.training


def test_products_with_a_graph_and_of_other_weights() -> None:
    module, x, _ = networks()["convolutions"]
    plain, compiled = Linearisation(module), Linearisation(module, compile="eager")
    v = random(2, plain.num_parameters)
    for _ in range(BEFORE + 1):
        compiled.jvp(x, v)
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled.jvp(inputs, v, graph=True).square().sum(), inputs)
    (expected,) = torch.autograd.grad(plain.jvp(inputs, v, graph=True).square().sum(), inputs)
    assert_close(gradient, expected)
    with torch.no_grad():
        module[4].weight.mul_(2.0)
    assert_close(compiled.jvp(x, v), plain.jvp(x, v))  # weights are arguments of a program
    bias = compiled.with_names(["4.bias"])
    assert bias.compile == "eager"
    for _ in range(BEFORE + 1):
        assert_close(bias.jvp(x, random(2, 3)), plain.with_names(["4.bias"]).jvp(x, random(2, 3)))
    assert bias.compiled.programs == 1
    assert compiled.in_float64().compile is False


def test_elements_of_weights() -> None:
    module, x, _ = networks()["convolutions"]
    masks = {"4.weight": torch.rand(3, 72, generator=torch.Generator().manual_seed(0)) < 0.1}
    plain, compiled = Subnetwork(module, masks), Subnetwork(module, masks, compile="eager")
    v = random(3, plain.num_parameters)
    for _ in range(BEFORE + 1):
        assert_close(compiled.ggn(x, v, torch.tanh), plain.ggn(x, v, torch.tanh))
    assert compiled.whole.compiled.programs == 2


def test_a_fit_is_the_same(tmp_path) -> None:
    case = make_case("classification")
    fits = []
    for backend in (False, "eager"):
        la = laplace_of(case.model, "classification", method="krylov", num_samples=4, compile=backend)
        fits.append(la.fit(case.batches, progress=False))
    plain, compiled = fits
    assert compiled.network.compiled.programs > 0
    assert_close(compiled.samples_, plain.samples_)
    assert_close(compiled.predict(case.x).probs, plain.predict(case.x).probs)
    compiled.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert loaded.network.compile == "eager"
    assert_close(loaded.predict(case.x).probs, plain.predict(case.x).probs)


def test_compiled_code_of_a_small_network() -> None:
    """By the default backend, which writes C++."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), torch.compile(nn.Tanh()), nn.Linear(4, 2))
    x, v = torch.randn(5, 3), torch.randn(2, 26)
    plain, compiled = Linearisation(module), Linearisation(module, compile=True)
    for _ in range(BEFORE + 2):
        assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    assert compiled.compiled.programs == 1


def test_products_that_would_be_slower_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, _ = networks()["convolutions"]
    plain = Linearisation(module)
    v, u = random(1, plain.num_parameters), random(3, 5, 3)
    one, large = (Linearisation(module, compile="eager") for _ in range(2))
    for _ in range(BEFORE + 2):
        assert_close(one.ggn(x, v, torch.tanh), plain.ggn(x, v, torch.tanh))
    assert one.compiled.programs == 0
    monkeypatch.setattr("laplace_sampling.networks.compiled_products._COMPILED_PULL_BYTES", 0)
    for _ in range(BEFORE + 2):
        assert_close(large.vjp(x, u), plain.vjp(x, u))
    assert large.compiled.programs == 0
    for _ in range(BEFORE + 2):
        assert_close(large.jvp(x, v), plain.jvp(x, v))
    assert large.compiled.programs == 1


def test_what_is_not_compiled_is_said_once() -> None:
    """Control flow by the data."""
    torch.manual_seed(0)
    module, x = Mixture().double(), random(6, 3)
    plain, compiled = Linearisation(module), Linearisation(module, compile="eager")
    v = random(2, plain.num_parameters)
    for _ in range(BEFORE):
        compiled.jvp(x, v)
    with pytest.warns(UserWarning, match=r"torch\.compile"):
        found = compiled.jvp(x, v)
    assert_close(found, plain.jvp(x, v))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(compiled.jvp(x, v), plain.jvp(x, v))
        assert_close(compiled.vjp(x, random(2, 6, 2)), plain.vjp(x, random(2, 6, 2)))
    assert compiled.compiled.programs == 0


def test_a_program_that_is_wrong_is_not_used() -> None:
    def doubled(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        return lambda *args: [2 * output for output in graph(*args)]

    torch._dynamo.register_backend(doubled, name="doubled")
    module, x, _ = networks()["convolutions"]
    plain, compiled = Linearisation(module), Linearisation(module, compile="doubled")
    v = random(2, plain.num_parameters)
    for _ in range(BEFORE):
        compiled.jvp(x, v)
    with pytest.warns(UserWarning, match="size"):
        found = compiled.jvp(x, v)
    assert_close(found, plain.jvp(x, v))
    assert_close(compiled.jvp(x, v), plain.jvp(x, v))


def test_inputs_that_are_no_tensors_are_not_compiled() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return factor * super().forward(x)

    module = Scaled(3, 2).double()
    compiled, v = Linearisation(module, compile="eager"), random(2, 8)
    for factor in (1.0, 2.0):
        for _ in range(BEFORE + 1):
            x = (random(4, 3), factor)
            assert_close(compiled.jvp(x, v), Linearisation(module).jvp(x, v))
    assert compiled.compiled.programs == 0


def warmed(module: nn.Module, x: object, v: Tensor) -> Linearisation:
    compiled = Linearisation(module, compile="eager")
    for _ in range(BEFORE + 1):
        compiled.jvp(x, v)
    assert compiled.compiled.programs == 1
    return compiled


def test_arguments_in_another_order_and_other_strides_have_programs_of_their_own() -> None:
    class Two(nn.Linear):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a) + 2 * b[:, :2]

    module, v = Two(3, 2).double(), random(2, 8)
    a, b = random(4, 3), random(4, 3, seed=1)
    compiled, plain = warmed(module, {"a": a, "b": b}, v), Linearisation(module)
    for x in ({"b": b, "a": a}, {"a": a.T.contiguous().T, "b": b}, {"a": b, "b": a}):
        for _ in range(BEFORE + 2):
            assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    assert compiled.compiled.programs == 3


def test_rows_of_padding_in_later_batches_only() -> None:
    module = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)).double()
    nn.init.normal_(module[0].weight)
    full = torch.arange(1, 7).repeat(2).reshape(4, 3)
    padded = full.clone()
    padded[:, 2] = 0
    v = random(2, 54)
    compiled, plain = warmed(module, full, v), Linearisation(module)
    assert_close(compiled.jvp(padded, v), plain.jvp(padded, v))
    assert compiled.compiled.programs == 1


def test_what_changes_after_a_program_was_made() -> None:
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * super().forward(x)

    module, x, v = nn.Sequential(Scaled(3, 2), nn.BatchNorm1d(2)).double(), random(4, 3), random(2, 12)
    compiled, plain = warmed(module, x, v), Linearisation(module)
    with torch.no_grad():
        module[1].running_var.mul_(4)
    assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    handle = module[0].register_forward_hook(lambda m, a, out: 3 * out)
    for _ in range(BEFORE + 1):
        assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    handle.remove()
    assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    assert compiled.compiled.programs == 2
    other = copy.deepcopy(compiled)
    other.module[1].running_var.mul_(9)
    assert_close(other.jvp(x, v), Linearisation(other.module).jvp(x, v))
    assert other.compiled.programs == 0
    assert pickle.loads(pickle.dumps(other.compiled.__getstate__()["_programs"])) == {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    module[0].factor = 2.0
    with pytest.warns(UserWarning, match="RecompileError"):
        found = compiled.jvp(x, v)
    assert_close(found, plain.jvp(x, v))


def test_float32_and_products_that_are_zero() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    compiled, plain = warmed(module, x, torch.zeros(2, 26)), Linearisation(module)
    v = random(2, 26).float()
    assert_close(compiled.jvp(x, v), plain.jvp(x, v))
    dead = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    nn.init.constant_(dead[0].bias, -1e3)
    nothing = Linearisation(dead, compile="eager")
    for _ in range(BEFORE + 2):
        assert_close(nothing.jvp(x, torch.ones(2, 8)), torch.zeros(2, 5, 2))
    assert nothing.compiled.programs == 0  # a program would not have been checked


def test_a_check_that_does_not_end_leaves_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, _ = networks()["convolutions"]
    compiled, v = Linearisation(module, compile="eager"), random(2, 243)
    for _ in range(BEFORE):
        compiled.jvp(x, v)

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled.compiled, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled.jvp(x, v)
    assert compiled.compiled.programs == 0
    assert_close(compiled.jvp(x, v), Linearisation(module).jvp(x, v))
    assert compiled.compiled.programs == 1


def test_batches_are_not_kept() -> None:
    class Sum(nn.Linear):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a + b)

    x = (random(4, 3), random(4, 3, seed=1))
    kept = weakref.ref(x[0])
    compiled = warmed(Sum(3, 2).double(), x, random(2, 8))
    del x
    gc.collect()
    assert kept() is None
    assert compiled.compiled.programs == 1


def test_messages() -> None:
    module = nn.Linear(3, 2)
    one = "autocast"
    with pytest.raises(ValueError, match=one):
        laplace_of(module, "regression", compile=True, autocast=torch.bfloat16)
    for wrong in (nn.Linear(3, 2).bfloat16(), nn.Sequential(module, nn.Linear(2, 2).double())):
        with pytest.raises(ValueError, match=one):
            Linearisation(wrong, compile=True)
    with pytest.raises(ValueError, match="indoctor"):
        Linearisation(module, compile="indoctor")
    with pytest.raises(ValueError, match="last_layer"):
        laplace_of(module, "regression", compile=True, parameters="last_layer")
