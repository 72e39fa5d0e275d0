import pytest
import torch
from cases import FEW_CASES, Case
from torch.testing import assert_close

from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures, row_blocks


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_dense_and_scaled_features_give_the_same_products(case: Case) -> None:
    features = case.linear_model().features
    scale = torch.rand(features.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    dense_features, scaled = DenseFeatures.of(features), ScaledFeatures(features, scale)
    v = torch.randn(2, features.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = torch.tensor([2, 0])
    u = features.jvp(v, batch)
    assert_close(dense_features.jvp(v, batch), u)
    assert_close(dense_features.vjp(u, batch), features.vjp(u, batch))
    assert_close(scaled.jvp(v, batch), features.jvp(v * scale, batch))
    assert_close(scaled.vjp(u, batch), features.vjp(u, batch) * scale)
    assert_close(scaled.rows(batch), features.rows(batch) * scale)
    assert_close(dense_features.outputs(v), features.outputs(v))


def test_blocks_of_rows_are_the_jacobian(case: Case) -> None:
    """Blocks of several data, and blocks of some outputs of one datum."""
    features = case.linear_model().features
    rows = DenseFeatures.of(features).matrix.flatten(0, 1)
    for num_rows in (2 * features.num_outputs, 1):
        blocks = list(row_blocks(features, 8 * features.size * num_rows, start=1))
        assert max(len(block) for _, block in blocks) <= num_rows
        assert blocks[0][0] == features.num_outputs
        assert_close(torch.cat([block for _, block in blocks]), rows[features.num_outputs :])
    assert list(row_blocks(features, start=features.num_data)) == []
