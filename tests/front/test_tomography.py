"""The examples of inverse problems."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tomography() -> ModuleType:
    return example("tomography")


def test_shadows_along_the_axes_are_sums_of_columns_and_rows(tomography: ModuleType) -> None:
    image = np.random.default_rng(0).random((12, 12)).astype(np.float32)
    T = tomography.projector(12, np.array([0, np.pi / 2]), 12)
    sums = (T @ image.ravel()).reshape(2, 12)
    np.testing.assert_allclose(sums[0], image.sum(0), rtol=1e-5)
    np.testing.assert_allclose(sums[1], image.sum(1), rtol=1e-5)
    moved = tomography.projector(12, np.array([0]), 12, centre=5.5 - 2) @ image.ravel()
    np.testing.assert_allclose(moved[:10], sums[0][2:], rtol=1e-5)


def numbers(line: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.?\d*", line)]


@pytest.mark.parametrize("noise", ["known", "residuals", "held-out"])
def test_a_phantom_gets_error_bars_that_know_where_it_is_wrong(
    tomography: ModuleType, noise: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    arguments = ["--side", "20", "--angles", "10", "--steps", "250", "--samples", "64", "--noise", noise]
    tomography.main([*arguments, "--picture", str(picture)])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert picture.stat().st_size > 1000
    pixels, *_ = numbers(next(line for line in lines if line.startswith("log-likelihood of a pixel")))
    constant, _ = numbers(next(line for line in lines if "constant" in line))
    assert pixels > constant
    # 200 pixels of the object, of which the intervals of 90 % hold at least half.
    assert numbers(lines[-1])[1] > 50


def test_the_tooth_is_read_about_its_axis_of_rotation(
    tomography: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file of known sums, whose axis is where the real one's is: all angles together give the image."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    side, num = 16, 40
    truth = tomography.phantom(side, 4, 0.0, 1).truth
    width = 640 // side
    T = tomography.projector(side, np.arange(num) * np.pi / num, side, (295.5 - (width - 1) / 2) / width)
    sums = (T @ truth.ravel()).reshape(num, 1, side).repeat(width, 2) / side
    file = tmp_path / "tooth.h5"
    with h5py.File(file, "w") as data:
        white, dark = np.full((2, 1, 640), 1000.0), np.full((2, 1, 640), 10.0)
        parts = {"data": 10 + 990 * np.exp(-sums), "data_white": white, "data_dark": dark}
        for name, values in parts.items():
            data[f"exchange/{name}"] = values
    found = tomography.tooth(file, side, 10)
    np.testing.assert_allclose(found.truth, truth / truth.max(), atol=0.15)
    assert np.corrcoef(found.truth.ravel(), truth.ravel())[0, 1] > 0.98
    assert found.T.shape == (10 * side, side**2)
    tomography.main(["--tooth", str(file), "--side", "16", "--angles", "10", "--steps", "100", "--samples", "32"])
    assert "measurements from other angles" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tomography.main(["--tooth", str(file), "--side", "16", "--angles", "10", "--noise", "known"])


def test_a_blurred_picture_gets_error_bars(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("deepinv", reason="deepinv is not installed")
    picture = tmp_path / "picture.png"
    example("deblurring").main(["--side", "16", "--steps", "200", "--picture", str(picture)])
    text = capsys.readouterr().out
    assert picture.stat().st_size > 1000
    ours, blurred = numbers(next(line for line in text.splitlines() if line.startswith("root mean")))
    assert ours < blurred
