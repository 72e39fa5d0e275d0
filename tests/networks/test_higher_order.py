"""Networks with operations of torch that call functions: `cond`, `scan`, `while_loop`, `flex_attention`."""

import pytest
import reference
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace

# torch warns of `flex_attention` outside of compiled code, and of itself where it traces a function.
pytestmark = [
    pytest.mark.slow,  # they import the compiler
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Branches(nn.Module):
    plain = False  # whether it is the Python that the operation stands for

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.plain:
            return self.head(h.cos())
        return self.head(torch.cond(h.sum() > 1e9, lambda h: h.sin(), lambda h: h.cos(), (h,)))


class Recurrence(nn.Module):
    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.input, self.step, self.head = *(nn.Linear(n, 5) for n in (3, 3, 5)), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), -1, 3)

        def step(carry: Tensor, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            after = parts[0] * torch.tanh(self.step(carry)) + parts[1]
            return after, after.clone()

        h, gates, inputs = x.new_zeros(len(x), 5), self.gate(x).sigmoid(), self.input(x)
        if not self.plain:
            return self.head(scan(step, h, (gates, inputs), dim=1)[0])
        for parts in zip(gates.unbind(1), inputs.unbind(1), strict=True):
            h, _ = step(h, parts)
        return self.head(h)


class Mapped(nn.Module):
    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return self.head(torch.tanh(x @ self.first.weight.T))
        return self.head(mapped(lambda row, w: torch.tanh(row[None] @ w.T)[0], x, self.first.weight))


class Loop(nn.Module):
    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return self.head(self._step(self._step(x)))
        start = torch.tensor(0)
        return self.head(while_loop(lambda n, h: n < 2, lambda n, h: (n + 1, self._step(h)), (start, x))[1])

    def _step(self, h: Tensor) -> Tensor:
        return torch.tanh(self.step(h))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(3, 16), nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), -1, 3)
        query, key = self.query(x)[:, None], self.key(x)[:, None]
        return self.head(flex_attention(query, key, key)[:, 0].mean(1))


def _expected(J: Tensor, J_test: Tensor) -> Tensor:
    """Standard deviations for noise precision 4 and prior precision 1, `[N]`."""
    J, J_test = J[:, 0], J_test[:, 0]
    H = 4 * J.T @ J + torch.eye(J.shape[1], dtype=J.dtype)
    return (J_test @ torch.linalg.inv(H) * J_test).sum(1).sqrt()


def _fitted(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> LinearisedLaplace:
    likelihood, prior = Gaussian(4.0, learn=False), IsotropicPrior(precision=1.0)
    la = LinearisedLaplace(model, likelihood, prior=prior, method="exact", **options)  # pyright: ignore
    return la.fit([(x, y)], progress=False)


@pytest.mark.parametrize("kind", [Branches, Recurrence, Mapped, Loop])
def test_error_bars_are_those_of_the_python_that_it_stands_for(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x, y = kind().double(), torch.randn(12, 6 if kind is Recurrence else 3).double(), torch.randn(12, 1).double()
    if kind is Mapped:
        model.first.bias.requires_grad_(False)  # pyright: ignore
    stddev = _fitted(model, x, y).predict(x[:4]).stddev.flatten()
    model.plain = True  # pyright: ignore
    J = reference.jacobian(model, x)
    assert_close(stddev, _expected(J, J[:4]), rtol=1e-8, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("parameters", ["last_layer", ["head.weight", "head.bias"], ["head.weight"]])
@pytest.mark.parametrize("kind", [Attention, Mapped, Branches, Recurrence])
def test_a_head_has_error_bars_whatever_is_before_it(
    kind: type[nn.Module], parameters: str | list[str], frozen: bool
) -> None:
    torch.manual_seed(0)
    model, x, y = kind().double(), torch.randn(12, 6), torch.randn(12, 1).double()
    x = (x[:, :3] if kind in (Branches, Mapped) else x).double()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or name.startswith("head"))
    stddev = _fitted(model, x, y, parameters=parameters).predict(x[:4]).stddev.flatten()
    inputs: list[Tensor] = []
    with torch.no_grad(), model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):  # pyright: ignore
        model(x)
    ones = torch.ones(12, 0 if parameters == ["head.weight"] else 1)
    J = torch.cat([inputs[0], ones.double()], 1)[:, None]
    assert_close(stddev, _expected(J, J[:4]), rtol=1e-8, atol=0)


@pytest.mark.parametrize("kind", [Branches, Recurrence, Mapped, Loop])
def test_what_is_inside_of_an_operation_counts(kind: type[nn.Module]) -> None:
    """Its operations are those of the Python that it stands for."""
    torch.manual_seed(0)
    model, x, y, plans = kind(), torch.randn(8, 6 if kind is Recurrence else 3), torch.randn(8, 1), []
    for plain in (False, True):
        model.plain = plain  # pyright: ignore
        plans.append(LinearisedLaplace(model, "regression", method="krylov").plan([(x, y)]))
    assert plans[0].epoch == plans[1].epoch
    assert plans[0].epochs == plans[1].epochs
