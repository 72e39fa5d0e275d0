"""The Gram matrix of the tangent kernel, against the dense Jacobian."""

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.gp.gram import cross_gram, gram, gram_blocks, gram_flops
from laplace_sampling.linear_model.features import DenseFeatures, Features, row_blocks
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.networks.linearisation import Linearisation


def variances(size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1


def jacobian(case: Case, x: Tensor | None = None) -> Tensor:
    """`[N·C, P]`."""
    return reference.jacobian(case.model, case.x if x is None else x).flatten(0, 1)


@covering(rest=False, indirect=["case"], case=CASES, products=["rows", "jvp", "auto"], block_bytes=[400.0, 2000.0, 1e9])
def test_gram_is_that_of_the_jacobian(case: Case, products: str, block_bytes: float) -> None:
    features, J = case.linear_model().features, jacobian(case)
    v = variances(features.size)
    K = gram(features, v, products=products, block_bytes=block_bytes)
    assert torch.equal(K, K.T)
    assert_close(K, (J * v) @ J.T)
    assert torch.linalg.eigvalsh(K)[0] > -1e-12 * K.diagonal().max()


@covering(rest=False, indirect=["case"], case=CASES, products=["rows", "jvp"], block_bytes=[400.0, 2000.0, 1e9])
def test_cross_gram_and_blocks(case: Case, products: str, block_bytes: float) -> None:
    features, J = case.linear_model().features, jacobian(case)
    x = case.x[:3] + 0.1
    network = Linearisation(case.model)
    other, J_other = features_at(network, x, 2), jacobian(case, x)
    v = variances(features.size)
    K = cross_gram(other, features, v, products=products, block_bytes=block_bytes)
    assert_close(K, (J_other * v) @ J.T)
    blocks = gram_blocks(other, v, block_bytes=block_bytes)
    C = features.num_outputs
    for i, block in enumerate(blocks):
        rows = J_other[i * C : (i + 1) * C]
        assert_close(block, (rows * v) @ rows.T)


def test_dense_features_are_left_as_they_are() -> None:
    features = DenseFeatures.of(make_case("classification").linear_model().features)
    before = features.matrix.clone()
    gram(features, variances(features.size))
    cross_gram(features, features, variances(features.size))
    gram_blocks(features, variances(features.size))
    assert torch.equal(features.matrix, before)


def test_blocks_of_rows_have_the_size_that_was_given() -> None:
    features = make_case("image_regression").linear_model().features
    for block_bytes in (1, 5 * 8 * features.size, 40 * 8 * features.size):
        limit = max(1, block_bytes // (8 * features.size))
        blocks = list(row_blocks(features, block_bytes))
        assert all(len(rows) <= limit for _, rows in blocks)
        assert [first for first, _ in blocks] == torch.tensor([0, *(len(r) for _, r in blocks)]).cumsum(0)[:-1].tolist()
        assert sum(len(rows) for _, rows in blocks) == features.num_data * features.num_outputs


def test_the_full_jacobian_is_never_held() -> None:
    """No more rows are asked for at once than a block has."""
    case = make_case("regression_many_data")
    features = case.linear_model().features
    asked = []

    class Watched(DenseFeatures):
        def rows(self, batch: Tensor) -> Tensor:
            asked.append(len(batch))
            return super().rows(batch)

    watched = Watched(DenseFeatures.of(features).matrix, batch_size=20)
    block_bytes = 2 * 4 * 8 * features.size
    gram(watched, variances(features.size), products="rows", block_bytes=block_bytes)
    assert max(asked) == 4


def test_the_cheaper_products_are_chosen() -> None:
    """Many outputs of few multiplications are cheap to push through, the Jacobian of one is cheap to contract."""

    def of(model: nn.Module, x: Tensor) -> Features:
        return features_at(Linearisation(model.double()), x.double())

    def choice(features: Features) -> str:
        network = features.network
        network.products = {"jvp": 0, "vjp": 0}
        gram(features, torch.ones(features.size))
        return "rows" if network.products["jvp"] < 20 else "jvp"

    many = of(nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 60)), torch.ones(20, 5))
    few = of(nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 1)), torch.ones(20, 5))
    image = of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2)), torch.ones(20, 1, 8, 8))
    assert [choice(f) for f in (many, few, image)] == ["jvp", "rows", "rows"]


def test_operations_are_counted() -> None:
    """A linear layer takes one product a tangent of its weights, one a gradient of them, and one a forward pass."""
    model = nn.Linear(7, 3, bias=False).double()
    features = features_at(Linearisation(model), torch.ones(11, 7, dtype=torch.float64))
    layer, num = 2 * 7 * 3, 11 * 3
    rows = 3 * (layer + layer / 2)  # two gradients share a forward pass
    flops = gram_flops(features)
    assert flops["jvp"] == 11 * rows + 0.5 * num * 11 * layer
    assert flops["rows"] == 11 * rows + 2 * num**2 * 21
    # With blocks of one row the Jacobian is computed again for each.
    assert gram_flops(features, 2 * 8 * 21)["rows"] == 11 * rows * 17 + num**2 * 21 * (1 + 1 / 33)


def test_an_unknown_way_is_refused() -> None:
    features = make_case("regression").linear_model().features
    with pytest.raises(ValueError, match="products"):
        gram(features, variances(features.size), products="both")
