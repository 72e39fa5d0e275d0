"""Samples in half precision in files and in objects, and as many samples as an accuracy takes."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_case
from flat_settings import loader
from kernels import kernels_of
from torch import nn

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.resources import TensorBytes

HALVES = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def fitted(name: str = "classification", num_samples: int = 40, **settings: Any) -> tuple[LinearisedLaplace, Any]:
    case = make_case(name)
    la = LinearisedLaplace(case.model, case.likelihood, num_samples=num_samples, **settings)
    return la.fit(loader(case), progress=False), case.x


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("name", "parameters"), [("classification", None), ("regression", None), ("classification", "last_layer")]
)
def test_predictions_of_half_samples(dtype: torch.dtype, name: str, parameters: Any) -> None:
    la, x = fitted(name, parameters=parameters, method="krylov")
    file = io.BytesIO()
    la.save(file, dtype=dtype)
    file.seek(0)
    loaded = LinearisedLaplace.load(file, la.network.source)
    stored = loaded._fitted.posterior.samples  # pyright: ignore
    assert stored.rows.dtype == dtype
    assert loaded.samples_.dtype == la.samples_.dtype
    scale = la.samples_.abs().amax(1, keepdim=True)
    # Numbers are rounded relative to themselves; those of float16 below 2⁻¹⁴ of the largest relative to that.
    bound = HALVES[dtype] * (la.samples_.abs() + (2**-14 * scale if dtype == torch.float16 else 0))
    assert bool(((loaded.samples_ - la.samples_).abs() <= bound).all())
    expected, found = la.predict(x), loaded.predict(x)
    assert torch.equal(found.outputs, expected.outputs)
    assert bool(((found.stddev / expected.stddev - 1).abs() <= HALVES[dtype]).all())
    assert not torch.equal(found.stddev, expected.stddev)
    few = loaded.predict(x, num_samples=7)
    assert (
        torch.equal(few.deviations, found.deviations[:7])
        or (few.deviations - found.deviations[:7]).norm() < 1e-5 * few.deviations.norm()
    )


def test_half_samples_are_saved_again_as_they_are(tmp_path: Path) -> None:
    la, x = fitted(method="krylov")
    half = LinearisedLaplace(la.network.source, la.settings.likelihood)
    half.load_state_dict(la.state_dict(dtype=torch.float16))
    half.save(tmp_path / "again.pt")
    again = LinearisedLaplace.load(tmp_path / "again.pt", la.network.source)
    assert torch.equal(again.predict(x).deviations, half.predict(x).deviations)
    assert again._fitted.posterior.samples.rows.dtype == torch.float16  # pyright: ignore
    assert "samples" not in again.state_dict()
    assert torch.equal(half.predict(x).outputs, la.predict(x).outputs)


def test_files_of_large_networks_are_half_as_large() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(6, 20), nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 1))
    la = LinearisedLaplace(model, "regression", num_samples=64, method="kfac").fit([(x, x[:, :1])], progress=False)
    sizes = []
    for dtype in (None, torch.float16, torch.bfloat16):
        file = io.BytesIO()
        la.save(file, dtype=dtype)
        sizes.append(sum(t.numel() * t.element_size() for name, t in la.state_dict(dtype).items() if "samples" in name))
    assert sizes[1] == sizes[2] == sizes[0] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, "half"])
def test_other_precisions(dtype: Any, tmp_path: Path) -> None:
    la, _ = fitted(method="krylov", num_samples=2)
    with pytest.raises(ValueError, match=r"save\(dtype"):
        la.save(tmp_path / "la.pt", dtype=dtype)
    with pytest.raises(ValueError, match=r"state_dict\(dtype"):
        la.state_dict(dtype)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_predictions_hold_no_more_than_batches_of_the_fit(dtype: torch.dtype | None) -> None:
    """The largest tensor of a prediction of many data is the prediction itself, `[K, N, C]`."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 2)), torch.randn(8, 3)
    la = LinearisedLaplace(model, "regression", num_samples=4, method="kfac")
    la.fit([(x[i : i + 1], torch.randn(1, 2)) for i in range(8)], progress=False)
    if dtype is not None:
        la.load_state_dict(la.state_dict(dtype))
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
