"""Networks whose rows act on each other, or whose two products are not adjoint, are refused at the fit."""

import pytest
import torch
from flat_settings import laplace_of
from torch import Tensor, nn

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.consistency import check_consistency
from laplace_sampling.networks.linearisation import Linearisation

generator = torch.Generator().manual_seed(0)
X = torch.randn(6, 3, generator=generator)
Y = torch.randint(2, (6,), generator=generator)


def check(model: nn.Module, x: Tensor = X, autocast: torch.dtype | None = None) -> None:
    check_consistency(Linearisation(model, autocast=autocast), x)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        return h - h.mean(0)


def test_what_depends_on_the_place_in_the_batch() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * torch.arange(1, len(x) + 1)[:, None]

    with pytest.raises(ValueError, match="outputs"):
        check(Placed())


def test_a_derivative_that_is_wrong_for_one_datum() -> None:
    class Single(nn.Module):
        """As torch's batch normalisation was, of contiguous inputs and cotangents in another order."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            if h.requires_grad and len(h) == 1:
                h.register_hook(lambda g: 2 * g)
            return h

    with pytest.raises(ValueError, match="Jacobian"):
        check(Single())


class OfNodes(nn.Module):
    """Each row is a node of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.index_add(0, self.edges[1], x[self.edges[0]]))


@pytest.mark.parametrize("method", ["exact", "krylov", "sgd", "kfac"])
def test_rows_that_act_on_each_other(method: str) -> None:
    message = "outputs"
    with pytest.raises(ValueError, match=message):
        laplace_of(Centred(), "classification", method=method).fit([(X, Y)], progress=False)


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


def test_products_that_depend_on_the_batch_where_outputs_do_not() -> None:
    class Hidden(Centred):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h + h.mean(0) - h.mean(0).detach()

    with pytest.raises(ValueError, match="φv"):
        check(Hidden())


def test_nodes_of_one_graph() -> None:
    with pytest.raises(ValueError, match="IndexError"):
        LinearisedLaplace(OfNodes(), "classification").fit([(X, Y)], progress=False)


def test_an_error_of_the_network_itself_is_shown() -> None:
    class Broken(Centred):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("the sensor is switched off")

    with pytest.raises(RuntimeError, match=r"^the sensor is switched off$"):
        check(Broken())


def test_one_number_a_datum() -> None:
    check(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))


def test_a_derivative_that_only_one_mode_has() -> None:
    class Scaled(nn.Module):
        """A hook on gradients, which forward mode knows nothing of."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.requires_grad:
                h.register_hook(lambda g: 0.9 * g)
            return self.last(h.tanh())

    with pytest.raises(ValueError, match="Jacobian"):
        check(Scaled())


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
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Squared.apply(x)

    said = r"Squared\.apply"
    with (
        pytest.warns(UserWarning, match="reverse passes"),
        pytest.raises(ValueError, match=said),
    ):
        check(nn.Sequential(nn.Linear(3, 4), Square(), nn.Linear(4, 2)))


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

    class Chaotic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h * (1.0 if h.dtype == torch.float64 else len(x))

    with pytest.raises(ValueError, match="batch"):
        check(type("Coupled", (Chaotic,), {"forward": lambda self, x: self.linear(x) * len(x)})())
    check(Chaotic())


def test_products_of_the_check_are_not_counted_and_it_is_made_once() -> None:
    calls = []
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda *_: calls.append(1))
    network = Linearisation(model)
    check_consistency(network, X)
    assert network.products == {"jvp": 0, "vjp": 0}
    assert len(calls) <= 9
    check_consistency(network, X[:1])  # one datum has no other
