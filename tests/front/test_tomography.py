"""The example of an inverse problem."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.slow

PATH = Path(__file__).parents[2] / "examples" / "tomography.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("tomography", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_radon_transform_sums_columns_and_rows(example) -> None:
    T, image = example.radon(2), torch.rand(28, 28, generator=torch.Generator().manual_seed(0))
    sums = (T @ image.flatten()).reshape(2, 28)
    assert_close(sums[0], image.sum(0), rtol=1e-5, atol=1e-5)
    assert_close(sums[1].sort().values, image.sum(1).sort().values, rtol=1e-4, atol=1e-3)


def test_the_example_runs_and_its_preconditioner_pays(
    example, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(example, "SIDE", 12)
    picture = tmp_path / "picture.png"
    arguments = ["--angles", "10", "--steps", "60", "--rank", "80", "--smoothness", "0.3", "--picture", str(picture)]
    example.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert picture.stat().st_size > 1000
    assert any(line.startswith("90% intervals hold") for line in lines)
    with_rank, without = (int(line.split(": ")[1].split(" ")[0]) for line in lines if line.startswith("rank "))
    # Eight samples, and a preconditioner of 80 products.
    assert with_rank - 80 <= 8 * 14 < without
