import torch
from cases import make_case
from torch.testing import assert_close

from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.tangent_model import noise_weights, weigh


def test_noise_variances_as_lists() -> None:
    assert_close(noise_weights([1.0, 4.0], (2, 3)), torch.tensor([[1.0] * 3, [0.5] * 3], dtype=torch.float64))


def test_weighted_features_are_the_rows_times_their_weights() -> None:
    model = make_case("regression_per_output").linear_model("affine")
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(model.offset.shape, generator=generator, dtype=torch.float64) + 0.5
    weighted = weigh(model, weights)
    rows = weights[..., None] * DenseFeatures.of(model.features).matrix
    assert_close(DenseFeatures.of(weighted.features).matrix, rows)
    v = torch.randn(2, rows.shape[2], generator=generator, dtype=torch.float64)
    batch = torch.tensor([4, 1])
    u = weighted.features.jvp(v, batch)
    assert_close(u, torch.einsum("ncp,kp->knc", rows[batch], v))
    assert_close(weighted.features.vjp(u, batch), torch.einsum("ncp,knc->kp", rows[batch], u))
    assert_close(weighted.targets, weights * model.targets)
    assert_close(weighted.outputs(v), weights * model.outputs(v))
