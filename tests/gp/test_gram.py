"""The Gram matrix of the tangent kernel, against the dense Jacobian."""

import reference
import torch
from cases import CASES, Case, make_case
from grids import covering
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.gp.posterior import cross_gram, gram, gram_blocks
from laplace_sampling.linear_model.features import DenseFeatures, features_at, row_blocks
from laplace_sampling.networks.linearisation import Linearisation


def variances(size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1


def jacobian(case: Case, x: Tensor | None = None) -> Tensor:
    """`[N·C, P]`."""
    return reference.jacobian(case.model, case.x if x is None else x).flatten(0, 1)


@covering(rest=False, indirect=["case"], case=CASES, block_bytes=[400.0, 2000.0, 1e9])
def test_gram_is_that_of_the_jacobian(case: Case, block_bytes: float) -> None:
    features, J = case.linear_model().features, jacobian(case)
    v = variances(features.size)
    K = gram(features, v, block_bytes=block_bytes)
    assert torch.equal(K, K.T)
    assert_close(K, (J * v) @ J.T)
    assert torch.linalg.eigvalsh(K)[0] > -1e-12 * K.diagonal().max()


@covering(rest=False, indirect=["case"], case=CASES, block_bytes=[400.0, 2000.0, 1e9])
def test_cross_gram_and_blocks(case: Case, block_bytes: float) -> None:
    features, J = case.linear_model().features, jacobian(case)
    x = case.x[:3] + 0.1
    network = Linearisation(case.model)
    other, J_other = features_at(network, x, 2), jacobian(case, x)
    v = variances(features.size)
    K = cross_gram(other, features, v, block_bytes=block_bytes)
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
    gram(watched, variances(features.size), block_bytes=block_bytes)
    assert max(asked) == 4
