"""Tasks on data from a folder, on files made up here."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from benchmarks.comparison import run
from benchmarks.comparison.training import augmented
from benchmarks.data import folder_tasks as module
from benchmarks.data.folder_tasks import folder_tasks, image_task
from benchmarks.data.image_sets import IMAGE_SETS
from benchmarks.data.tasks import Data

TRAIN, TEST = 60, 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images that are all different, and tables."""
    generator = np.random.default_rng(0)
    images = tmp_path / "images"
    (images / "not-mnist").mkdir(parents=True)
    for name, of in IMAGE_SETS.items():
        shape = (28, 28) if len(of.mean) == 1 else (32, 32, 3)
        parts = {"train": TRAIN, "test": TEST}
        x = {f"x_{part}": generator.integers(0, 256, (num, *shape), dtype=np.uint8) for part, num in parts.items()}
        y = {f"y_{part}": generator.integers(0, 10, num) for part, num in parts.items()}
        np.savez(images / of.file, **x, **y)
        assert name in module.OTHERS
    letters = generator.integers(0, 256, TEST * 28 * 28, dtype=np.uint8).tobytes()
    with gzip.open(images / "not-mnist" / "t10k-images-idx3-ubyte.gz", "wb") as file:
        file.write(bytes(16) + letters)
    small = tmp_path / "uci" / "yacht"
    small.mkdir(parents=True)
    np.savetxt(small / "data.txt", generator.normal(size=(90, 3)))
    for name, numbers in (("features", [0, 1]), ("target", [2]), ("train_0", range(80)), ("test_0", range(80, 90))):
        np.savetxt(small / f"index_{name}.txt", list(numbers), fmt="%d")
    large = tmp_path / "uci-large" / "bike"
    large.mkdir(parents=True)
    table = np.arange(200.0)[:, None] + np.array([0.0, 1000.0, 2000.0])
    np.savetxt(large / "data.csv.gz", table, delimiter=",")
    np.savetxt(large / "test_mask.csv.gz", np.arange(200)[:, None] % 10 == np.arange(2), fmt="%d", delimiter=",")
    return tmp_path


def rows(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row.tolist()) for row in x.flatten(1)}


def are_disjoint(data: Data) -> bool:
    parts = [rows(part.x) for part in (data.train, data.validation, data.test)]
    return (
        len(set().union(*parts))
        == sum(map(len, parts))
        == sum(len(p.y) for p in (data.train, data.validation, data.test))
    )


@pytest.mark.parametrize("name", IMAGE_SETS)
@pytest.mark.parametrize(("num", "held_out"), [(20, 4), (None, 12)])
def test_images(name: str, num: int | None, held_out: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CORRUPTED", 9)
    monkeypatch.setattr(module, "OTHER", 7)
    task = image_task(folder / "images", name, num)
    data, again, other = (task.load(seed) for seed in (0, 0, 1))
    shape = (3, 32, 32) if name == "CIFAR-10" else (1, 28, 28)
    assert data.train.x.shape == (num or TRAIN - held_out, *shape)
    assert [len(part.y) for part in (data.validation, data.test)] == [held_out, TEST]
    assert are_disjoint(data)
    assert torch.equal(data.train.x, again.train.x)
    assert not torch.equal(data.train.x, other.train.x)
    assert torch.equal(data.validation.x, other.validation.x)
    assert list(data.shifts) == [f"severity {s}" for s in range(1, 6)]
    assert all(part.x.shape == (9, *shape) for part in data.shifts.values())
    assert set(data.others) == set(module.OTHERS[name])
    assert all(x.shape == (7, *shape) for x in data.others.values())
    assert data.train.y.dtype == torch.long


def test_validation_images_are_the_last(folder: Path) -> None:
    data = image_task(folder / "images", "MNIST", 20).load(0)
    with np.load(folder / "images" / "mnist.npz") as file:
        last = (torch.tensor(file["x_train"][-4:]).float() / 255 - 0.1307) / 0.3081
    assert_close(data.validation.x[:, 0], last)


def test_the_gap_is_a_gap(folder: Path) -> None:
    task = folder_tasks(folder)["uci yacht, gap"]
    for seed in (0, 1):
        data = task.load(seed)
        assert are_disjoint(data)
        sizes = [len(part.y) for part in (data.train, data.validation, data.test, data.shifts["gap"])]
        assert sizes == [44, 10, 6, 30]
        inside = data.shifts["gap"].x[:, seed]
        for part in (data.train, data.validation, data.test):
            outside = part.x[:, seed]
            assert not ((outside > inside.min()) & (outside < inside.max())).any()
            assert (outside < inside.min()).any()
            assert (outside > inside.max()).any()


def test_large_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VALIDATION", 25)
    task = folder_tasks(folder)["uci bike"]
    data = task.load(1)
    assert [len(part.y) for part in (data.train, data.validation, data.test)] == [155, 25, 20]
    assert data.train.x.shape[1] == 2
    assert are_disjoint(data)
    # of a table whose columns are the row and a constant, inputs and targets are the same number in other units
    assert_close(data.test.x[:, :1], data.test.y, atol=1e-4, rtol=1e-4)
    with np.load(folder / "images" / "mnist.npz"):
        first = data.test.y.flatten().argsort()[0]
    spacing = (data.test.y.max() - data.test.y.min()) / 19
    assert_close(data.test.y.flatten().sort().values.diff(), spacing.expand(19), atol=1e-4, rtol=0)
    assert first == 0


def test_halves_have_tasks_and_methods() -> None:
    tasks = folder_tasks(Path("nowhere"))
    seen: dict[str, set[str]] = {}
    for name in ("first", "second"):
        suite = run.SUITES[name]
        left = list(run.units(suite))
        assert {unit.case.name for unit in left} == {case.name for case in suite.cases}
        assert len({(unit.case.name, unit.seed) for unit in left}) == len(left)
        assert set(suite.tiers or {}) <= set(run.METHODS)
        seen[name] = {unit.case.task for unit in left}
    assert not seen["first"] & seen["second"]
    assert seen["second"] <= set(tasks)
    digits = [u for u in run.units(run.SUITES["first"]) if u.case.task.startswith("digits")]
    assert len(digits) == 12
    assert len({(u.case.name, u.seed) for u in run.units(run.SUITES["first"].with_seeds(1))}) < len(seen) + 100


def test_augmented_images_are_shifted_and_mirrored() -> None:
    x = torch.randn(200, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    assert augmented(x, "", torch.Generator()) is x
    inner = slice(2, -2)

    def found(how: str) -> tuple[int, int]:
        """How many keep their inner pixels, and how many have those of the mirrored image, for any shift."""
        moved = augmented(x, how, torch.Generator().manual_seed(0))
        assert moved.shape == x.shape
        counts = []
        for base in (x, x.flip(-1)):
            same = torch.zeros(len(x), dtype=torch.bool)
            for rows in range(-2, 3):
                for columns in range(-2, 3):
                    rolled = base.roll((rows, columns), (2, 3))
                    same |= (moved[..., inner, inner] == rolled[..., inner, inner]).all((1, 2, 3))
            counts.append(int(same.sum()))
        return counts[0], counts[1]

    assert found("shifts") == (200, 0)
    plain, mirrored = found("shifts and flips")
    assert plain + mirrored == 200
    assert 70 < mirrored < 130
