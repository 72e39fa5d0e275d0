"""Networks whose rows act on each other, or whose two products are not adjoint, are refused at the fit."""

from collections.abc import Callable
from functools import partial

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.testing import assert_close

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.networks.consistency import check_consistency
from laplace_sampling.networks.linearisation import Linearisation

generator = torch.Generator().manual_seed(0)
X = torch.randn(6, 3, generator=generator)
Y = torch.randint(2, (6,), generator=generator)


def check(model: nn.Module, x: Tensor = X, autocast: torch.dtype | None = None) -> None:
    check_consistency(Linearisation(model, autocast=autocast), x)


class Of(nn.Module):
    """What `change` makes of the outputs of a layer."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(3, 2), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


def centred(h: Tensor) -> Tensor:
    return h.tanh() - h.tanh().mean(0)


def with_factor_of_gradients(h: Tensor, factor: float, most: int) -> Tensor:
    """A hook on gradients, which forward mode knows nothing of, for so many data."""
    h = h.tanh()
    if h.requires_grad and len(h) <= most:
        h.register_hook(lambda g: factor * g)
    return h


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the rest of the batch": (centred, "outputs"),
    "the place in the batch": (lambda h: h * torch.arange(1, len(h) + 1)[:, None], "outputs"),
    "the batch in products only": (lambda h: h + h.mean(0) - h.mean(0).detach(), "φv"),
    "one mode only": (partial(with_factor_of_gradients, factor=0.9, most=2), "Jacobian"),
    # As torch's batch normalisation was, of contiguous inputs and cotangents in another order.
    "one mode for a single datum": (partial(with_factor_of_gradients, factor=2.0, most=1), "Jacobian"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_function_of_each_datum_with_one_derivative(name: str) -> None:
    change, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        check(Of(change))


class OfNodes(nn.Module):
    """Each row is a node of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.index_add(0, self.edges[1], x[self.edges[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_of_the_batch(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)), nn.Upsample(scale_factor=2.0), norm, nn.Flatten(), nn.Linear(12, 2)
    )
    with pytest.raises(ValueError, match=r"datum.*track_running_stats"):
        check(model.to(dtype), X.to(dtype))
    flat = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))  # fails on one datum
    with pytest.raises(ValueError, match="ValueError"):
        check(flat)


def test_nodes_of_one_graph() -> None:
    with pytest.raises(ValueError, match="IndexError"):
        LinearisedLaplace(OfNodes(), "classification").fit([(X, Y)], progress=False)


def test_an_error_of_the_network_itself_is_shown() -> None:
    def broken(h: Tensor) -> Tensor:
        raise RuntimeError("the sensor is switched off")

    with pytest.raises(RuntimeError, match=r"^the sensor is switched off$"):
        check(Of(broken))


def test_one_number_a_datum() -> None:
    check(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))


class Squared(torch.autograd.Function):
    """No forward derivative, and a reverse one through numpy, that autograd takes for a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.detach().numpy() * g.detach().numpy())


def test_a_derivative_that_cannot_be_differentiated_is_named() -> None:
    with pytest.warns(UserWarning, match="reverse passes"), pytest.raises(ValueError, match=r"numpy: .* in a Of"):
        check(Of(Squared.apply))  # pyright: ignore


class Cube(torch.autograd.Function):
    """Derivatives by forward and by reverse mode are `3 x²` times factors of the call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, of_forward, of_reverse):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, *ctx.factors = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return ctx.factors[0] * 3 * ctx.saved_tensors[0] ** 2 * tangent

    @staticmethod
    def backward(ctx, g):
        return ctx.factors[1] * 3 * ctx.saved_tensors[0] ** 2 * g, None, None


def cube(x: Tensor, of_forward: float = 1.0, of_reverse: float = 1.0) -> Tensor:
    """An operation that modes see, as those of torch."""
    if has_torch_function_unary(x):
        return handle_torch_function(cube, (x,), x, of_forward, of_reverse)
    return Cube.apply(x, of_forward, of_reverse)


class Cubed(nn.Module):
    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return cube(x, *self.factors)


def cubed(*factors: float) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Cubed(*factors), nn.Linear(4, 1)).double()


