import pytest
import reference
import torch
from cases import CASES, Case, make_case
from grids import covering
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.memory import Batching


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@covering(indirect=["case"], case=CASES, chunk_size=[1, 2, 16])
def test_products_equal_the_dense_jacobian(case: Case, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batching, "chunk_size", chunk_size)
    network = Linearisation(case.model)
    J = reference.jacobian(case.model, case.x)
    N, C, P = J.shape
    v, u = random(5, P), random(5, N, C)
    assert network.num_parameters == P
    assert_close(network.jvp(case.x, v), torch.einsum("ncp,kp->knc", J, v), rtol=1e-6, atol=1e-9)
    assert_close(network.vjp(case.x, u), torch.einsum("ncp,knc->kp", J, u), rtol=1e-6, atol=1e-9)
    assert_close(network.jacobian(case.x), J, rtol=1e-6, atol=1e-9)


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


def test_products_are_counted_in_data_times_vectors() -> None:
    case = make_case("classification")
    network = Linearisation(case.model)
    network.jvp(case.x, random(5, network.num_parameters))
    network.vjp(case.x, random(2, 8, 4))
    assert network.products == {"jvp": 40, "vjp": 16}


def test_errors_say_what_was_found_and_what_to_do() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        Linearisation(torch.sin)  # pyright: ignore
    with pytest.raises(ValueError, match=r"head\.weight"):
        Linearisation(model, ["head.weight"])
    with pytest.raises(ValueError, match="`parameters`"):
        Linearisation(model, lambda name, p: False)
    with pytest.raises(ValueError, match="requires_grad_"):
        Linearisation(nn.Linear(2, 1).requires_grad_(False))
    quantised = nn.Linear(2, 1)
    quantised.table = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match="'table'"):
        Linearisation(quantised, "table")
    for wrong, found in (
        (list(model.parameters()), r"\blist\b"),
        (3, r"\bint\b"),
        (model.parameters(), "generator"),
    ):
        with pytest.raises(TypeError, match=found):
            Linearisation(model, wrong)  # pyright: ignore
    with pytest.raises(ValueError, match="`v`"):
        Linearisation(model).jvp(torch.zeros(1, 2), torch.zeros(3, 2))


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
        ("tuple", TypeError, r"\btuple\b"),
        ("dict", TypeError, "'scores'"),
        ("scalar", ValueError, r"\[\]"),
        ("transposed", ValueError, "axis"),
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
