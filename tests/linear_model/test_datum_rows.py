"""Rows of each datum by layers, and their products, beside the dense Jacobian in float64."""

import pytest
import reference
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.linear_model.features import DatumRows, Features, ScaledFeatures, SomeFeatures, features_at
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.memory import Operations


def check(features: Features, jacobian: Tensor) -> DatumRows:
    """Compares rows along random cotangents with those of a Jacobian, `[N, C, P]`."""
    u = torch.randn(jacobian.shape[:2], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = torch.arange(len(u)).split(features.batch_size)
    rows, expected = (
        DatumRows.cat([features.datum_rows(u[part], part) for part in parts]),
        torch.einsum("nc,ncp->np", u, jacobian),
    )
    assert_close(rows.dense(), expected)
    assert_close(rows.products(rows), expected @ expected.T)
    assert_close(rows.squares(), expected.square().sum(1))
    assert_close(rows.products(DatumRows(features.size, expected[:2])), expected @ expected[:2].T)
    return rows


def test_rows_are_those_of_the_jacobian(case: Case) -> None:
    check(case.linear_model().features, reference.jacobian(case.model, case.x))


@pytest.fixture
def network() -> tuple[nn.Module, Tensor]:
    """Convolutions, in groups as well, batch norm with statistics of its own, and linear layers."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3),
    ).double()  # fmt: skip
    module.train()(torch.randn(20, 1, 8, 8, dtype=torch.float64))
    return module.eval(), torch.randn(9, 1, 8, 8, dtype=torch.float64)


def test_linear_layers_stay_factored(network: tuple[nn.Module, Tensor]) -> None:
    module, x = network
    features = features_at(Linearisation(module), x, batch_size=4)
    rows = check(features, reference.jacobian(module, x))
    assert [tuple(index.shape) for index, _, _ in rows.outer] == [(12, 37), (3, 13)]
    assert rows.width == rows.formed.shape[1] + 12 + 37 + 3 + 13 < features.size / 2


def test_rows_of_some_data_and_of_scaled_features(network: tuple[nn.Module, Tensor]) -> None:
    module, x = network
    features, jacobian = features_at(Linearisation(module), x, batch_size=4), reference.jacobian(module, x)
    some = torch.tensor([5, 0, 7])
    assert check(SomeFeatures(features, some), jacobian[some]).outer
    even, uneven = torch.full((features.size,), 0.3), torch.linspace(0.1, 2, features.size)
    assert check(ScaledFeatures(features, even.double()), 0.3 * jacobian).outer
    assert not check(ScaledFeatures(features, uneven.double()), uneven.double() * jacobian).outer


def test_rows_times_a_scale_of_each_weight(network: tuple[nn.Module, Tensor]) -> None:
    module, x = network
    features, every = features_at(Linearisation(module), x), torch.arange(9)
    rows = features.datum_rows(torch.ones(9, 3, dtype=torch.float64), every)
    even, uneven = torch.full((features.size,), 0.3).double(), torch.linspace(0.1, 2, features.size).double()
    assert rows.scaled(even).outer
    assert_close(rows.scaled(even).dense(), 0.3 * rows.dense())
    assert_close(rows.scaled(uneven).dense(), uneven * rows.dense())


def test_a_row_takes_a_forward_and_a_backward_pass(network: tuple[nn.Module, Tensor]) -> None:
    """One VJP of each datum, and no more operations than a gradient of all data and the rows that are formed."""
    module, x = network
    features, every = features_at(Linearisation(module), x), torch.arange(9)
    u = torch.ones(9, 3, dtype=torch.float64)
    features.datum_rows(u, every)  # finds the layers
    before = features.network.products["vjp"]
    with Operations() as of_rows:
        features.datum_rows(u, every)
    assert features.network.products["vjp"] - before == 9
    with Operations() as of_gradient:
        features.vjp(u[None], every)
    # Layers in groups are counted once more by torch.
    assert of_rows.count <= 1.3 * of_gradient.count


class Tied(nn.Module):
    """A weight that is used by a layer, and by an operation that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias).tanh() @ self.layer.weight


class Twice(nn.Module):
    """A layer that is used twice by data whose first input is positive, else once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        once = self.layer(x).tanh()
        return self.layer(once) if bool((x[:, 0] > 0).all()) else once


class Experts(nn.Module):
    """Two layers, of which each datum takes one by the sign of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        taken = x[:, 0] > 0
        places = torch.cat([taken.nonzero(), (~taken).nonzero()])[:, 0]
        return torch.cat([self.positive(x[taken]), self.negative(x[~taken])])[places.argsort()].tanh()


class Gated(nn.Module):
    """As many places as data, which go first; the gradient is zero where the first input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.T[..., None]).tanh() * (x[:, 0] > 0)[:, None]).sum(0)


@pytest.mark.filterwarnings("ignore:Jacobians of (Twice|Experts)")
@pytest.mark.parametrize("module", [Tied, Twice, Experts, Gated])
def test_weights_that_are_used_in_another_way(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network, x = module().double(), torch.randn(8, 4, dtype=torch.float64)
    x[:4, 0], x[4:, 0] = x[:4, 0].abs(), -x[4:, 0].abs()
    for inputs in (x, x[[0, 1, 2, 3, 4, 5, 0, 1]], x.flip(0)):
        jacobian = torch.cat([reference.jacobian(network, part) for part in inputs.split(4)])
        check(features_at(Linearisation(network), inputs, batch_size=4), jacobian)


class Extended(Tied):
    """The user may switch the second use of the weight on."""

    again = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.again else self.layer(x).tanh()
