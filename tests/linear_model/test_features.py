import pytest
import torch
from cases import FEW_CASES, Case, make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.likelihoods.measurement import as_measurement
from laplace_sampling.linear_model.features import (
    DenseFeatures,
    Features,
    ObservedFeatures,
    ScaledFeatures,
    SomeFeatures,
    WeightedFeatures,
    row_blocks,
)
from laplace_sampling.linear_model.linear_model import noise_weights, weigh


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def check(features: Features, matrix: Tensor) -> None:
    """Compares all products of a batch with those of `Φ` itself, `[N, C, P]`."""
    batch = torch.tensor([2, 0])
    rows, v = matrix[batch], numbers(2, features.size)
    u = torch.einsum("ncp,kp->knc", rows, v)
    pulled = torch.einsum("ncp,knc->kp", rows, u)
    assert_close(features.jvp(v, batch), u)
    assert_close(features.vjp(u, batch), pulled)
    assert_close(features.ggn(v, batch, lambda f: 2 * f), 2 * pulled)
    each = torch.einsum("ncp,nc->np", rows, u[0])
    assert_close(features.vjp_each(u[0], batch), each)
    assert_close(features.datum_rows(u[0], batch).dense(), each)
    assert_close(features.rows(batch), rows)
    assert_close(DenseFeatures.of(features).matrix, matrix)
    assert_close(features.outputs(v), torch.einsum("ncp,kp->knc", matrix, v))


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_features_made_from_others(case: Case) -> None:
    features = case.linear_model().features
    dense = DenseFeatures.of(features)
    check(dense, dense.matrix)
    scale, T, some = numbers(features.size), numbers(2, features.num_outputs), torch.tensor([3, 0, 2])
    check(ScaledFeatures(features, scale), dense.matrix * scale)
    weights = numbers(*dense.matrix.shape[:2])
    check(WeightedFeatures(features, weights), weights[..., None] * dense.matrix)
    check(SomeFeatures(ScaledFeatures(features, scale), some), dense.matrix[some] * scale)
    check(ObservedFeatures(features, as_measurement(T, torch.zeros(1, features.num_outputs))), T @ dense.matrix)


def test_a_model_of_unequal_noise_is_that_of_whitened_targets() -> None:
    model = make_case("regression_per_output").linear_model("affine")
    weights, v = numbers(*model.offset.shape).exp(), numbers(2, model.features.size)
    weighted = weigh(model, weights)
    assert_close(weighted.targets, weights * model.targets)
    assert_close(weighted.outputs(v), weights * model.outputs(v))
    # Lists are taken as well.
    assert_close(noise_weights([1.0, 4.0], (2, 3)), torch.tensor([[1.0] * 3, [0.5] * 3], dtype=torch.float64))


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
