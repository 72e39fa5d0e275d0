"""Networks with operations of torch that call functions: `cond`, `while_loop`, `flex_attention`."""

import pytest
import torch
from torch import Tensor, nn
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
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(torch.cond(h.sum() > 1e9, lambda h: h.sin(), lambda h: h.cos(), (h,)))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        start = (torch.tensor(0), x)
        return self.head(while_loop(lambda n, h: n < 2, lambda n, h: (n + 1, self.step(h).tanh()), start)[1])


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


@pytest.mark.parametrize("kind", [Branches, Loop])
def test_control_flow_is_refused(kind: type[nn.Module]) -> None:
    """torch takes the derivative of `while_loop` for zero, and says nothing."""
    with pytest.raises(NotImplementedError, match="in Python"):
        _fitted(kind().double(), torch.randn(12, 3).double(), torch.randn(12, 1).double())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("parameters", ["last_layer", ["head.weight", "head.bias"], ["head.weight"]])
def test_a_head_has_error_bars_behind_flex_attention(parameters: str | list[str], frozen: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Attention().double(), torch.randn(12, 6).double(), torch.randn(12, 1).double()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or name.startswith("head"))
    stddev = _fitted(model, x, y, parameters=parameters).predict(x[:4]).stddev.flatten()
    inputs: list[Tensor] = []
    with torch.no_grad(), model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):  # pyright: ignore
        model(x)
    ones = torch.ones(12, 0 if parameters == ["head.weight"] else 1)
    J = torch.cat([inputs[0], ones.double()], 1)[:, None]
    assert_close(stddev, _expected(J, J[:4]), rtol=1e-8, atol=0)
