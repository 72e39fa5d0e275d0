from cases import make_case
from torch.testing import assert_close


def test_linear_model_keeps_its_parts() -> None:
    model = make_case("regression").linear_model("affine")
    weights = model.features.network.weights
    assert_close(model.outputs(weights[None])[0], model.network_outputs)
