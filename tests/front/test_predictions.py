"""As many samples as an accuracy takes, and what predictions take."""

import math
from typing import Any

import pytest
import torch
from cases import make_case
from flat_settings import loader
from kernels import kernels_of
from torch import nn

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.memory import TensorBytes


def fitted(name: str = "classification", num_samples: int = 40, **settings: Any) -> tuple[LinearisedLaplace, Any]:
    case = make_case(name)
    la = LinearisedLaplace(case.model, case.likelihood, num_samples=num_samples, **settings)
    return la.fit(loader(case), progress=False), case.x


def test_samples_that_an_accuracy_takes() -> None:
    la, x = fitted(method="krylov", num_samples=50)
    for accuracy, num in ((0.1, 50), (0.125, 32), (0.5, 2), (1.0, 1)):
        assert len(la.predict(x, accuracy=accuracy).deviations) == num == math.ceil(1 / (2 * accuracy**2))
    assert torch.equal(la.predict(x, accuracy=0.25).deviations, la.predict(x, num_samples=8).deviations)
    with pytest.raises(ValueError, match="num_samples=200"):
        la.predict(x, accuracy=0.05)
    with pytest.raises(ValueError, match=r"num_samples=\.\.\."):
        la.predict(x, accuracy=0.5, num_samples=4)
    with pytest.raises(ValueError, match="accuracy"):
        la.predict(x, accuracy=0)


def test_predictions_hold_no_more_than_batches_of_the_fit() -> None:
    """The largest tensor of a prediction of many data is the prediction itself, `[K, N, C]`."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 2)), torch.randn(8, 3)
    la = LinearisedLaplace(model, "regression", num_samples=4, method="kfac")
    la.fit([(x[i : i + 1], torch.randn(1, 2)) for i in range(8)], progress=False)
    many = torch.randn(200, 3)
    la.predict(many)
    with TensorBytes() as made:
        la.predict(many)
    deviations = 4 * 200 * 2 * 4
    # All data together have hidden units of 320 kB, and 1.3 MB for the samples; the samples themselves take 38 kB.
    assert max(made.sizes) <= max(deviations, 4 * la.network.num_parameters * 4)


def test_kernels_of_a_prediction_beside_those_of_its_products() -> None:
    la, x = fitted("classification", method="krylov", num_samples=4)
    one, samples = x[:1], la.samples_
    la.predict(one)
    beside = kernels_of(lambda: la.predict(one)) - kernels_of(lambda: la.network.jvp(one, samples))
    beside -= kernels_of(lambda: la.network.evaluate(one))
    # The seal takes one product for each large block and three for all small tensors, and a detached view of none.
    assert beside <= 30


@pytest.mark.parametrize("name", ["regression", "classification"])
def test_a_printed_prediction_shows_its_outputs_and_nothing_of_the_training_data(name: str) -> None:
    la, x = fitted(name, method="exact")
    pred = la.predict(x[:2])
    shown = repr(pred)
    assert shown.startswith(f"{type(pred).__name__}(outputs=tensor(")
    assert "function" not in shown
    assert "sampled" not in shown