def laplace(model: nn.Module, x: Tensor, method: str, parameters=None) -> LinearisedLaplace:
    settings = {"prior": IsotropicPrior(precision=1.0), "method": method, "num_samples": 16, "parameters": parameters}
    la = LinearisedLaplace(model, Gaussian(25.0, learn=False), **settings)
    return la.fit([(x, x[:, :1].sin())], progress=False, budget=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("parameters", [None, {"0.weight": [1, 2, 5]}], ids=["all", "elements"])
@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_a_wrong_forward_derivative_is_not_taken(method: str, parameters, dtype: torch.dtype, tmp_path) -> None:
    x = X.to(dtype)
    expected = laplace(cubed().to(dtype), x, method, parameters).predict(x).stddev
    model = cubed(0.9, 1.0).to(dtype)
    with pytest.warns(UserWarning, match=r"wrong forward derivative; two reverse passes"):
        la = laplace(model, x, method, parameters)
    tolerance = {} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 0}
    assert_close(la.predict(x).stddev, expected, **tolerance)
    # No fit finds it again where a posterior is read.
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert_close(loaded.predict(x).stddev, la.predict(x).stddev)


def test_a_wrong_reverse_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="Jacobian"):
        laplace(cubed(1.0, 0.9), X.double(), "exact")
    with pytest.raises(ValueError, match="Jacobian"):
        laplace(cubed(0.9, 0.9001), X.double(), "exact")


class OfCovariance(nn.Module):
    """A head that is `h ↦ hᵀ A⁻¹ h` for `A` by its Cholesky factor."""

    def __init__(self, upper: bool) -> None:
        super().__init__()
        self.root, self.upper = nn.Parameter(torch.eye(4) + torch.arange(16.0).reshape(4, 4) / 16), upper

    def forward(self, h: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.root @ self.root.T + torch.eye(4).to(h), upper=self.upper)
        return (h @ torch.cholesky_inverse(factor, upper=self.upper) * h).sum(1, keepdim=True)


@pytest.mark.filterwarnings("ignore:.*has a wrong forward derivative")  # so it is in torch 2.14
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("parameters", [None, "last_layer"], ids=["all", "last"])
def test_inverses_by_cholesky_factors(parameters: str | None, upper: bool) -> None:
    body = cubed()[:2]
    model, x = nn.Sequential(body, OfCovariance(upper)).double(), X.double()
    if parameters is not None:
        body.requires_grad_(False)
    J = reference.jacobian(model, x)[:, 0]
    H = 25 * J.T @ J + torch.eye(J.shape[1], dtype=J.dtype)
    expected = (J * torch.linalg.solve(H, J.T).T).sum(1).sqrt()
    assert_close(laplace(model, x, "exact", parameters).predict(x).stddev[:, 0], expected)
    if parameters is not None:
        v = torch.ones(1, 16, dtype=J.dtype)
        network = laplace(model, x, "krylov", parameters).network
        assert_close(network.jvp(x, v)[0, :, 0], (J @ v.T)[:, 0])


def conv() -> nn.Sequential:
    layers = [nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 64, 3, padding=1), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.Flatten(), *[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_honest_networks_pass_in_every_precision(dtype: torch.dtype) -> None:
    for seed in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = conv()
        check(model.to(dtype), X.to(dtype))
    check(model.float(), X, torch.bfloat16)


def test_what_fails_in_float32_only_passes() -> None:
    """Rounding that decides which way a unit goes."""
    with pytest.raises(ValueError, match="batch"):
        check(Of(lambda h: h * len(h)))
    check(Of(lambda h: h * (1.0 if h.dtype == torch.float64 else len(h))))


def test_products_of_the_check_are_not_counted_and_it_is_made_once() -> None:
    calls = []
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda *_: calls.append(1))
    network = Linearisation(model)
    check_consistency(network, X)
    assert network.products == {"jvp": 0, "vjp": 0}
    assert len(calls) <= 9
    check_consistency(network, X[:1])  # one datum has no other


class _SolvesByLU(nn.Module):
    """A layer that solves with a learnt matrix: torch's derivatives of `lu_factor` are wrong under `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.root, self.out = nn.Parameter(0.6 * torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        A = self.root @ self.root.T + torch.eye(4, dtype=x.dtype) + h[:, :, None] * h[:, None]
        solved = torch.linalg.lu_solve(*torch.linalg.lu_factor(A), h[:, :, None])[..., 0]
        return (solved @ self.out)[:, None]


@pytest.mark.filterwarnings("ignore:.*takes one datum at a time")
@pytest.mark.filterwarnings("ignore:Jacobians of")
def test_rows_that_are_wrong_for_data_together_are_taken_one_by_one() -> None:
    torch.manual_seed(0)
    module, x = _SolvesByLU().double(), torch.randn(6, 3, dtype=torch.float64)
    expected = []
    for datum in x:
        grads = torch.autograd.grad(module(datum[None]).sum(), list(module.parameters()))
        expected.append(torch.cat([grad.reshape(-1) for grad in grads]))
    network = Linearisation(module)
    check_consistency(network, x)
    torch.testing.assert_close(network.jacobian(x)[:, 0], torch.stack(expected))
    torch.testing.assert_close(network.vjp_each(x, torch.ones(6, 1).double()), torch.stack(expected))
